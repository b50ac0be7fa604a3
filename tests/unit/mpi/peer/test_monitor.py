"""The monitor of a run without servers, without messages; all else is tested on ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from unittest.mock import MagicMock

import pytest
from mpi4py import MPI

from hpcsync.core.peer_coordinator import PeerCoordinator
from hpcsync.mpi.peer.monitor import Monitor
from hpcsync.mpi.transport import messages, ulfm
from hpcsync.mpi.transport.messages import Inbox, StepInfoKind
from hpcsync.paradigms.records import StepInfo
from hpcsync.trace.schema import Change
from tests.unit.jobs import make_job
from tests.unit.recorder import Recorder


def monitor_of(link: MagicMock, trace: Recorder) -> tuple[Monitor, list[BaseException]]:
    """Return a monitor of three workers, and what it fails with."""
    job = make_job(paradigm={"name": "gossip", "mode": "push"}, cluster={"workers": 3, "servers": 0})
    errors: list[BaseException] = []
    recorder = MagicMock(coordinator=PeerCoordinator(job, trace), evaluator=None)
    link.comm.size = 3
    link.clock.now = map(float, itertools.count()).__next__
    return Monitor(link, recorder, False, lambda: None, errors.append, None, set()), errors


def infos_of(worker: int, *iterations: int) -> list[tuple[object, ...]]:
    infos = [StepInfo(worker, iteration, begin_s=0.0, end_s=0.0, batch_size=4) for iteration in iterations]
    return [(StepInfoKind.STEPPED, *info) for info in infos]


def ends_of(workers: range) -> list[tuple[object, ...]]:
    kinds = (StepInfoKind.ENDED, StepInfoKind.SETTLED)
    return [(kind, *StepInfo(worker, 0)) for kind in kinds for worker in workers]


def test_what_a_worker_has_sent_before_its_death_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its step infos and the news of its death arrive between two looks."""
    monkeypatch.setattr(ulfm, "tell", lambda rank: None)
    link, trace = MagicMock(), Recorder()
    records = iter([*infos_of(2, 1), None, *infos_of(2, 2, 3), None, *ends_of(range(2)), *[None] * 9])
    link.infos.return_value.poll = lambda: next(records)
    link.deaths.look.return_value = [2]
    monitor, errors = monitor_of(link, trace)
    monitor.start()
    monitor.join()
    assert errors == []
    rows = [(row[1], row[2]) for table, row in trace.rows if table == "exchanges"]
    assert rows == [(2, 1), (2, 2), (2, 3)]
    of_membership = [(row[2], row[3]) for table, row in trace.rows if table == "membership"]
    assert of_membership == [(2, Change.DIED), (0, Change.LEFT), (1, Change.LEFT)]
    times = [row[0] if table == "exchanges" else row[1] for table, row in trace.rows if table != "updates"]
    assert times == sorted(times)


class Failing:
    """Persistent receive of a record that has arrived, whose test first raises that a rank has died."""

    def __init__(self, start: Callable[[], None]) -> None:
        self.errors = [MPI.Exception(MPI.ERR_PROC_FAILED_PENDING)]
        self.Start = start

    def Test(self) -> bool:
        if self.errors:
            raise self.errors.pop()
        return True


def test_a_death_does_not_keep_back_a_record_that_has_arrived() -> None:
    comm, deaths, started = MagicMock(), MagicMock(), list[int]()
    comm.Recv_init.side_effect = lambda *_: Failing(lambda: started.append(1))
    inbox = Inbox(comm, messages.TAG_INFO, messages.STEP_INFO, deaths)
    assert inbox.poll() is not None
    deaths.heard.assert_called_once()
