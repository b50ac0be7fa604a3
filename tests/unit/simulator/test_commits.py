"""Commits and compressed pushes in virtual time: resulting weights, times and durations."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hpcsync.config.errors import JobError
from hpcsync.core.job_validation import check
from hpcsync.paradigms.adsp import EvaluatedADSP
from hpcsync.trace.reader import Trace
from hpcsync.trace.schema import Change, Outcome
from hpcsync.workloads.registry import build
from tests.plain import committed
from tests.unit.jobs import LINEAR
from tests.unit.simulator.running import TIMING, failed, simulate, timing_job

SGD = {"name": "sgd", "lr": 0.05}
NESTEROV = {"name": "sgd", "lr": 0.02, "momentum": 0.9, "nesterov": True}
ADAM = {"name": "adam", "lr": 0.01}
ASHL = {"name": "ashl", "warmup": 1, "profiled": 4, "steps_coarse": 3, "steps_fine": 2, "loss_preset": 1.5}
AFTER_GATE = {**ASHL, "staleness": 0, "commit": "after-gate"}
ADSP = {"name": "adsp", "check_period_s": 12, "interval_min_s": 0.5, "commits": 3}  # every 4 s, plus missing commits


def commits(trace: Trace, worker: int) -> list[tuple[int, float, float]]:
    """Return local steps, begin and end of each push."""
    pushes = trace.tables["pushes"]
    return pushes[pushes["worker"] == worker][["local_steps", "begin_s", "end_s"]].tolist()


@pytest.mark.parametrize("optimizer", [SGD, NESTEROV, ADAM], ids=["sgd", "nesterov", "adam"])
@pytest.mark.parametrize("paradigm", [ASHL, AFTER_GATE, ADSP], ids=["ashl", "after-gate", "adsp"])
def test_the_weights_are_those_of_the_commits_in_the_trace(tmp_path, paradigm, optimizer):
    """Against plain torch; another weight is the control."""
    how = {"workload": LINEAR, "optimizer": optimizer, "paradigm": paradigm, "stop": {"updates": 40}}
    job = timing_job(workers=3, seconds=[1.0, 3.0, 1.5], **how)
    workload = build(job)
    trace = simulate(job, tmp_path / "t.h5", workload)
    weights = torch.cat([p.detach().flatten() for p in workload.model.parameters()]).numpy()
    assert failed(trace) == []
    assert len(set(trace.tables["pushes"]["local_steps"].tolist())) > 1
    assert np.allclose(weights, committed(job, trace), rtol=1e-9, atol=1e-12)
    trace.tables["pushes"]["weight"] *= 0.99
    assert not np.allclose(weights, committed(job, trace), rtol=1e-6, atol=1e-9)


def test_a_worker_commits_after_the_first_step_that_ends_past_its_interval(tmp_path):
    """4 s after reading: with steps of 1.5 s after the third, with steps of 1 s after the fourth, of 5 s after one."""
    job = timing_job(workers=3, seconds=[1.5, 1.0, 5.0], paradigm=ADSP, stop={"seconds": 13.0})
    trace = simulate(job, tmp_path / "t.h5")
    assert commits(trace, 0)[:2] == [(3, 0.0, 4.5), (3, 4.5, 9.0)]
    assert commits(trace, 1)[:2] == [(4, 0.0, 4.0), (4, 4.0, 8.0)]
    assert commits(trace, 2)[:2] == [(1, 0.0, 5.0), (1, 5.0, 10.0)]
    assert set(trace.tables["grants"]["local_steps"][:3].tolist()) == {-1}


def test_a_leaving_worker_commits_its_finished_steps(tmp_path):
    """It leaves in place of its sixth step: pushes of four steps and of one, and no step is lost."""
    leave = {"cluster": {"events": [{"worker": 1, "at_iteration": 6, "change": "leave"}]}}
    job = timing_job(workers=2, seconds=1.0, paradigm=ADSP, stop={"seconds": 30.0}, **leave)
    trace = simulate(job, tmp_path / "t.h5")
    assert commits(trace, 1) == [(4, 0.0, 4.0), (1, 4.0, 5.0)]
    assert trace.tables["membership"]["now_s"][0] == 5.0
    assert failed(trace) == []


def test_a_worker_computing_at_the_end_of_the_run_is_stopped(tmp_path):
    """At 13.5 s, between two commits: the step in progress is its last, and the commit is dropped."""
    trace = simulate(
        timing_job(workers=2, seconds=[1.0, 2.0], paradigm=ADSP, stop={"seconds": 13.5}), tmp_path / "t.h5"
    )
    assert commits(trace, 0)[-1] == (2, 12.0, 14.0)
    assert commits(trace, 1)[-1] == (1, 12.0, 14.0)
    assert trace.tables["pushes"]["outcome"][-2:].tolist() == [Outcome.DROPPED, Outcome.DROPPED]
    assert failed(trace) == []


BY_EVALUATIONS = {**ASHL, "loss": "evaluation", "loss_preset": 0.5}


def of_evaluations(**tables: Any) -> Any:
    how = {"workload": LINEAR, "optimizer": SGD, "paradigm": BY_EVALUATIONS, "stop": {"updates": 80}}
    return timing_job(workers=3, seconds=[1.0, 3.0, 1.5], **{**how, "evaluation": {"every_samples": 20}, **tables})


@pytest.mark.parametrize("evaluation", [{"every_samples": 20}, {"every_samples": 20, "seconds": 0.7}])
@pytest.mark.parametrize("preset", [True, False], ids=["preset", "plateau"])
def test_an_evaluation_begins_the_fine_stage(tmp_path, evaluation, preset):
    """The row of the stage follows that of an evaluation; another loss, and a loss of a stage, are the controls."""
    options = {key: value for key, value in BY_EVALUATIONS.items() if preset or key != "loss_preset"}
    trace = simulate(of_evaluations(evaluation=evaluation, paradigm={**options, "plateau": 0.3}), tmp_path / "t.h5")
    assert failed(trace) == []
    rows = trace.tables["decisions"]
    assert rows["chosen"][rows["controller"] == b"stage"].tolist() == [1.0, 2.0]
    at = int(np.flatnonzero(rows["controller"] == b"stage")[1])
    assert rows["controller"][at - 1] == b"evaluated"
    assert rows["chosen"][at - 1] == rows["loss"][at] in trace.tables["evaluations"]["loss"]
    rows["chosen"][at - 1] += 0.01
    assert any("losses that decide are those of evaluations" in each for each in failed(trace))
    assert any("each stage begins once" in each for each in failed(trace))


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"evaluation": {"every_samples": 0}}, "evaluation.every_samples = 0: must be at least 1"),
        ({"workload": TIMING}, "must be one that can be evaluated"),
        ({"workload": TIMING, "paradigm": {"name": "adsp", "loss": "evaluation"}}, "must be one that can be evaluated"),
    ],
)
def test_decisions_by_evaluations_need_evaluations(tables, message):
    with pytest.raises(JobError, match=message):
        check(of_evaluations(**tables))


SEARCHING = {"name": "adsp", "check_period_s": 12, "interval_min_s": 3, "search_every_s": 60, "loss": "evaluation"}


def searching(**tables: Any) -> Any:
    how = {"paradigm": SEARCHING, "optimizer": {"name": "sgd", "lr": 0.01}, "stop": {"seconds": 200.0}}
    return of_evaluations(**{**how, "evaluation": {"every_samples": 0}, **tables})


@pytest.mark.parametrize(
    "evaluation",
    [
        {"every_samples": 0},
        {"every_samples": 20},
        {"every_samples": 0, "seconds": 0.7},
        {"every_samples": 20, "seconds": 0.7},
        {"every_samples": 0, "seconds": 9.0},
        {"every_samples": 20, "seconds": 13.0},
    ],
    ids=str,
)
def test_a_search_evaluates_the_model(tmp_path, evaluation):
    """At its start, in the middle of each trial and at its end; every check is one more. All losses fall."""
    trace = simulate(searching(evaluation=evaluation), tmp_path / "t.h5")
    assert failed(trace) == []
    rows, evaluations = trace.tables["decisions"], trace.tables["evaluations"]
    rewards = rows[rows["controller"] == b"reward"]
    assert rewards["chosen"][0] == 1.0 and rewards["reward"][0] > 0
    assert np.isin([rewards[name][0] for name in ("loss_start", "loss_middle", "loss_end")], evaluations["loss"]).all()
    seconds = evaluation.get("seconds", 0.0)
    first = trace.tables["grants"][trace.tables["grants"]["now_s"] == rewards["now_s"][0]]
    assert len(first) == 3 and first["held_s"].min() >= seconds - 1e-9


def test_a_model_that_diverges_in_a_trial_is_evaluated_once_in_its_middle(tmp_path):
    trace = simulate(searching(optimizer={"name": "sgd", "lr": 1e30}), tmp_path / "t.h5")
    assert failed(trace) == []
    rows = trace.tables["decisions"]
    first = rows[rows["controller"] == b"reward"][0]
    assert np.isfinite(first["loss_start"]) and np.isnan(first["loss_middle"])
    evaluated = rows[(rows["controller"] == b"evaluated") & (rows["now_s"] <= first["now_s"])]
    assert len(evaluated) == 3


def test_that_one_commit_is_best_is_found(tmp_path):
    """Gradient descent without noise, and slow links: each commit takes a worker three of its twelve steps a period.

    With losses of commits the search begins with two, and ends there or above.
    """
    network = {"bandwidth_gbit": 2.13e-7, "server_bandwidth_gbit": 1.0, "latency_us": 0.0}
    how = {
        "workload": {**LINEAR, "batch_size": LINEAR["samples"]},
        "optimizer": {"name": "sgd", "lr": 0.03},
        "evaluation": {"every_samples": 0},
        "stop": {"seconds": 150.0},
        "cluster": {"network": network},
    }
    found, losses = {}, {}
    for paradigm in (
        *({**SEARCHING, "loss": loss, "loss_target": 0.01} for loss in ("evaluation", "commits")),
        *({**SEARCHING, "loss": "commits", "commits": commits} for commits in (1, 2)),
    ):
        trace = simulate(timing_job(workers=3, paradigm=paradigm, **how), tmp_path / f"{len(losses)}.h5")
        assert failed(trace) == []
        rows = trace.tables["decisions"]
        losses[len(losses)] = trace.tables["evaluations"]["loss"][-1]
        found[paradigm["loss"]] = found.get(paradigm["loss"], rows["chosen"][rows["controller"] == b"commits"][:1])
    evaluated, by_commits, given_1, given_2 = losses.values()
    assert found["evaluation"] == 1 < found["commits"]
    assert given_1 < evaluated < by_commits and given_1 < given_2


def test_searches_must_follow_from_the_evaluations(tmp_path):
    """Controls of the audit: other losses, versions and times, an evaluation that nothing needs, or too few."""
    trace = simulate(searching(), tmp_path / "t.h5")
    assert failed(trace) == []
    rows, evaluations = trace.tables["decisions"], trace.tables["evaluations"]
    evaluated, rewards = (np.flatnonzero(rows["controller"] == name) for name in (b"evaluated", b"reward"))
    losses, needed = "losses that decide are those of evaluations", "evaluations beside those that are due are needed"
    trials = "searches raise the rate by one and choose the best"

    def broken(table: str, row: int, **values: float) -> set[str]:
        changed = trace.tables[table].copy()
        for column, value in values.items():
            changed[column][row] = value
        return {line.split(":")[0] for line in failed(replace(trace, tables={**trace.tables, table: changed}))}

    for k in (0, 1, 2, 4):
        loss = rows["chosen"][evaluated[k]]
        assert {losses, trials} <= broken("decisions", evaluated[k], chosen=1.01 * loss)
        assert {losses} <= broken("evaluations", k, loss=1.01 * loss)
    for name in ("reward", "loss_start", "loss_middle", "loss_end", "chosen"):
        assert trials in broken("decisions", rewards[0], **{name: 1.01 * rows[name][rewards[0]]})
    assert needed in broken("evaluations", 1, version=evaluations["version"][1] - 1)
    assert needed in broken("evaluations", 1, now_s=evaluations["now_s"][1] - 5.0)
    for lost in (evaluated[1], evaluated[2]):
        fewer = {**trace.tables, "decisions": np.delete(rows, lost)}
        assert any(trials in line for line in failed(replace(trace, tables=fewer)))
    more = np.insert(evaluations, 2, evaluations[1])
    update = trace.tables["updates"][evaluations["version"][1]]
    for name in ("version", "now_s", "samples"):
        more[name][2] = update[name]
    assert any(needed in line for line in failed(replace(trace, tables={**trace.tables, "evaluations": more})))
    fewer = replace(trace, tables={**trace.tables, "evaluations": evaluations[:3]})
    assert any(AT_ONCE in line and "there is none" in line for line in failed(fewer))


def test_a_search_begins_when_the_evaluated_loss_rises(tmp_path):
    paradigm = {**SEARCHING, "search_every_s": 1e4, "loss_rise": 1e-6}
    trace = simulate(searching(paradigm=paradigm, optimizer={"name": "sgd", "lr": 0.6}), tmp_path / "t.h5")
    rows = trace.tables["decisions"]
    assert (rows["controller"] == b"commits").sum() >= 2
    assert failed(trace) == []
    job = trace.attributes["job"].replace("loss_rise = 1e-06", "loss_rise = 1e9")
    assert any(
        "choose the best" in line for line in failed(replace(trace, attributes={**trace.attributes, "job": job}))
    )


AT_ONCE = "evaluations that are needed begin at once, or after the one before"
ASKS = {
    "late": lambda search: search._all_have_stopped or search._version > search._wanted,
    "never": lambda search: search._all_have_stopped,
}


def found(trace: Trace, engine: str) -> bool:
    """Return whether the audit finds a late evaluation, if the trace were one of this engine."""
    return any(AT_ONCE in line for line in failed(replace(trace, attributes={**trace.attributes, "engine": engine})))


@pytest.mark.parametrize("seconds", [{}, {"seconds": 0.7}], ids=str)
@pytest.mark.parametrize("asks", ASKS)
def test_an_evaluation_that_comes_after_a_further_push_or_never_is_found(tmp_path, monkeypatch, asks, seconds):
    """The search asks for it too late, or only where its workers wait for it."""
    wants = property(lambda search: search._wanted is not None and ASKS[asks](search))
    monkeypatch.setattr(EvaluatedADSP, "wants_evaluation", wants)
    trace = simulate(searching(evaluation={"every_samples": 0, **seconds}), tmp_path / "t.h5")
    assert found(trace, "simulator") and found(trace, "mpi")


def test_an_evaluation_that_keeps_workers_waiting_is_found(tmp_path):
    """On ranks the time differs in any run."""
    trace = simulate(searching(), tmp_path / "t.h5")
    rows, decisions = trace.tables["evaluations"].copy(), trace.tables["decisions"]
    assert not found(trace, "simulator")
    at = np.flatnonzero(rows["loss"] == decisions["loss_end"][decisions["controller"] == b"reward"][0])
    rows["now_s"][at] += 0.1
    late = replace(trace, tables={**trace.tables, "evaluations": rows})
    assert found(late, "simulator") and not found(late, "mpi")


@pytest.mark.parametrize("events", ["leave", "join"])
def test_workers_that_leave_while_the_model_is_evaluated(tmp_path, events):
    """Worker 1 leaves in the first trial; it joins while the others wait for the evaluation at its end."""
    away = [{"worker": 1, "at_s": 20.0, "change": "leave"}]
    back = [{"worker": 1, "at_s": 26.0, "change": "join"}] if events == "join" else []
    evaluation = {"every_samples": 0, "seconds": 4.0}
    trace = simulate(searching(evaluation=evaluation, cluster={"events": away + back}), tmp_path / "t.h5")
    assert failed(trace) == []
    changes = trace.tables["membership"][["now_s", "worker", "change"]].tolist()
    assert changes[: 1 + len(back)] == [(21.0, 1, Change.LEFT), (26.0, 1, Change.JOINED)][: 1 + len(back)]
    rows = trace.tables["decisions"]
    assert (rows["controller"] == b"commits").any()


def test_local_steps_follow_speed_and_links(tmp_path):
    """Steps of 1, 2 and 1 s; dense pushes of 1, 1 and 4 s, of which the last is shortened to the available time."""
    network = {"bandwidth_gbit": [32e-6, 32e-6, 8e-6], "server_bandwidth_gbit": 1.0, "latency_us": 0.0}
    paradigm = {**ASHL, "steps_coarse": 8, "ratio_coarse": 0.05}
    trace = simulate(
        timing_job(
            workers=3,
            seconds=[1.0, 2.0, 1.0],
            paradigm=paradigm,
            compression={"name": "top-k"},
            stop={"updates": 60},
            cluster={"network": network},
        ),
        tmp_path / "t.h5",
    )
    assert failed(trace) == []
    rows = trace.tables["decisions"]
    chosen = {
        name: rows["chosen"][rows["controller"] == name][:3].tolist() for name in (b"local-steps", b"share", b"ratio")
    }
    # Worker 1 needs 8 x 2 s and 2 s of transfers: 18 s, which are 16 steps of worker 0 and 10 of worker 2.
    assert chosen[b"local-steps"] == [16, 8, 10]
    assert chosen[b"share"] == [16 / 34, 8 / 34, 10 / 34]
    # With a twentieth of the elements, and indices, they need 17.1, 17.1 and 14.4 s: the last one has 3.1 s for its
    # push of 4 s.
    assert chosen[b"ratio"] == pytest.approx([0.05, 0.05, 3.1 / 8], rel=0.02)
    late = trace.tables["pushes"][-9:]
    sizes = {worker: int(late["wire_bytes"][late["worker"] == worker][0]) - 4000 for worker in range(3)}
    assert sizes == {0: 8 + 8 * 50, 1: 8 + 8 * 50, 2: 8 + 8 * int(1000 * chosen[b"ratio"][2])}


@pytest.mark.parametrize("servers", [1, 2])
def test_a_compressed_push_takes_its_bytes_and_its_codec_its_time(tmp_path, servers):
    """4 kB at 4 kB/s: 1 s to read, 1/2 s to put in half precision. Compression at 2 kB/s: 2 s, counted separately."""
    network = {"bandwidth_gbit": 32e-6, "server_bandwidth_gbit": 1.0, "latency_us": 0.0}
    how: dict[str, Any] = {"cluster": {"servers": servers, "network": network}, "stop": {"updates": 3}}
    job = timing_job(workers=1, compression={"name": "fp16", "gbytes_per_s": 2e-6}, **how)
    push = simulate(job, tmp_path / "t.h5").tables["pushes"][0]
    assert (push["pull_s"], push["comm_s"], push["encode_s"]) == pytest.approx((1.0, 1.5, 2.0))
    assert (push["wire_bytes"], push["begin_s"], push["end_s"], push["now_s"]) == pytest.approx((6000, 1, 2, 4.5))
    plain = simulate(timing_job(workers=1, **how), tmp_path / "plain.h5").tables["pushes"][0]
    assert (plain["comm_s"], plain["encode_s"], plain["wire_bytes"]) == pytest.approx((2.0, 0.0, 8000))


def test_zero_time_iterations_are_refused_for_adsp(tmp_path):
    job = timing_job(workers=2, seconds=[1.0, 0.0], paradigm=ADSP, cluster={"network": {"latency_us": 1.0}})
    with pytest.raises(JobError, match='paradigm.name = "adsp": must not be simulated where iterations take 0 seconds'):
        simulate(job, tmp_path / "t.h5")


def test_a_stage_needs_losses(tmp_path):
    """Without losses the stage stays coarse, with or without a plateau."""
    paradigm = {**ASHL, "loss_preset": 1e9}
    trace = simulate(timing_job(workers=2, paradigm=paradigm, stop={"updates": 80}), tmp_path / "t.h5")
    rows = trace.tables["decisions"]
    assert rows["chosen"][rows["controller"] == b"stage"].tolist() == [1.0]
    assert math.isnan(rows["loss"][0])
    assert failed(trace) == []
