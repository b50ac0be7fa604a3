"""Stalls of runs in virtual time, told as on ranks; and negative controls: one thing changed, and it is noticed."""

import numpy as np
import pytest

from hpcsync.audit.run import audit
from hpcsync.core.assignments import create_paradigm, decision_fields
from hpcsync.mpi.rank0.straggler_report import StragglerReport
from hpcsync.simulator import cluster, peer_transfers
from hpcsync.simulator.factory import simulation
from hpcsync.simulator.server_run import ServerSimulation
from hpcsync.trace.schema import Phase
from hpcsync.workloads.registry import build
from tests.unit.jobs import make_job
from tests.unit.trace.recorder import Rows, as_trace, edit, remove

LASTED = "stalls are of iterations that lasted so long"
DEADLINE = "deadlines follow from a worker's own iterations"
STALLED = 12  # worker 1's iteration


class Phases:
    """As if rank 0 saw that all others compute, or wait."""

    def __init__(self, phases):
        self._phases = phases

    def seen(self):
        return [(0, Phase.COMPUTING) if phase == Phase.COMPUTING else (STALLED, phase) for phase in self._phases]


def record(paradigm, phases=(Phase.COMPUTING,) * 3):
    """Worker 1 stalls for a while, the others do not; a short look after every push of anybody."""
    events = [
        {"worker": 1, "at_iteration": STALLED, "change": "slow", "factor": 30.0},
        {"worker": 1, "at_iteration": STALLED + 1, "change": "recover"},
    ]
    compute = {"model": "lognormal", "seconds": [0.2, 0.3, 0.25], "jitter": 0.1}
    job = make_job(
        paradigm=paradigm,
        stop={"samples": 1000},
        cluster={"workers": 3, "compute": compute, "events": events},
    )
    trace, workload, watches = Rows(), build(job), []

    def look(now_s, run):
        if not watches:
            places = [(rank, f"n{rank}") for rank in range(3)]
            watches.append(StragglerReport(run, Phases(phases), trace, places, job.paradigm.bound))
        watches[0].look(now_s)

    if job.has_servers:
        ServerSimulation(job, workload, cluster.build(job, workload), create_paradigm(job), trace, look).run()
    else:
        simulation(job, workload, peer_transfers.build(job, workload), trace, look).run()
    return as_trace(job, trace.rows, decision_fields(job))


@pytest.fixture(scope="module", params=[{"name": "asp"}, {"name": "gossip", "mode": "pull"}], ids=lambda p: p["name"])
def trace(request):
    return record(request.param)


def failing(trace):
    return {check.name for check in audit(trace) if not check.passed}


def test_who_stalls_is_told_of_as_long_as_it_does(trace, capsys):
    stalls = trace.tables["stalls"]
    assert len(stalls) >= 2
    assert set(stalls["worker"]) == {1} and set(stalls["iteration"]) == {STALLED}
    assert (np.diff(stalls["lasted_s"]) > stalls["lasted_s"][:-1]).all()
    assert failing(trace) == set()


@pytest.mark.parametrize(
    ("values", "noticed"),
    [
        ({"lasted_s": 20.0}, {LASTED}),
        ({"lasted_s": 1.0}, {LASTED}),
        ({"deadline_s": 1.2}, {DEADLINE}),
        ({"deadline_s": 100.0}, {LASTED, DEADLINE}),
        ({"iteration": STALLED - 1}, {LASTED, DEADLINE}),
        ({"iteration": 3}, {LASTED, DEADLINE}),
        ({"worker": 0}, {LASTED, DEADLINE}),
        ({"worker": 3}, {LASTED}),
        ({"phase": 7}, {LASTED}),
        ({"n_waiting": 3}, {LASTED}),
    ],
    ids=lambda values: ", ".join(f"{k} {v}" for k, v in values.items()) if isinstance(values, dict) else "",
)
def test_what_is_not_so_is_noticed(trace, values, noticed):
    served = trace.job.has_servers  # otherwise deadlines are not counted again
    assert failing(edit(trace, "stalls", 0, **values)) == (noticed if served else noticed - {DEADLINE})


def test_a_missing_row_is_no_lie(trace):
    assert failing(remove(trace, "stalls", 0)) == set()


def test_the_report_says_who_where_and_who_waits(capsys):
    record({"name": "ssp", "staleness": 12})
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith(
        f"hpcsync: worker 1 stalls (rank 1 on n1, computing): its iteration {STALLED} has lasted "
    )
    assert said[1].endswith("a worker more than 12 iterations ahead of the slowest waits for it")
    assert f"hpcsync: worker 1 goes on: its iteration {STALLED} took " in said[-1]


def test_those_that_wait_for_each_other_all_stall(capsys):
    stalls = record({"name": "gossip", "mode": "pull"}, (Phase.WAITING, Phase.WAITING, Phase.COMPUTING)).tables[
        "stalls"
    ]
    assert not len(stalls), "who waits for others does not"
    stalls = record({"name": "gossip", "mode": "pull"}, (Phase.WAITING,) * 3).tables["stalls"]
    assert set(stalls["worker"]) == {1}, "of those that wait for each other it is not known for whom"
