"""Reproductions: the jobs are what they claim to be, claims hold or do not as they should, nothing is done twice."""

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from rich.console import Console
from scipy import stats

from hpcsync.config.errors import JobError
from hpcsync.config.job import Job
from hpcsync.figures.plotting import PARADIGM_COLOURS
from hpcsync.run_dir import layout
from reproductions import (
    ashl,
    dssp,
    dssp_map,
    dssp_map_real,
    first_k,
    first_k_real,
    real_ranks,
    stanza_learning,
    tuning,
)
from reproductions.claims import (
    FAILS,
    HOLDS,
    UNTOLD,
    Claim,
    apart,
    judged,
    largest,
    mean_time,
    of,
    points,
    ratio,
    settled_s,
    time_to,
)
from reproductions.simulating import finished, simulate_all, write_changed

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


def test_pushes_are_merged_by_the_server_with_the_same_decays_in_updates(jobs):
    plain, merged = (jobs[f"mixed/{arm}/SSP-3/{dssp.FIRST_SEED}"] for arm in ("updates", "merged"))
    assert (plain.paradigm.merge, merged.paradigm.merge) == (False, True)
    assert merged.optimizer == plain.optimizer and merged.stop == plain.stop


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


def test_a_claim_holds_if_its_whole_interval_does():
    claim = Claim("twice as fast", "2", TWICE, low=1.5)
    row = verdict(claim, results(slow=[2.0, 4.0, 4.4], fast=[1.0, 2.0, 2.0]))
    log = np.log([2.0, 2.0, 2.2])
    half = stats.t.ppf(0.975, 2) * log.std(ddof=1) / np.sqrt(3)
    assert (row["mean"], row.low, row.high) == pytest.approx(tuple(np.exp(log.mean() + np.array([0, -half, half]))))
    assert row.verdict == "holds" and row.ours == "2.06 (1.80 to 2.37)"
    assert verdict(claim, results(slow=[2.0, 4.0, 6.0], fast=[1.0, 2.0, 2.0])).verdict == "cannot be told"
    assert verdict(claim, results(slow=[2.0, 4.0, 4.4], fast=[2.0, 4.0, 4.0])).verdict == "does not hold"
    assert verdict(Claim("", "", TWICE, 1.9, 2.1), results(slow=[4.0] * 3, fast=[2.0] * 3)).verdict == "holds"


def test_differences_have_an_interval_of_their_own():
    difference = points(of("target_s", "a", "b", "slow"), of("target_s", "a", "b", "fast"))
    row = verdict(
        Claim("", "", difference, low=0.0, unit=" points"), results(slow=[0.2, 0.4, 0.1], fast=[0.1, 0.2, 0.2])
    )
    half = stats.t.ppf(0.975, 2) * np.std([10, 20, -10], ddof=1) / np.sqrt(3)
    assert (row.low, row.high) == pytest.approx((20 / 3 - half, 20 / 3 + half)) and row.verdict == "cannot be told"


def test_the_interval_contains_the_mean_as_often_as_it_says_and_a_bootstrap_does_not():
    # Of log-normal ratios of five seeds. All 5^5 samples with replacement make the bootstrap exact.
    rng = np.random.default_rng(1)
    drawn = np.array(list(itertools.product(range(5), repeat=5)))
    contained = {"claim": 0, "bootstrap": 0}
    for logs in rng.normal(size=(1000, 5)):
        row = Claim("", "", lambda _, logs=logs: pd.Series(np.exp(logs))).judge(pd.DataFrame())
        contained["claim"] += row["low"] <= 1.0 <= row["high"]
        low, high = np.quantile(logs[drawn].mean(axis=1), (0.025, 0.975))
        contained["bootstrap"] += low <= 0.0 <= high
    assert contained["claim"] == pytest.approx(950, abs=20)
    assert contained["bootstrap"] < 880


def test_what_does_not_exist_lies_beyond_the_limit():
    frame = results(slow=[2.0, 4.0, np.nan], fast=[1.0, 2.0, 2.0])
    for claim, expected in (
        (Claim("", "", TWICE, low=1.5), "cannot be told"),
        (Claim("", "", TWICE, high=9.0), "cannot be told"),
        (Claim("", "", TWICE, low=2.5), "does not hold"),
        (Claim("", "", TWICE, high=1.5), "does not hold"),
    ):
        row = verdict(claim, frame)
        assert row.verdict == expected and row.unknown == 1
        assert row.ours == "2.00 to 2.00, not reached with 1 of 3 seeds"
    never = frame[frame["seed"] > 2]
    assert verdict(Claim("", "", TWICE, low=1.5), never).ours == "not reached with 1 of 1 seeds"
    assert verdict(Claim("", "", TWICE, low=1.5), never).verdict == "does not hold"


@pytest.mark.parametrize(
    ("slow", "fast", "limits", "ours", "expected"),
    [
        # The slow one never arrives in runs of 8 s: it takes longer, in the claim's favour or against it.
        ([2.0, 4.0, np.nan], [1.0, 2.0, 2.0], {"low": 1.5}, "2.00 to 2.00, at least 4.00 with 1 of 3 seeds", HOLDS),
        ([2.0, 4.0, np.nan], [1.0, 2.0, 2.0], {"high": 2.5}, "", UNTOLD),
        ([2.0, 4.0, np.nan], [1.0, 2.0, 2.0], {"high": 1.5}, "", FAILS),
        ([2.0, 4.0, np.nan], [2.0, 4.0, 5.0], {"low": 1.5}, "", UNTOLD),
        ([np.nan] * 3, [1.0, 2.0, 2.0], {"low": 1.5}, "at least 4.00 with 3 of 3 seeds", HOLDS),
        ([np.nan] * 3, [1.0, 2.0, 2.0], {"low": 4.5}, "", UNTOLD),  # not long enough a run
        # The fast one never does.
        ([2.0, 4.0, 4.0], [1.0, 2.0, np.nan], {"low": 1.5}, "2.00 to 2.00, at most 0.50 with 1 of 3 seeds", UNTOLD),
        ([2.0, 4.0, 4.0], [np.nan] * 3, {"low": 1.5}, "at most 0.50 with 3 of 3 seeds", FAILS),
        ([2.0, 4.0, 4.0], [np.nan] * 3, {"low": 0.4}, "", UNTOLD),
        # Neither does.
        ([np.nan] * 3, [np.nan] * 3, {"low": 1.5}, "not known with 3 of 3 seeds", UNTOLD),
        ([2.0, 4.0, np.nan], [1.0, 2.0, np.nan], {"low": 1.5}, "", UNTOLD),
    ],
)  # fmt: skip
def test_a_run_that_never_arrives_bounds_the_ratio_of_times(slow, fast, limits, ours, expected):
    frame = results(slow=slow, fast=fast)
    frame["target_at_least_s"] = frame["target_s"].fillna(8.0)
    row = verdict(
        Claim("", "", ratio(*(time_to("target", "a", "b", each) for each in ("slow", "fast"))), **limits), frame
    )
    assert row.verdict == expected and row.unknown == sum(np.isnan(slow) | np.isnan(fast))
    assert row.ours == ours or not ours


def test_between_runs_that_arrive_a_ratio_of_times_is_one_of_numbers():
    frame = results(slow=[2.0, 4.0, 4.4], fast=[1.0, 2.0, 2.0])
    frame["target_at_least_s"] = frame["target_s"]
    of_times = ratio(*(time_to("target", "a", "b", each) for each in ("slow", "fast")))
    assert verdict(Claim("", "", of_times, low=1.5), frame).equals(verdict(Claim("", "", TWICE, low=1.5), frame))


def test_the_mean_of_times_is_at_least_what_a_run_has_taken():
    assert mean_time([1.0, 4.0], 9.0) == pytest.approx((2.0, 2.0))
    assert mean_time([1.0, np.nan], 9.0) == pytest.approx((np.nan, 3.0), nan_ok=True)


def test_one_seed_is_of_something_without_chance():
    one = results(slow=[2.0, 4.0, 6.0], fast=[1.0, 2.0, 2.0]).query("seed == 1")
    assert verdict(Claim("", "", TWICE, low=1.5), one).verdict == "holds"
    assert verdict(Claim("", "", TWICE, low=2.5), one).verdict == "does not hold"


def test_without_runs_nothing_can_be_told():
    row = verdict(Claim("", "", TWICE, low=1.5), results(slow=[2.0] * 3, fast=[1.0] * 3).query("seed > 3"))
    assert row.verdict == "cannot be told" and row.ours == "no runs"


def test_without_limits_there_is_no_verdict():
    row = verdict(Claim("", "", TWICE), results(slow=[2.0] * 3, fast=[1.0] * 3))
    assert (row.verdict, row.criterion, row.ours) == ("", "", "2.00 (2.00 to 2.00)")


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
        numbers["target_at_least_s"] = numbers["target_s"]
        rows.append({**run, **numbers, "samples_per_s": 1e3, "accuracy": 0.98, "decay_s": 1.0})
    return pd.DataFrame(rows)


def holding(frame):
    return set(judged(dssp.claims(), frame).query("verdict == 'holds'")["claim"])


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


# ---- the map ----


def test_the_map_has_every_point_and_what_is_printed_is_judged_at_each_of_the_coarse_ones():
    names = [name.split("/") for name in dssp_map.jobs(2)]
    frame = pd.DataFrame(names, columns=["setting", "arm", "paradigm", "seed"])
    frame["paradigm"] = frame["paradigm"].str.replace("-", " ")
    fine = frame[frame["setting"].str.startswith("speed-")]
    n_points = len(dssp_map.RATIOS) * len(dssp_map.JITTERS)
    assert len(fine) == 2 * n_points * len(dssp_map.METHODS) and fine["setting"].nunique() == n_points
    frame["duration_s"] = frame["paradigm"].map(dssp_map.FIG_4_S | {"DSSP paper": 8917.0})
    frame["target_s"] = frame["paradigm"].map(dssp_map.TABLE_I_S | {"DSSP paper": 3016.4})
    frame["target_at_least_s"] = frame["target_s"]
    frame["samples_per_s"], frame["early_samples_per_s"] = 1.0, frame["paradigm"].map({"DSSP paper": 1.5}).fillna(1.0)
    n_points = len(dssp_map.SERVERS) * len(dssp_map.MODES) * len(dssp_map.COARSE_RATIOS) * len(dssp_map.COARSE_JITTERS)

    def counts():
        return dssp_map.points(judged(dssp_map.claims(), frame))

    assert len(counts()) == 2 * n_points and len(dssp_map.possible(counts())) == n_points
    assert set(counts()["holds"]) == {3} and set(dssp_map.possible(counts())["holds"]) == {6}
    throughputs = [claim for claim in dssp_map.claims() if claim.says.startswith("throughput")]
    early = judged(throughputs, frame).set_index("claim")["mean"]
    assert early.to_dict() == {
        says: pytest.approx(1.5 if "first" in says and "paper" in says else 1.0) for says in early.index
    }
    assert len(early) == 2 * 3 * len(dssp_map_real.RATIOS) * len(dssp_map_real.JITTERS)
    soon = (frame["arm"] == "merged") & (frame["paradigm"] == "SSP 3")
    frame.loc[soon, ["target_s", "target_at_least_s"]] = 3016.4  # no later than DSSP
    wrong = counts().query("`does not hold` > 0")
    assert set(wrong["server"]) == {"pushes merged"} and set(wrong["source"]) == {"Table I"}
    assert len(wrong) == n_points / 2
    assert set(dssp_map.possible(counts())["server"]) == {"an update for each push"}


def test_the_map_is_drawn_and_continued(tmp_path, monkeypatch):
    for name, values in (("RATIOS", (1.5, 3.0)), ("JITTERS", (0.005,))):
        monkeypatch.setattr(dssp_map, name, values)
        monkeypatch.setattr(dssp_map, f"COARSE_{name}", values[:1])
    console = Console(quiet=True)
    first = dssp_map.reproduce(tmp_path, 1, 1, console, length=1 / 100)
    drawn = pd.read_csv(tmp_path / "dssp-map.csv")
    assert set(drawn["quantity"]) == set(dssp_map.QUANTITIES.values())
    fast = drawn[drawn["quantity"] == dssp_map.QUANTITIES["speed"]]
    assert set(fast["ratio"]) == {1.5, 3.0} and (fast["ASP"] > 1.1).all()
    pd.testing.assert_frame_equal(first, dssp_map.reproduce(tmp_path, 1, 1, console, length=1 / 100))


def test_points_on_real_ranks_are_points_of_the_map():
    assert set(dssp_map_real.RATIOS) <= set(dssp_map.RATIOS) and set(dssp_map_real.JITTERS) <= set(dssp_map.JITTERS)
    names = [name.split("/") for name in dssp_map_real.jobs(3)]
    frame = pd.DataFrame(names, columns=["setting", "paradigm", "seed"])
    frame["paradigm"] = frame["paradigm"].str.replace("-", " ")
    both = pd.concat([frame.assign(arm=arm, samples_per_s=1.0, jitter=0.01) for arm in ("real", "simulated")])
    verdicts = judged(dssp_map_real.claims(), both)
    assert (verdicts["seeds"] == 3).all() and set(verdicts["verdict"]) == {"", "holds"}
    both.loc[both["arm"] == "real", "samples_per_s"] = 0.9
    assert "does not hold" in set(judged(dssp_map_real.claims(), both)["verdict"])


def test_interrupted_on_real_ranks_or_between_them_and_the_simulation_the_rest_is_made(tmp_path, monkeypatch):
    name, job = next(iter(dssp_map_real.jobs(1).items()))
    short = Job.from_table({**job.model_dump(exclude_none=True), "stop": {"updates": 20}})
    names = [f"{name[:-1]}{seed}" for seed in (4, 5)]
    monkeypatch.setattr(dssp_map_real, "jobs", lambda seeds: dict.fromkeys(names, short))
    monkeypatch.setattr(dssp_map_real, "claims", list)
    console, made, cut = Console(quiet=True), [], [names[1]]

    def run(asked, folder):
        made.append(folder.relative_to(tmp_path / "real").as_posix())
        if made[-1] in cut:
            cut.remove(made[-1])
            raise KeyboardInterrupt
        simulate_all({folder.name: asked}, folder.parent, 1, console)

    monkeypatch.setattr(dssp_map_real, "run", run)
    with pytest.raises(KeyboardInterrupt):
        dssp_map_real.reproduce(tmp_path, 1, console)
    simulated = tmp_path / "simulated" / names[0]
    simulated.mkdir(parents=True)
    (simulated / layout.TRACE).write_bytes(b"cut")
    for _ in range(2):
        dssp_map_real.reproduce(tmp_path, 1, console)
        assert made == [names[0], names[1], names[1]]
    assert len(pd.read_csv(tmp_path / "results.csv")) == 4


def on_started_ranks(job, folder):
    real_ranks.run_all({folder.name: job}, folder.parent)


@pytest.mark.parametrize("run", [first_k_real.run, on_started_ranks])
def test_a_run_on_real_ranks_finds_its_folder_empty_after_an_interruption(run, tmp_path, monkeypatch):
    """Runs are never overwritten, and one that is interrupted leaves a checkpoint."""
    job, folder, started = next(iter(dssp_map_real.jobs(1).values())), tmp_path / "run", []
    for name in (layout.TRACE, layout.JOB, layout.WEIGHTS):
        write_changed("", folder / name)
    (folder / "checkpoints" / "1").mkdir(parents=True)
    with pytest.raises(JobError, match="must not hold"):
        layout.refuse_taken(folder)
    monkeypatch.setattr("subprocess.run", lambda line, **_: started.append(layout.refuse_taken(folder)))
    run(job, folder)
    assert started == [None] and Job.from_toml((folder / "asked.toml").read_text()) == job


# ---- all of it, small ----


def test_a_second_call_simulates_nothing_and_says_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "FACTORS", (1.0,))
    monkeypatch.setattr(tuning, "SEEDS", (1,))
    names = ("BSP", "SSP 3", "DSSP")
    mixed = dssp.Setting("mixed", (0.02, 0.04), {"updates": names, "samples": names}, 0.4, 45)
    monkeypatch.setattr(dssp, "SETTINGS", (mixed,))
    monkeypatch.setattr(dssp, "SHOWN", {"mixed": "two"})
    monkeypatch.setattr(dssp, "SSP", ("SSP 3",))
    monkeypatch.setattr(dssp, "LINES", {"BSP": ("BSP",), "SSP, s = 3 to 15": ("SSP 3",)})
    console = Console(quiet=True)
    first = dssp.reproduce(tmp_path, 1, 1, console, length=1 / 100)
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    monkeypatch.setattr(dssp, "draw_error", lambda *_: None)
    second = dssp.reproduce(tmp_path, 1, 1, console, length=1 / 100)
    assert written == {path: path.stat().st_mtime_ns for path in written}
    pd.testing.assert_frame_equal(first, second)
    assert {"dssp-error.png", "claims.csv", "results.csv"} <= {p.name for p in tmp_path.iterdir()}
    assert set(pd.read_csv(tmp_path / "results.csv")["paradigm"]) == {"BSP", "SSP 3", "DSSP"}


@pytest.mark.parametrize(("status", "expected"), [("interrupted", KeyboardInterrupt), ("failed", RuntimeError)])
def test_an_interrupted_simulation_is_told_from_one_that_failed(tmp_path, monkeypatch, status, expected):
    def ends(job, folder, console):
        (folder / layout.TRACE).touch()
        return 1

    monkeypatch.setattr("hpcsync.simulator.simulate.simulate", ends)
    monkeypatch.setattr("hpcsync.trace.reader.load", lambda path: SimpleNamespace(status=status))
    with pytest.raises(expected):
        simulate_all({"run": next(iter(dssp.jobs(1).values()))}, tmp_path, 1, Console(quiet=True))


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


def test_a_run_with_other_times_in_the_same_file_is_simulated_again(tmp_path):
    """The job has the name of the file alone; the control is a file that is written again with the same times."""
    times, console = tmp_path / "times.csv", Console(quiet=True)
    header = "worker,iteration,seconds\n0,0,"
    table = next(iter(dssp.jobs(1, 1 / 200).values())).model_dump(exclude_none=True)
    compute = {"model": "table", "table": str(times)}
    job = Job.from_table(table | {"cluster": {"workers": 1, "compute": compute}})
    for seconds, simulated in (("0.1\n", 1), ("0.1\n", 0), ("0.2\n", 1), ("0.2\n", 0)):
        write_changed(header + seconds, times)
        assert simulate_all({"run": job}, tmp_path, 1, console) == simulated


@pytest.mark.parametrize(
    ("colours", "paradigms"),
    [
        (ashl.COLOURS, {"SSP": "ssp", "local SGD": "local-sgd", "ADSP": "adsp", "ASHL": "ashl"}),
        (first_k.COLOURS, {"k-sync": "k-sync", "k-batch-async": "k-batch-async"}),
        (stanza_learning.COLOURS, {"server": "bsp", "ring": "allreduce", "Stanza": "stanza"}),
    ],
)
def test_a_paradigm_has_its_colour_in_every_figure(colours, paradigms):
    assert {method: colours[method] for method in paradigms} == {
        method: PARADIGM_COLOURS[paradigm] for method, paradigm in paradigms.items()
    }
