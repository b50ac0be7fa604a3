"""Checkpoints on rank 0 when a rank dies or the server is busy; the rest is tested on real ranks."""

from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hpcsync.config.checkpoint import Checkpoint
from hpcsync.mpi.rank0.checkpointing import Checkpointer
from hpcsync.mpi.server.leader import Leader
from hpcsync.mpi.transport.messages import InfoKind
from hpcsync.run_dir.checkpoint import RUN, Checkpoints, newest
from tests.unit.run_states import run_state


def make_saver(folder: Path, dead: Collection[int] = ()) -> Checkpointer:
    return Checkpointer(Checkpoints(folder, 2, None, True), Checkpoint(seconds=10), run_state, (), 0.0, 0, dead)


def test_a_death_before_saving_continues_the_run_and_requests_another_checkpoint(tmp_path):
    saver = make_saver(tmp_path)
    saver.hold_if_due(11.0, 5)
    assert saver.holding
    saver.lost(2)
    assert not saver.holding
    saver.hold_if_due(11.1, 5)
    assert saver.holding, "soon, and not ten seconds later"


def test_what_a_checkpoint_deferred_is_handled_before_the_next(tmp_path):
    """Else checkpoints that take longer than from one to the next would follow each other without an update."""
    saver = make_saver(tmp_path)
    saver.hold_if_due(11.0, 5)
    assert saver.keeps_back((InfoKind.PUSHED, 0))
    saver.begin([])
    assert saver.commit_if_complete()
    saver.hold_if_due(30.0, 5)
    assert not saver.holding
    saver.unheard.popleft()
    saver.hold_if_due(30.1, 5)
    assert saver.holding


def test_checkpoints_are_made_however_busy_the_server_is(tmp_path):
    """What comes while deferred push infos are handled remains in the mailbox, else there would always be some."""
    saver = make_saver(tmp_path)
    leader: Any = SimpleNamespace(
        _saver=saver,
        _infos=SimpleNamespace(poll=lambda: (InfoKind.PUSHED, 1)),
        _coordinator=SimpleNamespace(stopping=False, version=5),
        _link=SimpleNamespace(lends=False),
        _newly_dead=list,
        _save=lambda saver: None,
    )
    saver.unheard.append((InfoKind.PUSHED, 0))
    assert Leader._next_info(leader, 11.0) == (InfoKind.PUSHED, 0) and not saver.holding
    assert Leader._next_info(leader, 11.1) is None and saver.holding
    assert list(saver.unheard) == [(InfoKind.PUSHED, 1)]
    leader._infos.poll = lambda: (InfoKind.FAILED, 2)
    assert Leader._next_info(leader, 11.2) == (InfoKind.FAILED, 2), "a failure is no message that may wait"


def test_a_death_while_saving_abandons_this_checkpoint_only(tmp_path):
    saver = make_saver(tmp_path)
    saver.hold_if_due(11.0, 5)
    number = saver.begin([1, 2])
    saver.saved(1)
    assert not saver.commit_if_complete()
    saver.lost(2)
    assert not saver.commit_if_complete()
    assert not saver.holding
    assert newest(tmp_path) is None
    saver.hold_if_due(11.1, 5)
    assert saver.begin([1]) == number
    saver.saved(1)
    assert saver.commit_if_complete()
    assert newest(tmp_path) == tmp_path / "checkpoints" / str(number)


def test_a_push_of_a_worker_that_died_during_a_checkpoint_is_not_in_the_next(tmp_path):
    """A resumed run, in which that worker joins again, would handle it before the worker takes part."""
    dead: set[int] = set()
    saver = make_saver(tmp_path, dead)
    saver.hold_if_due(11.0, 5)
    for worker in (0, 1):
        assert saver.keeps_back((InfoKind.PUSHED, worker))
    saver.begin([1, 2])
    saver.saved(2)
    saver.lost(1)
    assert not saver.commit_if_complete() and not saver.holding
    dead.add(0)
    saver.hold_if_due(11.1, 5)
    number = saver.begin([2])
    saver.saved(2)
    assert saver.commit_if_complete()
    resumed = Checkpoints(tmp_path, 2, tmp_path / "checkpoints" / str(number), True)
    assert resumed.state(RUN)["unheard"] == [(InfoKind.PUSHED, 1)]


def test_a_rank_that_died_may_say_late_that_it_has_saved(tmp_path):
    saver = make_saver(tmp_path)
    saver.hold_if_due(11.0, 5)
    saver.begin([2])
    saver.lost(2)
    assert not saver.commit_if_complete() and not saver.holding
    saver.hold_if_due(11.1, 5)
    saver.saved(2)  # sent before its death
    saver.begin([1])
    assert not saver.commit_if_complete()


def test_a_rank_that_has_saved_is_no_worker_that_waits(tmp_path):
    saver = make_saver(tmp_path)
    saver.unheard.append((InfoKind.SAVED, 2))
    saver.hold_if_due(11.0, 5)
    assert not saver.can_begin({2})
    saver.keeps_back((InfoKind.PUSHED, 2))
    assert saver.can_begin({2})
