"""Asynchronous parallel: every push is an update of its own and nobody ever waits."""

from __future__ import annotations

from hpcsync.paradigms.base import Paradigm
from hpcsync.paradigms.events import Action, Apply, Pushed


class ASP(Paradigm):
    """No synchronisation: the gap between workers is recorded, and has no bound."""

    name = "asp"

    def check(self) -> None:
        """Assert the paradigm's invariants: those of every paradigm, and that nobody is held."""
        super().check()
        assert not self._blocked_since_s, f"workers {sorted(self._blocked_since_s)} are held"

    def _pushed(self, event: Pushed) -> list[Action]:
        return [Apply((event.worker,)), self._grant(event.worker)]

    def _left(self, worker: int) -> list[Action]:
        return []

    def _joined(self, worker: int) -> list[Action]:
        return [self._grant(worker)]
