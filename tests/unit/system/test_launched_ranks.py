"""When ranks are taken for lost before training begins."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from hpcsync.system import process_cleanup
from hpcsync.system.launched_ranks import LOOK_S, LOST_S, SCRIPT_LOST_S, LaunchedRanks
from hpcsync.system.process_cleanup import MARK
from hpcsync.system.signals import waiting_for_all


def rank(number: int, size: int, here: int) -> dict[str, str]:
    return {MARK: "/m", "PMI_RANK": str(number), "PMI_SIZE": str(size), "MPI_LOCALNRANKS": str(here)}


class Launch:
    """A launch whose ranks and time a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, *, suspends: bool) -> None:
        self.ranks: dict[int, dict[str, str]] = {}
        self.now_s = 100.0
        launcher: Any = None
        self.listening = folder / "listening"
        self.launched = LaunchedRanks(launcher, "/m", self.listening, suspends=suspends, on_node=True)
        monkeypatch.setattr(process_cleanup, "find", lambda mark: dict(self.ranks))
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)

    def lost_after(self, seconds: float) -> bool:
        """Return whether a rank counts as lost so long after a look."""
        self.now_s += LOOK_S
        self.launched.lost_at_start()
        self.now_s += seconds
        return self.launched.lost_at_start()


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Launch:
    return Launch(monkeypatch, tmp_path, suspends=False)


def test_a_rank_of_a_script_that_ended_unseen_is_lost_while_others_wait(launch: Launch) -> None:
    launch.ranks = {10: rank(0, 2, 2)}
    assert not launch.lost_after(2 * SCRIPT_LOST_S), "none waits: a program may do without MPI"
    waiting_for_all(launch.listening).touch()
    assert not launch.lost_after(SCRIPT_LOST_S - 2 * LOOK_S)
    assert launch.lost_after(2 * LOOK_S)


def test_a_start_that_is_over_loses_no_rank(launch: Launch) -> None:
    launch.ranks = {10: rank(0, 2, 2)}
    waiting_for_all(launch.listening).touch()
    assert not launch.lost_after(SCRIPT_LOST_S / 2)
    waiting_for_all(launch.listening).unlink()
    assert not launch.lost_after(SCRIPT_LOST_S)
    waiting_for_all(launch.listening).touch()
    assert not launch.lost_after(SCRIPT_LOST_S - 0.1), "the time before counted"


def test_ranks_of_another_node_are_not_lost(launch: Launch) -> None:
    launch.ranks = {10: rank(0, 3, 2), 11: rank(1, 3, 2)}
    waiting_for_all(launch.listening).touch()
    assert not launch.lost_after(2 * SCRIPT_LOST_S)
    del launch.ranks[11]
    assert launch.lost_after(SCRIPT_LOST_S)


def test_all_ranks_that_are_there_are_not_lost(launch: Launch) -> None:
    launch.ranks = {10: rank(0, 2, 2), 11: rank(1, 2, 2)}
    waiting_for_all(launch.listening).touch()
    assert not launch.lost_after(2 * SCRIPT_LOST_S)


def test_a_rank_of_a_run_is_lost_until_rank_0_listens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    launch = Launch(monkeypatch, tmp_path, suspends=True)
    launch.ranks = {10: rank(0, 2, 2)}
    assert not launch.lost_after(2 * LOST_S), "rank 1 may not have started yet"
    launch.ranks[11] = rank(1, 2, 2)
    assert not launch.lost_after(1.0)
    del launch.ranks[11]
    assert launch.lost_after(LOST_S)
    launch.listening.touch()
    assert not launch.lost_after(2 * LOST_S)
