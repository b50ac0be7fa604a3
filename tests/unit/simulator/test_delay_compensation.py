"""DC-ASGD in virtual time: the weights follow from the trace by the published formula, and ASP's decisions stay."""

import numpy as np
import pytest
import torch

from hpcsync.core.job_validation import check
from hpcsync.training.optimizers import OptimizerSpec
from hpcsync.training.update_rules import DelayCompensated, Descent, of_job
from tests.plain import delay_compensated as recomputed
from tests.unit.jobs import LINEAR, make_job
from tests.unit.simulator.running import failed, simulate

FORMS = {"constant": (0.3, None), "adaptive": (0.5, 0.9)}
EVENTS = [
    {"change": "leave", "worker": 1, "at_s": 6.0},
    {"change": "join", "worker": 1, "at_s": 12.0},
]


def job(paradigm, workers=3, momentum=0.0, **tables):
    more = tables.pop("cluster", {})
    return make_job(
        workload={**LINEAR, "noise": 1.0},
        optimizer={"name": "sgd", "lr": 0.05, "momentum": momentum},
        stop={"updates": 40},
        paradigm={"name": "asp", **paradigm},
        cluster={
            "workers": workers,
            "compute": {"model": "constant", "seconds": [1.0 + 0.7 * worker for worker in range(workers)]},
            **more,
        },
        **tables,
    )


def compensated(form, **options):
    strength, decay = FORMS[form]
    return {"compensation": form, "strength": strength, **({} if decay is None else {"mean_decay": decay}), **options}


def simulated(job, path):
    workload = check(job)
    trace = simulate(job, path, workload)
    assert failed(trace) == []
    return trace, torch.cat([p.detach().flatten() for p in workload.model.parameters()]).numpy()


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("form", FORMS)
def test_the_weights_are_those_of_the_published_formula(tmp_path, form, workers):
    this = job(compensated(form), workers)
    trace, weights = simulated(this, tmp_path / "trace.h5")
    np.testing.assert_allclose(weights, recomputed(this, trace, *FORMS[form]), rtol=0, atol=1e-12)
    without = recomputed(this, trace, 0.0, None)
    assert (np.abs(weights - without).max() > 1e-6) == (workers > 1), "one worker alone has no delay"


@pytest.mark.parametrize("form", FORMS)
def test_with_momentum_departures_and_joins(tmp_path, form):
    this = job(compensated(form), 3, 0.9, cluster={"events": EVENTS})
    trace, weights = simulated(this, tmp_path / "trace.h5")
    assert len(trace.tables["membership"]) >= 2
    np.testing.assert_allclose(weights, recomputed(this, trace, *FORMS[form]), rtol=0, atol=1e-12)


def test_with_strength_0_it_is_asp_to_the_bit(tmp_path):
    runs = {
        name: simulated(job(options), tmp_path / f"{name}.h5")
        for name, options in {
            "asp": {},
            "zero": compensated("constant", strength=0.0),
            "adaptive-zero": compensated("adaptive", strength=0.0),
            "tiny": compensated("constant", strength=1e-6),
        }.items()
    }
    asp = runs["asp"]
    for name in ("zero", "adaptive-zero"):
        assert np.array_equal(runs[name][1], asp[1])
        for table, rows in asp[0].tables.items():
            assert rows.tobytes() == runs[name][0].tables[table].tobytes()
    assert not np.array_equal(runs["tiny"][1], asp[1])


def test_the_decisions_are_those_of_asp(tmp_path):
    asp, other = (
        simulated(job(options), tmp_path / f"{i}.h5")[0] for i, options in enumerate(({}, compensated("adaptive")))
    )
    asp.tables["updates"]["gradient_sq"] = other.tables["updates"]["gradient_sq"]  # of the corrected gradients
    for table in ("grants", "updates", "membership"):
        assert asp.tables[table].tobytes() == other.tables[table].tobytes()


@pytest.mark.parametrize("form", FORMS)
def test_compressed_gradients_are_corrected_as_the_servers_decode_them(tmp_path, form):
    """The number of servers changes no bit, and neither does half precision more than its rounding."""
    runs = [
        simulated(
            job(compensated(form), compression={"name": "fp16"}, cluster={"servers": servers}),
            tmp_path / f"{servers}.h5",
        )[1]
        for servers in (1, 2, 3)
    ]
    assert np.array_equal(runs[0], runs[1])
    assert np.array_equal(runs[0], runs[2])
    dense = simulated(job(compensated(form)), tmp_path / "dense.h5")[1]
    assert 0 < np.abs(runs[0] - dense).max() < 1e-2


def test_the_servers_run_the_rule_of_the_job():
    spec = OptimizerSpec("sgd", 0.1).on_server
    assert type(of_job(make_job(paradigm={"name": "asp"}), spec)) is Descent
    assert type(of_job(make_job(paradigm={"name": "asp", "compensation": "constant"}), spec)) is DelayCompensated
    assert type(of_job(make_job(paradigm={"name": "asp", "compensation": "constant", "strength": 0}), spec)) is Descent
