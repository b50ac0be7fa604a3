"""Command advise: candidates are tried in three trials, the answer is written, and nothing is simulated twice."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
import time
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from rich.console import Console

from hpcsync.cli import advice_trials, advise, finished_runs, report
from hpcsync.cli.advice_candidates import FURTHER, Trained, at_an_end, further
from hpcsync.cli.advise import Asked, main, worker_counts
from hpcsync.config import job as jobs
from hpcsync.config.errors import JobError
from hpcsync.config.time_table import read_times
from hpcsync.planning.candidates import Candidate, candidates
from hpcsync.report.advice import prediction
from hpcsync.report.summary import beside_prediction, summarize
from hpcsync.run_dir import layout, lock
from hpcsync.simulator import measured_cluster
from hpcsync.simulator.simulate import simulate
from hpcsync.system.atomic_files import NotWritten
from hpcsync.trace.reader import load

JOB = """
name = "small"
seed = 5
workload = {name = "linear"}
optimizer = {name = "sgd", lr = 0.1}
stop = {samples = 20000, target_loss = 0.02}
evaluation.every_samples = 16
paradigm = {name = "bsp"}
cluster = {workers = 3, compute = {seconds = [0.1, 0.1, 0.1], jitter = 0.1, model = "lognormal"}}
"""
STRAGGLER = "cluster.compute.seconds=[0.1, 0.1, 1.0]"


class Inline:
    """Replacement of the pool of processes: simulates in this one, and counts."""

    n = 0

    def __init__(self, *_: object) -> None:
        pass

    def submit(self, function, *arguments):
        Inline.n += 1
        done: Future[int] = Future()
        done.set_result(function(*arguments))
        return done

    def shutdown(self, **_: object) -> None:
        pass


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(advice_trials, "ProcessPoolExecutor", Inline)
    monkeypatch.setattr(Inline, "n", 0)
    path = tmp_path / "small.toml"
    path.write_text(JOB)
    return path


def advised(out: Path) -> dict:
    return json.loads((out / "advice.json").read_text())


def test_a_straggler_decides_and_the_advised_job_is_the_users(job, tmp_path, capsys):
    two = ("bsp", "asp")
    assert main(job, Asked(paradigms=two, overrides=[STRAGGLER], out=tmp_path / "uneven")) == 0
    said = capsys.readouterr()
    assert "Train with asp.\nCompared with bsp, it trains" in said.out
    assert "Times are those of [cluster] in the job file" in said.out
    found = advised(tmp_path / "uneven")
    assert found["advised"] == "asp" and [row["label"] for row in found["ranking"]] == ["asp", "bsp"]
    last = found["trials"][-1]["candidates"]
    assert [len(trial["candidates"]) for trial in found["trials"]] == [2, 2, 2]
    assert {row["label"]: row["lr_factor"] for row in last} == found["lr_factors"]
    further = [finished_runs.read(path).summary for path in (tmp_path / "uneven" / "trial-4").glob("*/seed-200[567]")]
    assert found["predicted"] == pytest.approx(prediction(further)) and len(further) == 3
    assert [row["predicted"] for row in last if row["label"] == "asp"] != [found["predicted"]]
    assert f"Predicted time to the target: {found['predicted']['seconds']:.4g} s (" in said.out
    assert all((tmp_path / "uneven" / row["folder"] / "seed-5" / "job.toml").exists() for row in last)
    assert {log.read_text() for log in tmp_path.glob("uneven/trial-*/*/*.log")} == {""}, "no table for nobody"
    asked, given = (jobs.load(path) for path in (tmp_path / "uneven" / "advised.toml", job))
    assert asked.paradigm.name == "asp" and asked.stop == given.stop and asked.workload == given.workload
    assert asked.optimizer.lr == pytest.approx(found["lr_factors"]["asp"] * given.optimizer.lr)
    assert main(job, Asked(paradigms=two, out=tmp_path / "even")) == 0  # control: nobody waits long
    assert advised(tmp_path / "even")["advised"] == "bsp"


@pytest.mark.parametrize(
    ("limit", "said"), [("updates = 6", "6 updates"), ("samples = 200", "200 samples"), ("updates = 12", "")]
)
def test_the_advised_job_may_make_the_updates_and_samples_that_it_needs(job, tmp_path, capsys, limit, said):
    """The limit of a trial is a time, in which ASP makes more updates than BSP."""
    out, stop = tmp_path / "out", f"stop={{{limit}, target_loss = 0.02}}"
    assert main(job, Asked(paradigms=("bsp", "asp"), overrides=[STRAGGLER, stop], seeds=1, out=out)) == 0
    words = capsys.readouterr().out
    line = re.search(r"Its limit is [\d.]+ s instead of (.*), which simulated runs exceeded.", words)
    assert "Train with asp" in words and (line[1] if line else "") == said
    seed = 5 + advise.FURTHER_SEED
    assert simulate(jobs.load(out / "advised.toml", [f"seed={seed}"]), tmp_path / "run", Console(quiet=True)) == 0
    (before,) = out.glob(f"trial-4/*/seed-{seed}")
    times = [finished_runs.read(folder).summary.time_to_target_s for folder in (before, tmp_path / "run")]
    assert times[0] == times[1] is not None


def test_an_advice_says_that_the_loss_chose_where_no_candidate_could_arrive_before(job, tmp_path, capsys):
    four = ("bsp", "asp", *(f"{{name = 'ssp', staleness = {n}}}" for n in (1, 2)))
    short = [*(rate := ["optimizer.lr=0.8"]), "stop.samples=850"]
    line = "so its candidates were selected by their loss after 0.108 and 0.323 virtual s, and a better"
    none = [*short, "stop.target_loss=1e-9"]
    for n, overrides, said in ((4, short, True), (2, short, False), (4, rate, False), (4, none, True)):
        asked = Asked(paradigms=four[:n], overrides=overrides, out=tmp_path / f"{n}-{len(overrides)}")
        assert main(job, asked) == int(overrides is none)
        assert (line in (words := capsys.readouterr().out)) is said and (line[:20] in words) is said


def test_the_same_command_simulates_nothing_again_and_says_the_same(job, tmp_path, capsys):
    asked = Asked(paradigms=("bsp", "asp", "{name = 'k-sync', k = 2}"), out=tmp_path / "out", as_json=True)
    main(job, asked)
    first, n = json.loads(capsys.readouterr().out), Inline.n
    assert n == first["simulated"] > 0
    main(job, asked)
    second = json.loads(capsys.readouterr().out)
    assert Inline.n == n and second["simulated"] == 0
    for key in ("advised", "ranking", "lr_factors", "lines"):
        assert first[key] == second[key]
    with pytest.raises(JobError, match="holds a run of another job; give another folder"):
        main(job, asked._replace(overrides=["workload.batch_size=5"]))


def test_a_folder_in_which_another_advice_is_computed_is_refused(job, tmp_path):
    measured = jobs.load(job, ["paradigm.name='bsp'", "stop={updates=60}"])
    assert simulate(measured, tmp_path / "run", Console(quiet=True)) == 0
    out, n = tmp_path / "out", Inline.n
    out.mkdir()
    others = lock.take(out / lock.NAME, lock.this_process())
    with pytest.raises(JobError, match=r"^out .*out: must be a folder that no other process uses: process "):
        main(job, Asked(tmp_path / "run", ("bsp", "asp"), out=out))
    others.release()
    assert (Inline.n, list(out.iterdir())) == (n, [])


def test_times_of_a_run_replace_those_of_the_job(job, tmp_path, capsys):
    measured = jobs.load(job, [STRAGGLER, "stop={updates = 60}", "paradigm.name='asp'", "stop.updates=900"])
    assert simulate(measured, tmp_path / "run", Console(quiet=True)) == 0
    out = tmp_path / "out"
    assert main(job, Asked(measured=tmp_path / "run", paradigms=("bsp", "asp"), out=out)) == 0
    assert advised(out)["advised"] == "asp" and advised(out)["times"].endswith(layout.TRACE)
    files = sorted(path.name for path in out.glob("times-*.csv"))
    assert files == [f"times-{seed}.csv" for seed in (1005, 1006, 2005, 2006, 2007, 5, 6, 7)]
    assert "Links have the rates" not in capsys.readouterr().out, "its transfers took no time"


def test_changes_of_speed_that_a_run_has_measured_do_not_happen_again(job, tmp_path):
    slow, new = (f"{{worker = 0, at_s = 1.0, change = 'slow', factor = {factor}}}" for factor in (3.0, 2.0))
    leave = "{worker = 1, at_s = 9.0, change = 'leave'}"
    late = "{worker = 2, at_s = 900.0, change = 'slow', factor = 4.0}"  # not before the measured run ends
    measured = jobs.load(job, [f"cluster.events=[{slow}, {leave}, {late}]", "stop={updates = 60}"])
    assert simulate(measured, tmp_path / "run", Console(quiet=True)) == 0
    overrides = [f"cluster.events=[{slow}, {leave}, {new}, {late}]"]
    asked = Asked(tmp_path / "run", overrides=overrides, out=tmp_path / "out", extrapolate=True)
    bsp = Trained("bsp", Candidate({"name": "bsp"}))
    for n_workers, factors in ((None, [None, 2.0, 4.0]), (2, [None])):
        adviser = advise._Adviser(job, asked, n_workers)
        events = jobs.Job.from_table(adviser._trials.table(bsp, 5, 1.0)).cluster.events
        assert [event.factor for event in events] == factors
    assert len(jobs.Job.from_table(adviser._trials.job_table(bsp)).cluster.events) == 1, "its advised job is valid"


def test_times_of_another_run_are_refused_in_the_folder_of_an_advice(job, tmp_path):
    """Their runs would count as finished."""
    for name, seconds in (("even", "[0.1, 0.1, 0.1]"), ("uneven", "[0.1, 0.1, 1.0]")):
        measured = jobs.load(job, [f"cluster.compute.seconds={seconds}", "paradigm.name='bsp'", "stop={updates=60}"])
        assert simulate(measured, tmp_path / name, Console(quiet=True)) == 0
    asked = Asked(tmp_path / "even", ("bsp", "asp"), out=tmp_path / "out")
    assert main(job, asked) == 0
    n = Inline.n
    with pytest.raises(JobError, match=r"^--out: .*/out/times-5.csv holds the times of another run; give another fold"):
        main(job, asked._replace(measured=tmp_path / "uneven"))
    assert main(job, asked) == 0 and Inline.n == n, "control: those of the same run"
    assert not [*(tmp_path / "out").glob("*.new")]


def test_the_advised_job_has_no_setting_that_it_would_ignore(job, tmp_path):
    spread = ["cluster.placement=spread", "cluster.network={bandwidth_gbit = 1.0, server_bandwidth_gbit = 2.0}"]
    for paradigms, kept in ((("allreduce", "{name = 'local-sgd', steps = 2}"), False), (("bsp", "asp"), True)):
        out = tmp_path / str(kept)
        assert main(job, Asked(paradigms=paradigms, overrides=spread, out=out)) == 0
        cluster = jobs.load(out / "advised.toml").cluster
        assert (cluster.placement == "spread", cluster.network.server_bandwidth_gbit == 2.0) == (kept, kept)


def test_no_trial_has_a_setting_that_its_paradigm_excludes(job, tmp_path):
    overrides = ["cluster.colocated=true", "cluster.network={bandwidth_gbit = 1.0}"]
    assert main(job, Asked(paradigms=("bsp", "allreduce"), overrides=overrides, out=tmp_path / "out")) == 0
    assert advised(tmp_path / "out")["left_out"] == {}
    for label, colocated in (("bsp", True), ("allreduce", False)):
        (path, *_) = (tmp_path / "out" / "trial-1").glob(f"{label}*/*/job.toml")
        assert jobs.load(path).cluster.colocated == colocated


def test_measured_links_suit_colocated_servers(job, tmp_path):
    overrides = ["cluster.colocated=true"]
    measured = jobs.load(job, [*overrides, "cluster.network={bandwidth_gbit=1e-4}", "stop={updates = 60}"])
    assert simulate(measured, tmp_path / "run", Console(quiet=True)) == 0
    asked = Asked(tmp_path / "run", ("bsp", "asp"), overrides=overrides, out=tmp_path / "out")
    assert main(job, asked) == 0


@pytest.mark.parametrize("paradigm", ["bsp", "allreduce"])
def test_links_that_were_only_seen_shared_are_said_to_be_wider_perhaps(job, tmp_path, capsys, paradigm):
    equal = ["cluster.compute.seconds=0.1", "cluster.compute.model=constant", "stop={updates = 60}"]
    links = ["cluster.network={bandwidth_gbit = 2e-5}", f"paradigm.name={paradigm}"]
    assert simulate(jobs.load(job, [*equal, *links]), tmp_path / "run", Console(quiet=True)) == 0
    asked = Asked(tmp_path / "run", ("bsp", "allreduce"), overrides=["stop={target_loss = 0.5, seconds = 40}"])
    main(job, asked._replace(out=tmp_path / "out"))
    shared = (
        "However, 3.0 pushes at a time shared the server's link: a worker's own link may be up to 3.0 times as fast"
    )
    said = capsys.readouterr().out
    assert (shared in said) == (paradigm == "bsp") and "Links have the rates measured in the run" in said
    declared = ["cluster.network={bandwidth_gbit = 1}", "stop={target_loss = 0.5, seconds = 4}"]
    main(job, asked._replace(overrides=declared, out=tmp_path / "declared"))
    said = capsys.readouterr().out
    assert "Links are those of [cluster.network] in the job file" in said and "Links have" not in said


def test_other_numbers_of_workers_need_a_measurement_or_leave_to_extrapolate(job, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(measured_cluster, "LEAST", 2)
    measured = jobs.load(job, ["stop={updates = 60}"])
    assert simulate(measured, tmp_path / "run", Console(quiet=True)) == 0
    asked = Asked(measured=tmp_path / "run", paradigms=("bsp", "asp"), workers=(3, 5), out=tmp_path / "out")
    with pytest.raises(JobError, match="cluster.workers = 5, it has 3; or give --extrapolate") as no:
        main(job, asked)
    assert "\n" not in str(no.value) and not (tmp_path / "out").exists(), "nothing is simulated before"
    assert main(job, asked._replace(extrapolate=True)) == 0
    said = capsys.readouterr().out
    assert said.index("3 workers\n") < said.index("5 workers\n") < said.index("Times are extrapolated from 3 workers: ")
    assert said.count("extrapolated") == 1 and "for further ones each seed draws their speeds" in said
    three, five = (advised(tmp_path / "out" / f"workers-{n}") for n in (3, 5))
    assert jobs.load(five["job"]).cluster.workers == five["workers"] == 5 and five["measured_workers"] == 3
    assert jobs.load(three["job"]).predicted is not None
    times = [read_times(path, 5) for path in (tmp_path / "out" / "workers-5").glob("times-*.csv")]
    further = {np.mean(each[4]) for each in times}
    assert len(further) == len(times) > 3, "each seed has its own"


def test_without_a_measurement_declared_times_say_how_many_workers_there_may_be(job, tmp_path, capsys):
    with pytest.raises(JobError, match="--extrapolate: must come with --from"):
        main(job, Asked(extrapolate=True, workers=(4,)))
    with pytest.raises(JobError, match="cluster.compute.seconds"):
        main(job, Asked(workers=(4,), out=tmp_path / "out"))
    one = ["cluster.compute.seconds=0.1"]
    assert main(job, Asked(workers=(4,), overrides=one, paradigms=("bsp", "asp"), out=tmp_path / "out")) == 0
    assert jobs.load(tmp_path / "out" / "workers-4" / "advised.toml").cluster.workers == 4
    assert worker_counts("4,8") == [4, 8] and worker_counts("") == []
    for text in ("4,4", "1", "4,", "x"):
        with pytest.raises(JobError, match=r"--workers .*: must be different numbers of at least 2, such as 4,8"):
            worker_counts(text)


def test_every_candidate_has_the_same_rates_and_more_while_the_best_is_at_an_end(job, tmp_path):
    out = tmp_path / "out"
    main(job, Asked(paradigms=("bsp", "asp"), out=out))
    factors = {
        label: sorted(float(path.name.rpartition("x")[2]) for path in (out / "trial-1").glob(f"{label}-lr-x*"))
        for label in ("bsp", "asp")
    }
    for label, tried in factors.items():
        assert set(advise.RATES) <= set(tried) and len(tried) <= len(advise.RATES) + FURTHER, label
    said = advised(out)
    chosen = said["lr_factors"]
    assert all(len(factors[label]) == 5 or min(f) < chosen[label] < max(f) for label, f in factors.items())
    tried = factors[said["advised"]]
    is_at_an_end = chosen[said["advised"]] in (min(tried), max(tried))
    assert any("that was tried: a larger one may be better" in line for line in said["lines"]) == is_at_an_end


def test_a_best_rate_at_an_end_is_followed_by_further_ones_up_to_five():
    def found(*merits):
        return {Trained("bsp", Candidate({"name": "bsp"}), factor): {1: loss} for factor, loss in merits}

    def ends(*merits):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("hpcsync.report.variants.merit", lambda runs, n_seeds: (*runs,))
            at = at_an_end(found(*merits), 1)
        return [(end.best.factor, end.step) for end in at.values()], [trained.factor for trained in further(at)]

    assert ends((0.5, 3.0), (1.0, 2.0), (2.0, 1.0)) == ([(2.0, 2.0)], [4.0])
    assert ends((0.5, 1.0), (1.0, 2.0), (2.0, 3.0)) == ([(0.5, 0.5)], [0.25])
    assert ends((0.5, 3.0), (1.0, 1.0), (2.0, 2.0)) == ([], [])
    assert ends((0.5, 5.0), (1.0, 4.0), (2.0, 3.0), (4.0, 2.0), (8.0, 1.0)) == ([(8.0, 2.0)], [])


def spent_in(monkeypatch, folder, n_done=0):
    """Let the budget be spent once so many simulations in this folder are done."""

    def ended(futures, left_s):
        for future, path in futures.items():
            if left_s is not None and folder in path.parts and list(futures).index(future) == n_done:
                raise TimeoutError
            yield future

    monkeypatch.setattr(advice_trials, "as_completed", ended)


def test_a_budget_that_ends_within_the_first_trial_says_how_far_it_is(job, tmp_path, capsys, monkeypatch):
    asked = Asked(paradigms=("bsp", "asp"), out=tmp_path / "out", budget_s=9e9)
    spent_in(monkeypatch, "trial-1", 2)
    assert main(job, asked) == 1
    said = capsys.readouterr()
    assert "The budget was spent in trial 1: 2 of 6 runs are done; the same command resumes." in said.err
    assert not said.out


@pytest.mark.parametrize("workers", [(), (2, 3)])
def test_each_number_of_workers_has_an_equal_part_of_the_budget(workers, job, tmp_path, monkeypatch):
    left, now_s = [], [1000.0]

    def ended(futures, left_s):
        left.append(left_s)
        now_s[0] += left_s
        raise TimeoutError

    monkeypatch.setattr(advice_trials, "as_completed", ended)
    for module in (advise, advice_trials):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    one = ["cluster.compute.seconds=0.1"]
    asked = Asked(paradigms=("bsp", "asp"), workers=workers, overrides=one, out=tmp_path / "out", budget_s=60)
    assert main(job, asked) == 1
    assert left == ([30, 30] if workers else [60])


def test_a_budget_that_ends_among_further_rates_leaves_the_ranking_by_the_others(job, tmp_path, capsys, monkeypatch):
    def ended(futures, left_s):
        if not {float(path.parent.name.rpartition("x")[2]) for path in futures.values()} <= set(advise.RATES):
            raise TimeoutError
        yield from futures

    monkeypatch.setattr(advice_trials, "as_completed", ended)
    main(job, Asked(paradigms=("bsp", "asp"), out=tmp_path / "out", budget_s=9e9))
    said = capsys.readouterr().out
    assert re.search(r"The budget was spent in trial 1, further learning rates: \d+ of \d+ runs? (is|are) done", said)
    found = advised(tmp_path / "out")
    assert {row["label"] for row in found["ranking"]} == {"bsp", "asp"} and len(found["trials"]) == 1
    assert set(found["lr_factors"].values()) <= set(advise.RATES)


def test_a_budget_ends_it_with_what_is_known(job, tmp_path, capsys, monkeypatch):
    asked = Asked(paradigms=("bsp", "asp"), out=tmp_path / "out", budget_s=9e9)
    spent_in(monkeypatch, "trial-3", 1)
    assert main(job, asked) == 0
    said = capsys.readouterr().out
    early = "This is from trial 2, with 33 % of the time; the learning rates were selected with one of its seeds."
    assert early in said
    assert "The budget was spent in trial 3: 1 of 6 runs are done; the same command resumes." in said
    assert "with the seeds of the trials, hence optimistic" in said
    assert main(job, asked._replace(budget_s=None)) == 0
    assert "The budget" not in capsys.readouterr().out, "control"


def test_a_budget_that_ends_before_any_candidate_could_arrive_leaves_a_ranking_by_loss(
    job, tmp_path, capsys, monkeypatch
):
    short = ["stop={target_loss = 1e-9, samples = 3000}"]
    asked = Asked(paradigms=("bsp", "asp", "easgd"), overrides=short, out=tmp_path / "out", budget_s=9e9)
    spent_in(monkeypatch, "trial-2", 3)
    assert main(job, asked) == 1
    said = capsys.readouterr().out
    assert "Too early for advice: in trial 1, with 11 % of the time, no candidate reached loss 1e-09." in said
    assert re.search(r"The ranking is provisional: by the loss after [\d.]+ of [\d.]+ virtual s\.", said)
    assert "The budget was spent in trial 2: 3 of 6 runs are done; the same command resumes." in said
    assert "none is advised" not in said
    found = advised(tmp_path / "out")
    losses = [row["loss"] for row in found["ranking"]]
    assert losses == sorted(losses) and len(set(losses)) == 3
    of_best = {row["label"]: (row["lr_factor"], row["loss"]) for row in found["trials"][0]["candidates"]}
    assert {row["label"]: (found["lr_factors"][row["label"]], row["loss"]) for row in found["ranking"]} == of_best
    assert main(job, asked._replace(budget_s=None)) == 1
    assert "No candidate reached loss 1e-09 with every seed, so none is advised." in capsys.readouterr().out, "control"


def test_what_fails_in_the_last_trial_leaves_the_advice(job, tmp_path, capsys, monkeypatch):
    """The prediction is then by the runs that have chosen."""
    failing(monkeypatch, "trial-4")
    asked = Asked(paradigms=("bsp", "asp"), out=tmp_path / "out")
    assert main(job, asked) == 0
    said = capsys.readouterr()
    assert "Train with " in said.out and (tmp_path / "out" / "advised.toml").exists()
    assert "with the seeds of the trials, hence optimistic: trial 4 failed." in said.out
    assert f"failed, see {tmp_path / 'out' / 'trial-4'}/" in said.err
    assert advised(tmp_path / "out")["predicted"] and not (tmp_path / "out" / "trial-4").exists()


@pytest.mark.parametrize(
    ("words", "left"),
    [
        ("trial-1/asp-lr-x2/seed-1005", "bsp"),
        ("trial-1/bsp-lr-x", "asp"),
        ("trial-2/asp-lr", "bsp"),
        ("trial-3/bsp-lr", "asp"),
    ],
)
def test_a_candidate_of_which_a_simulation_fails_is_left_out(job, tmp_path, capsys, monkeypatch, words, left):
    failing(monkeypatch, words)
    out = tmp_path / "out"
    assert main(job, Asked(paradigms=("bsp", "asp"), overrides=[STRAGGLER], out=out)) == 0
    said, trial = capsys.readouterr(), words[6]
    assert said.err.count(" failed, see ") == said.out.count("because a simulation failed (see ") >= 1
    line = rf"hpcsync: advise: trial {trial}.*: {words[8:11]} lr x\S+ failed, see {out}/{words}\S*\.log\n"
    assert re.search(line, said.err)
    assert f"Left out: {words[8:11]} lr x" in said.out
    assert f"Train with {left}." in said.out
    assert len(advised(out)["ranking"]) == 1 + ("seed" in words), "the control: another rate of the candidate is tried"


def test_a_trial_of_which_most_candidates_fail_ends_it_with_what_is_known(job, tmp_path, capsys, monkeypatch):
    failing(monkeypatch, "trial-2")
    asked = Asked(paradigms=("bsp", "asp"), out=tmp_path / "out")
    main(job, asked)
    said, line = capsys.readouterr(), r"advise: trial 2: (\d) of \1 candidates and learning rates failed"
    assert re.search(f"hpcsync: {line}", said.err) and re.search(line, said.out)
    assert advised(tmp_path / "out")["share"] < 1
    failing(monkeypatch, "trial-1")
    with pytest.raises(JobError, match=r"^advise: trial 1: (\d+) of \1 candidates and learning rates failed$"):
        main(job, asked._replace(out=tmp_path / "other"))


def test_a_job_that_a_simulation_refuses_is_in_its_log(job, tmp_path):
    folder = tmp_path / "seed-1"
    assert advice_trials.simulate_one(jobs.load(job, ["cluster={workers = 3}"]), folder, str(job)) == 2
    assert folder.with_name("seed-1.log").read_text().startswith("hpcsync: cluster.compute: missing")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
def test_a_full_disk_is_reported_with_the_file(job, tmp_path):
    """For the log of a simulation, and for the advice after all of them."""
    (tmp_path / "seed-1.log").symlink_to("/dev/full")
    with pytest.raises(NotWritten, match=r"seed-1\.log: No space left on device$"):
        advice_trials.simulate_one(jobs.load(job, ["cluster={workers = 3}"]), tmp_path / "seed-1", str(job))
    for name in ("advised.toml", "advice.json"):
        out = tmp_path / name.partition(".")[0]
        out.mkdir()
        (out / name).symlink_to("/dev/full")
        with pytest.raises(NotWritten, match=rf"{name}: No space left on device$"):
            main(job, Asked(paradigms=("bsp", "asp"), out=out))


def failing(monkeypatch, words):
    """Let the simulations fail whose folders have these words."""
    simulate_one = advice_trials.simulate_one

    def fails(of_job, folder, path):
        return 1 if words in str(folder) else simulate_one(of_job, folder, path)

    monkeypatch.setattr(advice_trials, "simulate_one", fails)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells the simulations on Linux only")
def test_no_simulation_outlives_the_command(job, tmp_path):
    argv = [sys.executable, "-m", "hpcsync", "advise", str(job), "--jobs", "2", "--out", str(tmp_path / "out")]
    process = subprocess.Popen([*argv, "--set", "stop={samples = 10_000_000, target_loss = 1e-30}"])
    deadline_s = time.monotonic() + 200
    while not (logs := [*tmp_path.glob("out/trial-1/*/*.log")]) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    children = psutil.Process(process.pid).children()
    process.kill()
    process.wait()
    _, left = psutil.wait_procs(children, 100)
    for child in left:
        child.kill()
    assert logs and children and not left


def test_a_simulation_whose_process_is_killed_is_told_in_one_line(job, tmp_path, monkeypatch):
    def killed(*_):
        raise BrokenProcessPool("A process in the process pool was terminated abruptly")

    monkeypatch.setattr(Inline, "submit", killed)
    with pytest.raises(JobError, match=r"^advise: trial 1: a process that simulates was killed: out of memory\?$"):
        main(job, Asked(paradigms=("bsp", "asp"), out=tmp_path / "out"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("cluster={workers = 1}", "cluster.workers = 1: must be at least 2"),
        ("stop={samples = 9}", "stop: must have target_accuracy or target_loss"),
        ("stop={target_loss = 0.3}", "stop: must have samples, updates or seconds"),
        ("evaluation.every_samples=0", "evaluation.every_samples = 0: must be"),
        ("cluster={workers = 3}", r"^cluster.compute: missing; give it, or the times of a run \(--from RUN\)$"),
        ("optimizer.lrr=3", "^optimizer.lrr = 3: must be"),
        ("workload.batch_size=100000", "^workload.batch_size = 100000: must be"),
    ],
)
def test_what_cannot_be_advised_on_is_refused_in_one_line(job, tmp_path, override, message):
    with pytest.raises(JobError, match=message) as refused:
        main(job, Asked(overrides=[override], out=tmp_path / "out"))
    assert "\n" not in str(refused.value) and not (tmp_path / "out").exists()


def test_an_advice_that_cannot_be_written_is_refused_before_any_trial(job, tmp_path):
    (tmp_path / "out" / "advice.json").mkdir(parents=True)
    with pytest.raises(JobError, match="out/advice.json: Is a directory"):
        main(job, Asked(paradigms=("bsp", "asp"), out=tmp_path / "out"))
    assert Inline.n == 0


def test_a_candidate_with_batches_by_speed_can_be_asked_for(job, tmp_path):
    assert main(job, Asked(paradigms=("bsp", "bsp + batches by speed"), out=tmp_path / "out")) == 0
    simulated = tmp_path / "out" / "trial-1" / "bsp---batches-by-speed-lr-x1" / "seed-1005" / "job.toml"
    assert jobs.load(simulated).batches.policy == "equal-finish"


def test_over_slow_links_compressed_pushes_are_tried(job, tmp_path, monkeypatch):
    """With the throughput of the codec on this machine, measured once; without links their share is 0."""
    shares = []

    def few(n_workers, iteration_s, link_share, without_options):
        assert "async-diloco" in without_options and "local-sgd" not in without_options
        shares.append(link_share)
        return [each for each in candidates(n_workers, iteration_s, link_share) if each.paradigm["name"] == "bsp"]

    monkeypatch.setattr(advise, "candidates", few)
    out, short = tmp_path / "out", "stop={samples = 2000, target_loss = 0.2}"
    slow = Asked(overrides=["cluster.network={bandwidth_gbit = 1e-5}", short], out=out)
    assert main(job, slow) == 0
    assert 0.1 < shares[0] < 1
    labels = [row["label"] for row in advised(out)["trials"][0]["candidates"]]
    assert labels == ["bsp", "bsp + batches by speed", "bsp + top-k"]
    first = jobs.load(out / "trial-1" / "bsp---top-k-lr-x1" / "seed-1005" / "job.toml").compression
    assert first.name == "top-k" and [first.gbytes_per_s] == list(
        json.loads((out / "codecs.json").read_text()).values()
    )
    simulated = Inline.n
    assert main(job, slow) == 0
    assert Inline.n == simulated, "a restart has the same jobs"
    assert advise._Adviser(job, Asked(), None)._limit_s()[2] == 0


def test_an_advice_that_ends_while_it_writes_a_measured_codec_can_be_resumed(job, tmp_path, monkeypatch):
    monkeypatch.setattr("hpcsync.simulator.measured_time.encoding_gbytes_per_s", lambda job: 2.0)
    trials = advise._Adviser(job, Asked(out=tmp_path / "out"), None)._trials
    fp16 = Trained("fp16", Candidate({"name": "bsp"}, {}, {"name": "fp16"}))
    write = Path.write_text

    def begin(path, text, **options):
        write(path, text[:5], **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "write_text", begin)
        trials.job_table(fp16)
    assert trials.job_table(fp16)["compression"] == {"name": "fp16", "gbytes_per_s": 2.0}


def test_a_candidate_of_a_job_that_compresses_may_be_uncompressed(job, tmp_path):
    asked = Asked(paradigms=("bsp", "bsp + none"), overrides=["compression={name = 'fp16'}"], out=tmp_path / "out")
    assert main(job, asked) == 0
    names = {
        row["label"]: jobs.load(tmp_path / "out" / row["folder"] / "seed-1005" / "job.toml").compression.name
        for row in advised(tmp_path / "out")["trials"][0]["candidates"]
    }
    assert names == {"bsp": "fp16", "bsp + none": "none"}


def test_candidates_that_do_not_suit_the_job_are_named_with_the_reason(job, tmp_path, capsys):
    fixed = "{name = 'adsp', commits = 2, search_every_s = 5.0}"  # its `advised.toml` would be refused
    four = ("bsp", "asp", "{name = 'k-sync', k = 4}", fixed)
    assert main(job, Asked(paradigms=four, out=tmp_path / "out")) == 0
    said = capsys.readouterr().out
    assert "Not tried: k-sync k=4 (paradigm.k = 4: must be" in said
    assert "(paradigm.search_every_s = 5.0: must be omitted with paradigm.commits = 2, where nothing" in said
    with pytest.raises(JobError, match="fewer than two candidates suit the job"):
        main(job, Asked(paradigms=("bsp", "nothing"), out=tmp_path / "out"))


@pytest.mark.parametrize(
    "paradigms", [("bsp",), ("bsp", "bsp"), ("bsp", "{name = 'bsp'}"), ("bsp", "asp", '{name="asp"}')]
)
def test_a_candidate_that_is_asked_for_alone_or_twice_is_refused(job, tmp_path, paradigms):
    with pytest.raises(JobError, match="--paradigm bsp.*: must be given at least twice, each time for another candid"):
        main(job, Asked(paradigms=paradigms, out=tmp_path / "out"))
    assert Inline.n == 0


def test_a_candidate_for_which_the_first_trial_is_too_short_is_left_out(job, tmp_path, capsys):
    """ADSP's first push is after `check_period_s`; the others are advised on."""
    adsp = "{name = 'adsp', check_period_s = 9.0, interval_min_s = 0.1}"
    asked = Asked(paradigms=("bsp", "asp", adsp), overrides=["stop={target_loss = 0.5, seconds = 80}"])
    assert main(job, asked._replace(out=tmp_path / "out")) == 0
    said = capsys.readouterr().out
    assert "Train with " in said
    assert "Not tried: adsp check_period_s=9.0 interval_min_s=0.1 (the first trial is too short: stop.seconds" in said
    assert main(job, asked._replace(out=tmp_path / "long", overrides=["stop={target_loss = 0.5, seconds = 90}"])) == 0
    assert "Not tried" not in capsys.readouterr().out, "control: it has 10 s"


def test_a_run_of_the_advised_job_is_put_beside_its_prediction(job, tmp_path, capsys, monkeypatch):
    """In the summary, in the report, and by the next advice, which has the run's own times."""
    out, asked = tmp_path / "out", Asked(paradigms=("bsp", "asp"), out=tmp_path / "out")
    assert main(job, asked) == 0
    predicted = advised(out)["predicted"]
    written = jobs.load(out / "advised.toml")
    assert written.predicted is not None and written.predicted.seconds == predicted["seconds"]
    assert 0 <= predicted["low_s"] < predicted["seconds"] < predicted["high_s"]
    assert jobs.load(out / "advised.toml", ["seed=3"]).predicted == written.predicted
    assert jobs.load(out / "advised.toml", ["workload.batch_size=2"]).predicted is None, "that is another job"
    assert simulate(written, tmp_path / "run", Console(quiet=True)) == 0
    summary = summarize(load(tmp_path / "run"))
    assert summary.predicted == written.predicted and summary.time_to_target_s
    said = beside_prediction(summary)
    assert f"took {summary.time_to_target_s / predicted['seconds']:.2f} times as long" in said
    assert report.main([tmp_path / "run"], tmp_path / "report.html") == 0
    assert said in html.unescape((tmp_path / "report.html").read_text())
    capsys.readouterr()
    monkeypatch.setattr(measured_cluster, "LEAST", 2)
    again = Asked(paradigms=("bsp", "asp"), measured=tmp_path / "run", out=tmp_path / "again")
    assert main(out / "advised.toml", again) == 0
    assert f"Prediction for run: {said}." in capsys.readouterr().out
    assert advised(tmp_path / "again")["predicted"]["seconds"] != predicted["seconds"], "the estimate is a new one"


def test_without_a_prediction_there_is_no_line(job, tmp_path):
    assert simulate(jobs.load(job), tmp_path / "run", Console(quiet=True)) == 0
    assert beside_prediction(summarize(load(tmp_path / "run"))) == ""


def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_simulated(job, tmp_path):
    with pytest.raises(JobError, match="must be a folder"):
        main(job, Asked(out=job))
    with pytest.raises(JobError, match="Not a directory"):
        main(job, Asked(out=job / "advice"))
