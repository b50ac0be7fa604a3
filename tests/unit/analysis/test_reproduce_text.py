"""The reproductions on text and images: methods share problem and cluster, verdicts say what results say."""

import math
from dataclasses import replace

import pandas as pd
import pytest
from rich.console import Console

from reproductions import headline, images, text
from reproductions.claims import judged
from reproductions.simulating import simulate_all


@pytest.mark.parametrize("problem", [text.PROBLEM, images.PROBLEM], ids=lambda problem: problem.name)
def test_methods_differ_in_paradigm_batches_and_rate_alone(problem):
    made = {method: headline.job(problem, method, 0.5, 7) for method in problem.methods}
    one = made["BSP"]
    for method, job in made.items():
        assert (job.workload, job.cluster.compute, job.stop, job.optimizer.schedule) == (
            one.workload,
            one.cluster.compute,
            one.stop,
            one.optimizer.schedule,
        )
        assert job.optimizer.lr == 0.5 * problem.optimizer["lr"]
        assert (job.batches.policy == "equal-finish") == (method == "BSP + batches")


def test_verdicts_follow_the_times():
    """ASP, SSP and DSSP never arrive in runs of 50 s."""
    times_s = {"gossip": 5.0, **dict.fromkeys(("ASP", "SSP", "DSSP"), math.nan)}
    rows = [
        {"setting": "text", "arm": headline.ARM, "paradigm": method, "seed": seed, "accuracy": 0.4 + 0.01 * seed}
        | {"loss_s": time_s, "loss_at_least_s": 50.0 if math.isnan(time_s) else time_s}
        for method in text.PROBLEM.methods
        for time_s in [times_s.get(method, 10.0)]
        for seed in (7, 8, 9)
    ]
    found = judged(headline.claims(text.PROBLEM), pd.DataFrame(rows)).set_index("claim")["verdict"]
    assert found["gossip sooner than BSP: BSP's time / its own"] == "holds"
    assert found["k-sync sooner than BSP: BSP's time / its own"] == "does not hold"
    assert found["ASP sooner than BSP: BSP's time / its own"] == "does not hold", "it never arrives"
    assert found["gossip sooner than ASP: ASP's time / its own"] == "holds", "ASP never arrives"
    assert found["DSSP sooner than ASP: ASP's time / its own"] == "cannot be told", "neither arrives"
    assert found["BSP's accuracy at the end above that of SSP"] == "does not hold"


def test_a_run_is_measured(tmp_path):
    problem = replace(text.PROBLEM, losses=(5.0, 4.5))
    job = headline.job(problem, "ASP", 0.125, 7, length=1 / 60)
    simulate_all({"text/tuned/ASP/7": job}, tmp_path, 1, Console(quiet=True))
    found = headline.measure(problem, tmp_path / "text/tuned/ASP/7")
    assert (found["paradigm"], found["seed"]) == ("ASP", 7)
    assert 0 < found["loss_s"] < found["duration_s"] and 0 < found["loss"] < 5.0
    assert found["accuracy"] == pytest.approx(0.28, abs=0.1)
