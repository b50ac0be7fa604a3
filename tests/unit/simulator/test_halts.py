"""Checkpoints and restarts in virtual time: closed forms, a run that really repeats, stillness, audits and weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpcsync.audit.server_recount import Recount
from hpcsync.simulator.halts import Halts
from hpcsync.simulator.run import Judged, Simulation
from hpcsync.simulator.server_run import ServerSimulation
from hpcsync.simulator.simulated_again import simulated_again
from hpcsync.trace.reader import Trace
from hpcsync.workloads.registry import build
from tests.plain import committed
from tests.unit.jobs import LINEAR, make_job
from tests.unit.recorder import Recorder
from tests.unit.simulator.running import PARADIGMS, TIMING, WITHOUT_SERVER, failed, simulate, timing_job
from tests.unit.simulator.separated import TIMING as SEPARATED

BSP, ALLREDUCE = {"name": "bsp"}, {"name": "allreduce"}
IN_STEP = [BSP, ALLREDUCE, {"name": "k-sync", "k": 2}, {"name": "gossip", "mode": "permutation"}]
STANZA = {"name": "stanza", "cut": "classifier", "fc_workers": 1, "fc_share": 0.2}
SYNC_SWITCH = {"name": "sync-switch", "share": 0.5, "then": {"name": "asp"}}
EVERY = [
    *PARADIGMS,
    *WITHOUT_SERVER,
    {"name": "k-sync", "k": 2, "cancel": "abort"},
    {"name": "k-batch-async", "k": 2},
    {"name": "ashl", "warmup": 1, "profiled": 4, "steps_coarse": 4, "steps_fine": 2, "loss_preset": 1e9},
    {"name": "adsp", "check_period_s": 4.0, "interval_min_s": 0.5, "commits": 3},
    {"name": "async-diloco", "steps": 3, "quorum": 2, "grace_s": 0.6},
    SYNC_SWITCH,
    STANZA,
]
NETWORK = {"network": {"bandwidth_gbit": 1e-3, "latency_us": 1000}, "update_gbytes_per_s": 1e-3}


def names(paradigm: dict[str, Any]) -> str:
    return "-".join(map(str, paradigm.values()))


def die(at_s: float, restart_s: float = 0.0) -> dict[str, Any]:
    return {"worker": 1, "at_s": at_s, "change": "die", "restart_s": restart_s}


def cluster(*deaths: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"on_death": "restart", "events": list(deaths), **more}


def ended_s(trace: Trace) -> float:
    return float(trace.tables["updates"]["now_s"][-1])


def iterations(paradigm: dict[str, Any], n: int, workers: int = 2) -> dict[str, Any]:
    """Return the stopping rule of `n` iterations of workers in step."""
    return {"updates": n if paradigm["name"] in ("bsp", "allreduce", "k-sync", "stanza") else n * workers}


def repeated_s(n: int, every_s: float, checkpoint_s: float, deaths: list[tuple[float, float]]) -> float:
    """Return the duration of `n` common iterations of 1 s of a run that repeats what it has not saved."""
    now_s, due_s, continued_s, done, saved, deaths = 0.0, every_s, 0.0, 0, 0, sorted(deaths)
    while True:
        saves = done > saved and now_s >= due_s
        end_s = now_s + (checkpoint_s if saves else 1.0)
        if deaths and deaths[0][0] < end_s:
            now_s = sum(deaths[0])
            deaths = [death for death in deaths if death[0] >= now_s]
            done, due_s = saved, now_s + every_s
        elif saves:
            due_s, saved = max(due_s, continued_s) + every_s, done
            now_s = continued_s = end_s
        else:
            now_s, done = end_s, done + 1
            if done == n:
                return now_s


# ---- closed forms ----


@pytest.mark.parametrize("paradigm", [*IN_STEP, {"name": "local-sgd", "steps": 5}, STANZA], ids=names)
def test_n_checkpoints_take_n_times_as_long_as_one(paradigm: dict[str, Any], tmp_path: Path) -> None:
    tables = {"paradigm": paradigm, "stop": iterations(paradigm, 60), "checkpoint": {"seconds": 15.0}}
    if paradigm is STANZA:
        tables["workload"] = SEPARATED
    undisturbed = simulate(timing_job(**tables), tmp_path / "undisturbed.h5")
    for checkpoint_s in (3.0, 7.0):
        trace = simulate(timing_job(**tables, cluster={"checkpoint_s": checkpoint_s}), tmp_path / f"{checkpoint_s}.h5")
        n = int((ended_s(trace) - 1e-6) // 15.0)  # each at the end of an iteration, the next 15 s after it was due
        assert n >= 4 and ended_s(trace) == pytest.approx(ended_s(undisturbed) + n * checkpoint_s)
        assert failed(trace) == []


def test_checkpoints_come_after_so_many_updates(tmp_path: Path) -> None:
    tables = {"paradigm": BSP, "stop": {"updates": 100}, "checkpoint": {"seconds": 0, "updates": 30}}
    trace = simulate(timing_job(**tables, cluster={"checkpoint_s": 5.0}), tmp_path / "trace.h5")
    assert np.diff(trace.tables["updates"]["now_s"]).tolist() == [6.0 if n % 30 == 0 else 1.0 for n in range(1, 100)]


@pytest.mark.parametrize("paradigm", [*IN_STEP, {"name": "asp"}], ids=names)
def test_no_checkpoint_follows_another_without_an_iteration(paradigm: dict[str, Any], tmp_path: Path) -> None:
    """One is always due when an iteration ends. Servers make it before the last update, too."""
    tables = {"paradigm": paradigm, "stop": iterations(paradigm, 20), "checkpoint": {"seconds": 0.6}}
    trace = simulate(timing_job(**tables, cluster={"checkpoint_s": 0.1}), tmp_path / "trace.h5")
    n_checkpoints = 20 if trace.job.has_servers else 19
    assert ended_s(trace) == pytest.approx(20 + n_checkpoints * 0.1) and failed(trace) == []


@pytest.mark.parametrize(("leaves_s", "n_checkpoints"), [(10.75, 0), (11.5, 1), (99.0, 2)])
def test_without_servers_there_is_no_checkpoint_after_a_worker_has_left(
    leaves_s: float, n_checkpoints: int, tmp_path: Path
) -> None:
    """One is due at 10.7 s, during an all-reduce of 0.2 s, and made at 12 s, unless worker 2 has left at 10.8 s."""
    network = {"bandwidth_gbit": 1e6, "latency_us": 50_000}
    events = [{"worker": 2, "at_s": leaves_s, "change": "leave"}]
    tables = {"paradigm": ALLREDUCE, "stop": {"updates": 20}, "checkpoint": {"seconds": 10.7}, "workers": 3}
    more = {"network": network, "events": events, "checkpoint_s": 1.0}
    trace = simulate(timing_job(**tables, cluster=more), tmp_path / "trace.h5")
    assert ended_s(trace) == pytest.approx(20 * 1.2 + n_checkpoints) and failed(trace) == []


def test_asynchronous_workers_wait_for_the_slowest_and_for_the_disk(tmp_path: Path) -> None:
    """At 10 s workers of 1 s halt, the one of 4 s at 12 s."""
    tables = {"paradigm": {"name": "asp"}, "stop": {"seconds": 20.0}, "checkpoint": {"seconds": 10.0}}
    job = timing_job(**tables, workers=3, seconds=(1.0, 1.0, 4.0), cluster={"checkpoint_s": 3.0})
    trace = simulate(job, tmp_path / "trace.h5")
    pushes = trace.tables["pushes"]
    after = pushes[pushes["begin_s"] >= 12.0]
    assert [after[after["worker"] == worker]["begin_s"][0] for worker in range(3)] == [15.0, 15.0, 15.0]
    assert [after[after["worker"] == worker]["wait_s"][0] for worker in range(3)] == [5.0, 5.0, 3.0]
    assert failed(trace) == []


@pytest.mark.parametrize("paradigm", IN_STEP, ids=names)
@pytest.mark.parametrize(
    ("deaths", "expected_s"),
    [
        ([(0.5, 7)], 100 + 7 + 0.5 + 5 * 3),  # nothing is saved
        ([(30.5, 7)], 100 + 7 + 7.5 + 5 * 3),  # since 23 s
        ([(23, 7)], 100 + 7 + 5 * 3),  # just saved
        ([(22, 7)], 100 + 7 + 22 + 5 * 3),  # while it is saved
        ([(30.5, 7), (33, 1), (37.2, 1)], 100 + 7.5 + 7 + 5 * 3),  # the others while no rank is there
        ([(30.5, 7), (40.5, 2)], 100 + 7.5 + 7 + 3 + 2 + 5 * 3),  # again while it repeats
        ([(30.5, 7), (47.5, 2)], 100 + 7.5 + 7 + 10 + 2 + 5 * 3),  # after it has repeated
        ([(1000, 7)], 100 + 5 * 3),  # after the end
    ],
    ids=str,
)
def test_deaths_by_hand(
    paradigm: dict[str, Any], deaths: list[tuple[float, float]], expected_s: float, tmp_path: Path
) -> None:
    """Checkpoints of 3 s are due 20 s after the last one was, or the run has resumed."""
    more = cluster(*(die(*death) for death in deaths), checkpoint_s=3.0)
    tables = {"paradigm": paradigm, "stop": iterations(paradigm, 100), "checkpoint": {"seconds": 20.0}}
    trace = simulate(timing_job(**tables, cluster=more), tmp_path / "trace.h5")
    assert ended_s(trace) == pytest.approx(expected_s)
    assert repeated_s(100, 20.0, 3.0, deaths) == pytest.approx(expected_s)
    assert failed(trace) == []


def random_deaths(seed: int) -> list[tuple[float, float]]:
    rng = np.random.default_rng(seed)
    return list(zip(np.cumsum(rng.exponential(60.0, 60)).tolist(), rng.exponential(9.0, 60).tolist(), strict=True))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("paradigm", IN_STEP[:2], ids=names)
def test_a_standstill_is_as_long_as_repeating(paradigm: dict[str, Any], seed: int, tmp_path: Path) -> None:
    """Without servers a checkpoint that becomes due while the run repeats comes an iteration later."""
    deaths = random_deaths(seed)
    more = cluster(*(die(*death) for death in deaths), checkpoint_s=2.5)
    tables = {"paradigm": paradigm, "stop": iterations(paradigm, 400), "checkpoint": {"seconds": 30.0}}
    trace = simulate(timing_job(**tables, cluster=more), tmp_path / "trace.h5")
    assert len(trace.tables["starts"]) > 3 and failed(trace) == []
    later_s = 1e-6 if trace.job.has_servers else 2.0
    assert ended_s(trace) == pytest.approx(repeated_s(400, 30.0, 2.5, deaths), abs=later_s)


def test_without_repeating_the_duration_is_another(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The control of the two tests above."""
    right = Halts.continues_s

    def forgets(halts: Halts, now_s: float, version: int, seq: int, *, can_save: bool) -> float:
        halts._saved = now_s, version
        return right(halts, now_s, version, seq, can_save=can_save)

    monkeypatch.setattr(Halts, "continues_s", forgets)
    more = cluster(*(die(*death) for death in random_deaths(1)), checkpoint_s=2.5)
    tables = {"paradigm": BSP, "stop": {"updates": 400}, "checkpoint": {"seconds": 30.0}}
    trace = simulate(timing_job(**tables, cluster=more), tmp_path / "trace.h5")
    assert ended_s(trace) < repeated_s(400, 30.0, 2.5, random_deaths(1)) - 30.0


# ---- every paradigm ----


def every_job(paradigm: dict[str, Any], **more: Any) -> Any:
    workload = SEPARATED if paradigm is STANZA else TIMING
    stop = {"samples": 1200} if paradigm is SYNC_SWITCH else {"updates": 200}
    more = {"on_death": "restart", "checkpoint_s": 2.0, **more}
    tables = {"workload": workload, "paradigm": paradigm, "stop": stop, "checkpoint": {"seconds": 15.0, "updates": 40}}
    return timing_job(**tables, workers=3, model="lognormal", seconds=(0.7, 1.0, 1.6), cluster=more)


def computing(trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    """Return when iterations begin and end."""
    rows = trace.tables["pushes" if trace.job.has_servers else "exchanges"]
    return rows["begin_s"], rows["end_s"]


class Standstills:
    """When the run of a test stands still, and how often all workers wait for a checkpoint or a restart."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of: list[tuple[float, float]] = []
        right = Halts.continues_s

        def continues_s(halts: Halts, now_s: float, version: int, seq: int, *, can_save: bool) -> float:
            end_s = right(halts, now_s, version, seq, can_save=can_save)
            self.of.append((now_s, end_s))
            return end_s

        monkeypatch.setattr(Halts, "continues_s", continues_s)

    def disturbed(self, trace: Trace) -> int:
        """Return how many iterations compute while the run stands still."""
        begin_s, end_s = computing(trace)
        return sum(int(((begin_s < upto) & (end_s > since)).sum()) for since, upto in self.of if upto > since)


@pytest.mark.parametrize("more", [{}, NETWORK], ids=["", "network"])
@pytest.mark.parametrize("paradigm", EVERY, ids=names)
def test_nothing_computes_while_a_run_stands_still(
    paradigm: dict[str, Any], more: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if paradigm is STANZA:
        more = {key: value for key, value in more.items() if key != "network"}
    standstills = Standstills(monkeypatch)
    trace = simulate(every_job(paradigm, **more, events=[die(21.0, 4.0), die(24.5, 4.0)]), tmp_path / "trace.h5")
    assert failed(trace) == []
    n_halts = len(standstills.of)
    assert n_halts > 2 and len(trace.tables["starts"]) == 2  # nothing is there to die at 24.5 s
    assert standstills.disturbed(trace) == 0
    assert all(check.passed for check in simulated_again(trace))
    assert len(standstills.of) == 2 * n_halts


@pytest.mark.parametrize("paradigm", [{"name": "asp"}, {"name": "ad-psgd"}], ids=names)
def test_a_run_that_stands_still_too_early_is_noticed(
    paradigm: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The control of the test above: the first worker that halts is taken for the last one."""

    def halt(run: Any, worker: int, then: Any, *args: Any) -> None:
        run._kept.append((then, args))
        if len(run._kept) == 1:
            run._loop.at(run._halts.continues_s(run._loop.now_s, 0, 0, can_save=True), run._end_halt)

    standstills = Standstills(monkeypatch)
    monkeypatch.setattr(Simulation, "_halt", halt)
    trace = simulate(every_job(paradigm), tmp_path / "trace.h5")
    assert standstills.disturbed(trace) > 0


@pytest.mark.parametrize("paradigm", [BSP, ALLREDUCE, {"name": "local-sgd", "steps": 2}], ids=names)
def test_weights_are_those_of_the_undisturbed_run(paradigm: dict[str, Any], tmp_path: Path) -> None:
    def weights(**more: Any) -> list[torch.Tensor]:
        compute = {"compute": {"model": "lognormal", "seconds": 1.0}}
        job = make_job(
            workload=LINEAR, paradigm=paradigm, stop={"updates": 40}, cluster={"workers": 2} | compute | more
        )
        workload = build(job)
        simulate(job, tmp_path / f"{len(list(tmp_path.iterdir()))}.h5", workload)
        return list(workload.model.parameters())

    assert all(map(torch.equal, weights(), weights(**cluster(die(9.3, 5.0), checkpoint_s=2.0))))


def test_commits_that_wait_for_the_gate_are_applied_after_a_halt(tmp_path: Path) -> None:
    """The weights are those of plain torch; that commits wait, and that the run halts and restarts, is the control."""
    paradigm = {"name": "ashl", "warmup": 0, "profiled": 2, "steps_coarse": 1, "loss_preset": 1e9, "staleness": 0}
    more = cluster(die(19.3, 5.0), checkpoint_s=2.0) | {"compute": {"model": "lognormal", "seconds": [1.0, 1.5, 1.2]}}
    job = make_job(
        workload=LINEAR,
        optimizer={"name": "sgd", "lr": 0.05},
        paradigm={**paradigm, "commit": "after-gate"},
        stop={"updates": 60},
        checkpoint={"seconds": 5.0},
        cluster={"workers": 3} | more,
    )
    workload = build(job)
    trace = simulate(job, tmp_path / "trace.h5", workload)
    weights = torch.cat([each.detach().flatten() for each in workload.model.parameters()]).numpy()
    assert failed(trace) == [] and len(trace.tables["starts"]) == 2
    assert (Recount(trace).applied_after != trace.tables["pushes"]["seq"]).sum() > 9
    assert np.allclose(weights, committed(job, trace), rtol=1e-9, atol=1e-12)


class Hurried(ServerSimulation):
    """Takes an evaluation to be over before a halt lets it be handled."""

    def _evaluation_ends(self, judged: Judged) -> None:
        self._evaluating = False
        super()._evaluation_ends(judged)


@pytest.mark.parametrize("simulation", [ServerSimulation, Hurried])
def test_no_evaluation_begins_before_the_one_before_has_been_handled(
    simulation: type[ServerSimulation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on real ranks; evaluations take 3 s, and some end during a halt of 2 s."""
    events: list[str] = []
    judge, conclude = ServerSimulation._judge, ServerSimulation._conclude

    class Observed(simulation):  # type: ignore[misc, valid-type]
        def _judge(self, version: int, samples: int, now_s: float) -> Judged:
            events.append("begin")
            return judge(self, version, samples, now_s)

        def _conclude(self, judged: Judged) -> None:
            events.append("end")
            conclude(self, judged)

    monkeypatch.setattr("hpcsync.simulator.simulate.ServerSimulation", Observed)
    job = make_job(
        workload=LINEAR,
        paradigm={"name": "asp"},
        stop={"updates": 60},
        evaluation={"every_samples": 20, "seconds": 3.0},
        checkpoint={"seconds": 7.0},
        cluster={"workers": 3, "checkpoint_s": 2.0, "compute": {"model": "constant", "seconds": [1.0, 3.0, 1.5]}},
    )
    assert failed(simulate(job, tmp_path / "trace.h5")) == []
    assert len(events) > 9
    assert (events == ["begin", "end"] * (len(events) // 2)) == (simulation is ServerSimulation)


@pytest.mark.parametrize("paradigm", EVERY, ids=names)
def test_without_checkpoints_and_deaths_nothing_halts(paradigm: dict[str, Any], tmp_path: Path) -> None:
    job = every_job(paradigm, checkpoint_s=None)
    trace = simulate(job, tmp_path / "trace.h5")
    other = simulate(job.model_copy(update={"checkpoint": type(job.checkpoint)()}), tmp_path / "other.h5")
    for table, rows in trace.tables.items():
        assert rows.tobytes() == other.tables[table].tobytes()
    assert not len(trace.tables["starts"])
    halted = simulate(every_job(paradigm), tmp_path / "halted.h5")
    assert ended_s(halted) > ended_s(trace), "the control"


# ---- what else happens meanwhile ----


def test_a_start_has_its_time_and_the_clocks_of_all_ranks(tmp_path: Path) -> None:
    tables = {"paradigm": BSP, "stop": {"updates": 40}, "checkpoint": {"seconds": 10.0}}
    trace = simulate(timing_job(**tables, cluster=cluster(die(14.5, 6.0), die(30.5))), tmp_path / "trace.h5")
    starts, clocks = trace.tables["starts"], trace.tables["clocks"]
    assert starts["now_s"].tolist() == [0.0, 20.5, 30.5]
    assert starts["seq"].tolist()[0] == 0 and (np.diff(starts["seq"]) > 0).all()
    assert clocks["start"].tolist() == [1, 1, 1, 2, 2, 2] and clocks["rank"].tolist() == [0, 1, 2, 0, 1, 2]
    assert set(clocks["host"].tolist()) == {b"virtual"}


@pytest.mark.parametrize("paradigm", [BSP, ALLREDUCE, {"name": "asp"}, {"name": "gossip", "mode": "pull"}], ids=names)
def test_a_run_may_end_while_it_stands_still(paradigm: dict[str, Any], tmp_path: Path) -> None:
    tables = {"paradigm": paradigm, "stop": {"seconds": 25.0}, "checkpoint": {"seconds": 10.0}}
    trace = simulate(timing_job(**tables, cluster=cluster(die(14.5, 20.0), checkpoint_s=1.0)), tmp_path / "trace.h5")
    assert failed(trace) == [] and 14.0 < ended_s(trace) < 42.0
    assert trace.tables["starts"]["now_s"].tolist() == [0.0, 34.5]


def test_evaluations_that_end_meanwhile_count_afterwards(tmp_path: Path) -> None:
    tables = {
        "workload": LINEAR,
        "paradigm": {"name": "asp"},
        "stop": {"target_loss": 0.05},
        "evaluation": {"every_samples": 16, "seconds": 1.5},
        "checkpoint": {"seconds": 4.0},
    }
    trace = simulate(timing_job(**tables, cluster={"checkpoint_s": 3.5}), tmp_path / "trace.h5")
    assert failed(trace) == [] and trace.tables["evaluations"]["loss"][-1] <= 0.05


@pytest.mark.parametrize(
    ("paradigm", "events"),
    [
        (
            {"name": "asp"},
            [{"worker": 1, "at_s": 8.5, "change": "leave"}, {"worker": 1, "at_s": 11.5, "change": "join"}],
        ),
        (BSP, [{"worker": 1, "at_s": 8.5, "change": "leave"}, {"worker": 1, "at_s": 10.5, "change": "join"}]),
        (ALLREDUCE, [{"worker": 1, "at_s": 8.5, "change": "leave"}]),
        ({"name": "gossip", "mode": "push-sum"}, [{"worker": 1, "at_s": 8.5, "change": "leave"}]),
    ],
    ids=["asp", "bsp", "allreduce", "push-sum"],
)
def test_workers_leave_and_join_while_others_halt(
    paradigm: dict[str, Any], events: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Without servers no checkpoint follows, as on real ranks, but the run can still restart."""
    more = cluster(*events, die(30.5, 5.0), checkpoint_s=3.0)
    tables = {"paradigm": paradigm, "stop": {"samples": 600}, "checkpoint": {"seconds": 10.0}}
    trace = simulate(timing_job(**tables, workers=3, cluster=more), tmp_path / "trace.h5")
    assert failed(trace) == []
    assert trace.tables["starts"]["now_s"].tolist() == [0.0, 35.5]
    gaps_s = np.diff(np.unique(trace.tables["updates"]["now_s"]))
    if not trace.job.has_servers:
        assert np.flatnonzero(gaps_s > 2.5).tolist() == [np.argmax(gaps_s)] and gaps_s.max() > 30.0  # nothing was saved


def test_a_worker_that_leaves_between_local_steps_leaves_after_the_checkpoint(tmp_path: Path) -> None:
    """Worker 2 pushes at 11.7 s, when a checkpoint is due, worker 0 at 12 s; worker 1 is within a step until 12.1 s."""
    more = {"events": [{"worker": 1, "at_s": 11.5, "change": "leave"}], "checkpoint_s": 3.0}
    tables = {"paradigm": {"name": "easgd", "period": 3}, "stop": {"samples": 600}, "checkpoint": {"seconds": 10.0}}
    trace = simulate(timing_job(**tables, workers=3, seconds=[1.0, 1.1, 1.3], cluster=more), tmp_path / "trace.h5")
    assert failed(trace) == []
    left = trace.tables["membership"][0]
    assert (left["worker"], left["now_s"]) == (1, pytest.approx(12.1 + 3.0))


def test_a_halt_needs_no_file(tmp_path: Path) -> None:
    """Rows of a start are recorded when it happens, in any recorder."""
    recorder = Recorder()
    halts = Halts(timing_job(cluster=cluster(die(3.0, 2.0))), recorder)
    halts.ask_if_due(2.9, 2, can_save=True)
    assert not halts.asked
    halts.ask_if_due(3.0, 2, can_save=True)
    assert halts.asked and halts.continues_s(4.0, 3, 7, can_save=True) == 3.0 + 2.0 + 4.0
    assert [row["seq"] for row in recorder["starts"]] == [0, 7]
