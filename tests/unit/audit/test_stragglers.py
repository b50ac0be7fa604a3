"""Stalls of runs in virtual time, detected as on ranks, and negative controls: each change is found."""

import math

import numpy as np
import pytest

from hpcsync.audit import stragglers
from hpcsync.audit.stragglers import check_stalls
from hpcsync.core import straggler_detector
from hpcsync.core.assignments import decision_fields
from hpcsync.core.straggler_detector import StragglerDetector
from hpcsync.mpi.rank0.straggler_report import StragglerReport
from hpcsync.simulator.simulate import prepare
from hpcsync.trace.schema import Phase
from hpcsync.workloads.registry import build
from tests.unit.audit.failing import failing
from tests.unit.jobs import make_job
from tests.unit.recorder import Recorder
from tests.unit.trace.recorder import as_trace, edit, remove

LASTED = "stalled iterations lasted as long as recorded"
DEADLINE = "deadlines follow from the worker's own iterations"
STALLED = 12  # worker 1's iteration


class Phases:
    """Phases of all workers as rank 0 sees them: all others compute, or wait."""

    def __init__(self, phases, iterations):
        self._seen = list(zip(iterations, phases, strict=True))

    def seen(self):
        return [(0, Phase.COMPUTING) if seen[1] == Phase.COMPUTING else seen for seen in self._seen]


def record(paradigm, phases=(Phase.COMPUTING,) * 3, iterations=(STALLED,) * 3, scale=1.0, jitter=0.1, **tables):
    """Return a trace in which only worker 1 stalls, with a short look after every push."""
    events = [
        {"worker": 1, "at_iteration": STALLED, "change": "slow", "factor": 30.0},
        {"worker": 1, "at_iteration": STALLED + 1, "change": "recover"},
    ]
    compute = {"model": "lognormal", "seconds": [0.2 * scale, 0.3 * scale, 0.25 * scale], "jitter": jitter}
    job = make_job(
        paradigm=paradigm,
        stop={"samples": 1000},
        cluster={"workers": 3, "compute": compute, "events": events},
        **tables,
    )
    trace, workload, watches = Recorder(), build(job), []

    def look(now_s, run):
        if not watches:
            places = [(rank, f"n{rank}") for rank in range(3)]
            watches.append(StragglerReport(run, Phases(phases, iterations), trace, places, job.paradigm.bound))
        watches[0].look(now_s)

    simulation = prepare(job, workload)(trace, look)
    simulation.coordinator.stalls = StragglerDetector()
    simulation.run()
    return as_trace(job, trace.rows, decision_fields(job))


@pytest.fixture(scope="module", params=[{"name": "asp"}, {"name": "gossip", "mode": "pull"}], ids=lambda p: p["name"])
def trace(request):
    return record(request.param)


def test_a_stall_is_reported_while_it_lasts(trace, capsys):
    stalls = trace.tables["stalls"]
    assert len(stalls) >= 2
    assert set(stalls["worker"]) == {1} and set(stalls["iteration"]) == {STALLED}
    assert (np.diff(stalls["lasted_s"]) > stalls["lasted_s"][:-1]).all()
    assert failing(trace) == set()


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"lasted_s": 20.0}, {LASTED}),
        ({"lasted_s": 1.0}, {LASTED}),
        ({"deadline_s": 1.2}, {DEADLINE}),
        ({"deadline_s": 100.0}, {LASTED, DEADLINE}),
        ({"now_s": 0.0}, {LASTED, DEADLINE}),
        ({"iteration": STALLED - 1}, {LASTED, DEADLINE}),
        ({"iteration": 3}, {LASTED, DEADLINE}),
        ({"worker": 0}, {LASTED, DEADLINE}),
        ({"worker": 3}, {LASTED}),
        ({"worker": -1}, {LASTED}),
        ({"phase": 7}, {LASTED}),
        ({"n_waiting": 3}, {LASTED}),
        ({"n_waiting": -1}, {LASTED}),
    ],
    ids=lambda values: ", ".join(f"{k} {v}" for k, v in values.items()) if isinstance(values, dict) else "",
)
def test_wrong_values_are_found(trace, values, found):
    served = trace.job.has_servers  # otherwise deadlines are not recounted
    assert failing(edit(trace, "stalls", 0, **values)) == (found if served else found - {DEADLINE})


@pytest.mark.parametrize(
    ("jitter", "tables", "factor"),
    [
        (0.001, {}, "SHARE"),
        (0.3, {}, "SPREAD"),
        (0.3, {"batches": {"policy": "equal-finish", "predictor": "last", "interval": 2, "gain": 0.0}}, "SPREAD"),
    ],
    ids=["share", "spread", "spread, by size"],
)
def test_deadlines_of_slow_workers_follow_from_their_median_or_its_deviation(monkeypatch, jitter, tables, factor):
    """Those of fast workers are `SLACK_S` after the median."""
    monkeypatch.setattr(straggler_detector, "AWAY_S", math.inf)  # there is a look after every push only
    for module in (straggler_detector, stragglers):
        monkeypatch.setattr(module, "WINDOW", 8)  # fewer than there are
    slow = record({"name": "asp"}, scale=10.0, jitter=jitter, seed=3, **tables)
    assert [check.passed for check in check_stalls(slow)] == [True, True]
    monkeypatch.setattr(stragglers, factor, 1.1 * getattr(stragglers, factor))  # the control
    assert [check.passed for check in check_stalls(slow)] == [True, False]


def test_a_missing_row_is_allowed(trace):
    assert failing(remove(trace, "stalls", 0)) == set()


def test_the_report_names_worker_place_and_blocked_workers(capsys):
    record({"name": "ssp", "staleness": 12})
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(
        f"hpcsync: worker 1 stalls (rank 1 on n1, computing): its iteration {STALLED} has lasted "
    )
    assert lines[1].endswith("a worker more than 12 iterations ahead of the slowest waits for it")
    assert f"hpcsync: worker 1 continues: its iteration {STALLED} took " in lines[-1]


def test_workers_that_wait_for_each_other_all_stall(capsys):
    stalls = record({"name": "gossip", "mode": "pull"}, (Phase.WAITING, Phase.WAITING, Phase.COMPUTING)).tables[
        "stalls"
    ]
    assert not len(stalls), "a worker that waits for others does not stall"
    stalls = record({"name": "gossip", "mode": "pull"}, (Phase.WAITING,) * 3).tables["stalls"]
    assert set(stalls["worker"]) == {1}, "if all wait for each other, none is excluded"


@pytest.mark.parametrize(("behind", "named"), [(0, set()), (1, {1})])
def test_if_all_wait_those_ahead_wait_for_those_behind(behind, named):
    """Worker 1 stands still; it may do so within an exchange that the others have completed."""
    iterations = [STALLED + (worker != behind) for worker in range(3)]
    stalls = record({"name": "gossip", "mode": "pull"}, (Phase.WAITING,) * 3, iterations).tables["stalls"]
    assert set(stalls["worker"]) == named
    assert (stalls["n_waiting"] == 2).all()
