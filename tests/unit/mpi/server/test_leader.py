"""The main loop of server 0 without messages; all else is tested on real ranks."""

from __future__ import annotations

import itertools
import math
from unittest.mock import MagicMock

import pytest

from hpcsync.config.job import Stop
from hpcsync.core.coordinator import Coordinator
from hpcsync.mpi.server.leader import Leader
from hpcsync.mpi.transport import ulfm
from hpcsync.mpi.transport.messages import InfoKind
from hpcsync.mpi.transport.ulfm import RankFailed
from hpcsync.paradigms import create
from hpcsync.paradigms.records import PushInfo
from hpcsync.trace.schema import Change
from tests.unit.recorder import Recorder

SEARCH = {"check_period_s": 60.0, "interval_min_s": 10.0, "search_every_s": 1000.0, "loss": "evaluation"}


class EarlierDeath(Leader):
    """Takes the time of a death from before the evaluation that it has just handled."""

    def _do_chores(self, now_s: float) -> None:
        super()._do_chores(now_s)
        self._link.clock.now = lambda: now_s


@pytest.mark.parametrize(("leader_class", "error"), [(Leader, RankFailed), (EarlierDeath, ValueError)])
def test_a_death_that_is_noticed_right_after_an_evaluation_comes_after_it(monkeypatch, leader_class, error):
    """Times of events may not decrease. The only worker dies, which ends the run."""
    monkeypatch.setattr(ulfm, "tell", lambda rank: None)
    link, shard, trace = MagicMock(lends=False), MagicMock(), Recorder()
    link.roles.n_servers = link.roles.n_workers = 1
    link.comm.size = 2
    link.roles.worker.return_value = 0
    link.inbox.return_value.poll.return_value = None
    link.deaths.look.return_value = [1]
    link.clock.now = map(float, itertools.count()).__next__
    coordinator = Coordinator(create("adsp", 1, **SEARCH), trace, n_workers=1, lr=lambda *_: 1.0, stop=Stop())
    evaluator = MagicMock(busy=False)
    evaluator.result.return_value = (0.0, 0, 0, 2.0, 0.1, math.nan)
    with pytest.raises(error):
        leader_class(link, shard, MagicMock(coordinator=coordinator, evaluator=evaluator)).serve()
    assert [table for table, _ in trace.rows] == ["evaluations", "decisions", "membership"]


def test_a_join_that_a_checkpoint_holds_and_its_worker_repeats_is_one():
    """The worker saved its part before it sent the message, and the message came before the checkpoint was complete."""
    link, trace = MagicMock(lends=False), Recorder()
    link.roles.n_servers = 1
    coordinator = Coordinator(create("asp", 2), trace, n_workers=2, lr=lambda *_: 1.0, stop=Stop())
    coordinator.left(1.0, 1)
    leader = Leader(link, MagicMock(), MagicMock(coordinator=coordinator, evaluator=None))
    for now_s in (2.0, 3.0):
        leader._handle(now_s, (InfoKind.JOINED, *PushInfo(math.nan, 1)[1:]))
    assert [row[3] for table, row in trace.rows if table == "membership"] == [Change.LEFT, Change.JOINED]
    with pytest.raises(ValueError, match="has not left"):
        coordinator.joined(4.0, 1)
