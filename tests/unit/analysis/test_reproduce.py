"""Reproductions: the jobs are what they claim to be, claims hold or do not as they should, nothing is done twice."""

import json

import matplotlib
import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from hpcsync.config.job import Job
from reproductions import dssp
from reproductions.claims import Claim, apart, judged, largest, of, points, ratio, settled_s
from reproductions.simulating import finished, simulate_all

SEEDS = (1, 2, 3)


@pytest.fixture(scope="module")
def jobs():
    return dssp.jobs(seeds=1)


# ---- jobs ----


def test_every_paradigm_of_the_paper_is_there_on_both_clocks(jobs):
    for setting in ("homogeneous", "mixed"):
        for arm in ("updates", "samples"):
            found = [job.paradigm for name, job in jobs.items() if name.startswith(f"{setting}/{arm}/")]
            assert {p.staleness for p in found if p.name == "ssp"} == set(range(3, 16))
            assert {p.mode for p in found if p.name == "dssp"} == {"bounded", "paper"}
            assert {p.name for p in found} == {"bsp", "asp", "ssp", "dssp"}


@pytest.mark.parametrize(("setting", "workers"), [("homogeneous", 4), ("mixed", 2)])
def test_the_clocks_agree_for_bsp_and_decay_asp_earlier_by_the_number_of_workers(jobs, setting, workers):
    by_updates = jobs[f"{setting}/updates/BSP/{dssp.FIRST_SEED}"].optimizer
    by_samples = jobs[f"{setting}/samples/BSP/{dssp.FIRST_SEED}"].optimizer
    assert (by_updates.lr_clock, by_updates.async_lr_scale) == ("updates", 1.0)
    assert (by_samples.lr_clock, by_samples.async_lr_scale) == ("samples", "1/workers")
    of_bsp = [m * dssp.BATCH * workers for m in by_updates.schedule.milestones]
    assert of_bsp == pytest.approx(by_samples.schedule.milestones, abs=dssp.BATCH * workers)
    assert jobs[f"{setting}/updates/ASP/{dssp.FIRST_SEED}"].optimizer.schedule == by_updates.schedule
    samples = jobs[f"{setting}/samples/BSP/{dssp.FIRST_SEED}"].stop.samples
    assert by_samples.schedule.milestones == (round(samples * 2 / 3), round(samples * 5 / 6))


def test_merged_pushes_are_twice_as_many_updates_to_a_decay(jobs):
    plain, merged = (
        jobs[f"mixed/{arm}/SSP-3/{dssp.FIRST_SEED}"].optimizer.schedule.milestones for arm in ("updates", "merged")
    )
    assert merged == pytest.approx([2 * m for m in plain], abs=1)


def test_all_paradigms_meet_the_same_bursts_and_every_seed_others(jobs):
    events = [job.cluster.events for name, job in jobs.items() if name.startswith("transient/")]
    assert events[0] and all(each == events[0] for each in events)
    assert dssp.bursts(1, 4) != dssp.bursts(2, 4)
    assert not jobs[f"homogeneous/updates/BSP/{dssp.FIRST_SEED}"].cluster.events


# ---- claims ----


def results(**target_s):
    """Runs of one setting and arm; a list is the three seeds."""
    runs = [
        {"setting": "a", "arm": "b", "paradigm": paradigm, "seed": seed, "target_s": value, "push_gap": value}
        for paradigm, values in target_s.items()
        for seed, value in zip(SEEDS, values, strict=True)
    ]
    return pd.DataFrame(runs)


TWICE = ratio(of("target_s", "a", "b", "slow"), of("target_s", "a", "b", "fast"))


def verdict(claim, frame):
    return judged([claim], frame).iloc[0]


def test_a_claim_holds_if_every_seed_says_so():
    claim = Claim("twice as fast", "2", TWICE, low=1.5)
    row = verdict(claim, results(slow=[2.0, 4.0, 6.0], fast=[1.0, 2.0, 2.0]))
    assert row.holds and row.ours == "2.33 (2.00 to 3.00)"
    assert not verdict(claim, results(slow=[2.0, 4.0, 2.8], fast=[1.0, 2.0, 2.0])).holds
    assert not verdict(claim, results(slow=[2.0, 4.0, 6.0], fast=[4.0, 8.0, 8.0])).holds


def test_a_target_that_is_never_reached_is_said_and_supports_nothing():
    frame = results(slow=[2.0, 4.0, np.nan], fast=[1.0, 2.0, 2.0])
    for claim in (Claim("", "", TWICE, low=1.5), Claim("", "", TWICE, high=9.0)):
        row = verdict(claim, frame)
        assert not row.holds and row.unknown == 1
        assert "not reached with 1 of 3 seeds" in row.ours
    assert verdict(Claim("", "", TWICE), frame[frame["seed"] > 2]).ours == "not reached with 1 of 1 seeds"


def test_a_mean_over_paradigms_is_unknown_with_one_of_them():
    frame = results(x=[1.0, 2.0, 3.0], y=[3.0, 4.0, np.nan])
    assert of("target_s", "a", "b", "x", "y")(frame).tolist() == pytest.approx([2.0, 3.0, np.nan], nan_ok=True)


def test_differences_and_largest_values():
    frame = results(x=[0.90, 0.95, 1.0], y=[0.95, 0.90, 1.0])
    x, y = of("target_s", "a", "b", "x"), of("target_s", "a", "b", "y")
    assert points(x, y)(frame).tolist() == pytest.approx([-5.0, 5.0, 0.0])
    assert apart(x, y)(frame).tolist() == pytest.approx([5.0, 5.0, 0.0])
    assert largest("push_gap", "x")(frame).tolist() == [0.90, 0.95, 1.0]


def every_run(target_s, lead):
    """Results of all the runs there are, from functions of the arm and the paradigm."""
    rows = []
    for name in dssp.jobs(seeds=1):
        setting, arm, paradigm, seed = name.replace("SSP-", "SSP ").replace("DSSP-", "DSSP ").split("/")
        run = {"setting": setting, "arm": arm, "paradigm": paradigm, "seed": int(seed)}
        numbers = {"target_s": target_s(arm, paradigm), "push_gap": lead(paradigm)}
        rows.append({**run, **numbers, "samples_per_s": 1e3, "accuracy": 0.98, "decay_s": 1.0})
    return pd.DataFrame(rows)


def holding(frame):
    return set(judged(dssp.claims(), frame).query("holds")["claim"])


def test_were_it_as_published_the_papers_claims_would_hold():
    times_s = {"BSP": 6159.0, "ASP": 2993.0, "DSSP": 3016.0, "DSSP paper": 3016.0}
    held = holding(every_run(lambda arm, paradigm: times_s.get(paradigm, 5650.0), lambda paradigm: 16))
    for clock in ("updates", "samples"):
        for what in ("sooner than SSP", "as printed sooner than SSP", "as soon as ASP", "sooner than BSP"):
            assert f"mixed, lr counts {clock}: DSSP {what}" in held
    assert {"DSSP keeps its bound", "DSSP as printed keeps its bound"} <= held
    assert "pure CNN: BSP trains faster than ASP" not in held


def test_were_all_alike_only_likeness_would_hold():
    held = holding(every_run(lambda arm, paradigm: 1.0, lambda paradigm: 17))
    assert not any("sooner" in claim or "faster" in claim or "bound" in claim for claim in held)
    assert "mixed, lr counts updates: DSSP as soon as ASP" in held
    assert "homogeneous, lr counts samples: BSP, ASP, SSP, DSSP end alike" in held


def test_the_target_is_reached_when_accuracy_stays_there():
    def settled(*accuracy):
        return settled_s(pd.DataFrame({"now_s": range(len(accuracy)), "accuracy": accuracy}), 0.9)

    assert settled(0.5, 0.95, 0.8, 0.9, 0.92) == 3.0
    assert settled(0.9, 0.95) == 0.0
    assert np.isnan(settled(0.95, 0.8))


# ---- all of it, small ----


def test_a_second_call_simulates_nothing_and_says_the_same(tmp_path, monkeypatch):
    monkeypatch.setitem(matplotlib.rcParams, "savefig.dpi", 50)
    names = ("BSP", "SSP 3", "DSSP")
    mixed = dssp.Setting("mixed", (0.02, 0.04), {"updates": names, "samples": names}, 0.4, 45)
    monkeypatch.setattr(dssp, "SETTINGS", (mixed,))
    monkeypatch.setattr(dssp, "SHOWN", {"mixed": "two"})
    monkeypatch.setattr(dssp, "SSP", ("SSP 3",))
    monkeypatch.setattr(dssp, "LINES", {"BSP": ("BSP",), "SSP, s = 3 to 15": ("SSP 3",)})
    console = Console(quiet=True)
    first = dssp.reproduce(tmp_path, 1, 1, console, length=1 / 100)
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    second = dssp.reproduce(tmp_path, 1, 1, console, length=1 / 100)
    assert written == {path: path.stat().st_mtime_ns for path in written}
    pd.testing.assert_frame_equal(first, second)
    assert {"dssp-error.png", "dssp-times.svg", "claims.csv", "results.csv"} <= {p.name for p in tmp_path.iterdir()}
    assert set(pd.read_csv(tmp_path / "results.csv")["paradigm"]) == {"BSP", "SSP 3", "DSSP"}


def test_a_changed_or_unfinished_run_is_simulated_again(tmp_path):
    job = next(iter(dssp.jobs(1, 1 / 200).values()))
    console = Console(quiet=True)
    assert simulate_all({"run": job}, tmp_path, 1, console) == 1
    assert simulate_all({"run": job}, tmp_path, 1, console) == 0
    (tmp_path / "run" / "summary.json").unlink()
    assert simulate_all({"run": job}, tmp_path, 1, console) == 1
    other = Job.from_table({**job.model_dump(exclude_none=True), "seed": 9})
    assert not finished(tmp_path / "run", other)
    assert simulate_all({"run": other}, tmp_path, 1, console) == 1
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "finished"
