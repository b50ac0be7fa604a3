"""Tuning: every method has the same budget, the best factor is chosen, no tuned seed is reported."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from reproductions import tuning

BEST = {"slow one": 0.5, "quick": 4.0}


def tried(method, factor, seed):
    """A run whose time is least with the method's best factor."""
    time_s = 10.0 * (1 + abs(np.log2(factor / BEST[method]))) + seed / 100
    return {"paradigm": method, "arm": f"tuning-{factor:g}", "seed": seed, "target_s": time_s, "duration_s": 100.0}


def every_run():
    runs = [tried(m, f, s) for m in BEST for f in tuning.FACTORS for s in tuning.SEEDS]
    return pd.DataFrame(runs)


def test_the_best_factor_of_each_method_is_chosen_and_an_end_is_said():
    rates = tuning.best(every_run(), ["target_s"]).set_index("paradigm")
    assert rates["factor"].to_dict() == BEST
    assert rates["at_an_end"].to_dict() == {"slow one": False, "quick": True}
    assert rates.loc["slow one", "seconds"] == pytest.approx(10.02, abs=1e-3)


def test_who_never_arrives_is_not_chosen():
    frame = every_run()
    frame.loc[(frame["arm"] == "tuning-0.5") & (frame["seed"] == 2), "target_s"] = np.nan  # counts as 200 s
    assert tuning.best(frame, ["target_s"]).set_index("paradigm").loc["slow one", "factor"] != 0.5


def test_a_rate_is_chosen_by_all_targets_together():
    frame = every_run().assign(other_s=lambda rows: np.where(rows["arm"] == "tuning-1", 1.0, 99.0))
    assert set(tuning.best(frame, ["target_s", "other_s"])["factor"]) == {1.0}


def test_chosen_rates_are_run_on_other_seeds(tmp_path, monkeypatch):
    jobs = {}
    monkeypatch.setattr(tuning, "simulate_all", lambda todo, *_: jobs.update(todo))

    def make(method, factor, seed):
        return SimpleNamespace(method=method, factor=factor, seed=seed)

    def measure(folder):
        job = jobs["/".join(folder.parts[-4:])]
        return tried(job.method, job.factor, job.seed) | {"arm": folder.parts[-3], "factor": job.factor}

    few = ("here", list(BEST), make, measure, ["target_s"])
    found = tuning.tuned(*few, (4, 5), tmp_path, 1, Console(quiet=True))
    assert set(found["arm"]) == {"tuned"} and sorted(found["seed"]) == [4, 4, 5, 5]
    assert found.set_index("paradigm")["factor"].to_dict() == BEST
    further = len(tuning.SEEDS)  # the quick one's best factor is at an end: 8 is tried, and is worse
    assert len(jobs) == len(BEST) * (len(tuning.FACTORS) * len(tuning.SEEDS) + 2) + further
    assert pd.read_csv(tmp_path / "tuned-rates.csv")["factor"].tolist() == [4.0, 0.5]
    with pytest.raises(AssertionError, match="tuned and reported"):
        tuning.tuned(*few, (3, 4), tmp_path, 1, Console(quiet=True))


@pytest.mark.parametrize("further", [{}, {"further": 0}, {"further": 4}], ids=str)
def test_no_more_factors_than_allowed_are_tried(tmp_path, monkeypatch, further):
    monkeypatch.setitem(BEST, "quick", 1e6)
    jobs = {}
    monkeypatch.setattr(tuning, "simulate_all", lambda todo, *_: jobs.update(todo))

    def measure(folder):
        arm, method, seed = folder.parts[-3:]
        factor = float(arm.removeprefix("tuning-")) if arm != "tuned" else 1.0
        return tried(method.replace("_", " "), factor, int(seed)) | {"arm": arm}

    few = ("here", list(BEST), lambda *_: None, measure, ["target_s"])
    tuning.tuned(*few, (4, 5), tmp_path, 1, Console(quiet=True), **further)
    more = (8.0, 16.0, 32.0, 64.0)[: further.get("further", tuning.FURTHER)]
    factors = {name.split("/")[1] for name in jobs if "/quick/" in name} - {"tuned"}
    assert factors == {f"tuning-{factor:g}" for factor in (*tuning.FACTORS, *more)}
    assert pd.read_csv(tmp_path / "tuned-rates.csv").set_index("paradigm").loc["quick", "at_an_end"]
