from __future__ import annotations

from hpcsync.bench import prediction
from hpcsync.training.speed_models import PREDICTORS


def test_every_predictor_is_compared_with_the_last_value_on_every_series(monkeypatch):
    monkeypatch.setattr(prediction, "SCORED_FROM", 12)  # as soon as the network is used
    figures = prediction.measure(n=15, repetitions=2)
    errors = [figure for figure in figures if figure.what.startswith("error")]
    assert len(errors) == len(prediction.SERIES) * (1 + 2 * (len(PREDICTORS) - 2))
    for figure in errors:
        assert figure.limit == "the last value" and len(figure.values) == len(figure.limits) == len(prediction.SEEDS)
        assert all(0 < value < 100 for value in (*figure.values, *figure.limits))
    assert "constant: smoothing, iterations of 20 ms (mean" in errors[0].what


def test_the_cost_is_that_of_an_observation_beside_an_iteration():
    smoothing, unbounded, bounded = prediction.costs(n=20, repetitions=2)
    assert smoothing.ratio < unbounded.ratio
    assert smoothing.limits == unbounded.limits == bounded.limits == [20_000.0] * 2
    assert bounded.aim == 0.01


def test_an_error_is_relative_to_the_observed_speed():
    speeds = [100.0] * prediction.SCORED_FROM + [200.0]
    assert prediction.error("last", speeds, seed=1) == 0.5
    assert prediction.error("last", [*speeds, 100.0], seed=1) == 0.75
