"""The reproduction on text: methods share problem and cluster, verdicts say what results say, a run can be measured."""

import math

import pandas as pd
import pytest
from rich.console import Console

from reproductions import text
from reproductions.claims import judged
from reproductions.simulating import simulate_all


def test_methods_differ_in_paradigm_batches_and_rate_alone():
    made = {method: text.job(method, 0.5, 7) for method in text.METHODS}
    one = made["BSP"]
    for method, job in made.items():
        assert (job.workload, job.cluster.compute, job.stop, job.optimizer.schedule) == (
            one.workload,
            one.cluster.compute,
            one.stop,
            one.optimizer.schedule,
        )
        assert job.optimizer.lr == 0.5 * text.LR
        assert (job.batches.policy == "equal-finish") == (method == "BSP + batches")


def test_verdicts_follow_the_times():
    rows = [
        {"setting": text.SETTING, "arm": text.ARM, "paradigm": method, "seed": seed, "accuracy": 0.4 + 0.01 * seed}
        | {"loss_s": {"gossip": 5.0, "ASP": math.nan}.get(method, 10.0)}
        for method in text.METHODS
        for seed in (7, 8, 9)
    ]
    found = judged(text.claims(), pd.DataFrame(rows)).set_index("claim")["verdict"]
    assert found["gossip sooner than BSP: BSP's time / its own"] == "holds"
    assert found["SSP sooner than BSP: BSP's time / its own"] == "does not hold"
    assert found["ASP sooner than BSP: BSP's time / its own"] == "does not hold", "it never arrives"
    assert found["BSP's accuracy at the end above that of SSP"] == "does not hold"


def test_a_run_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "LOSSES", (5.0, 4.5))
    simulate_all({"text/tuned/ASP/7": text.job("ASP", 0.125, 7, length=1 / 60)}, tmp_path, 1, Console(quiet=True))
    found = text.measure(tmp_path / "text/tuned/ASP/7")
    assert (found["paradigm"], found["seed"]) == ("ASP", 7)
    assert 0 < found["loss_s"] < found["duration_s"] and 0 < found["loss"] < 5.0
    assert found["accuracy"] == pytest.approx(0.28, abs=0.1)
