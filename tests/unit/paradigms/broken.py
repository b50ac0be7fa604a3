"""Broken variants of paradigms, which every test of an invariant must catch."""

from itertools import count

from hpcsync.paradigms.asp import ASP
from hpcsync.paradigms.bsp import BSP
from hpcsync.paradigms.events import Joined, Left
from hpcsync.paradigms.first_k import KAsync
from hpcsync.paradigms.ssp import SSP


class GrantsTwice(ASP):
    def _pushed(self, event):
        return [*super()._pushed(event), self._grant(event.worker)]


class GrantsBeforeApplying(ASP):
    def _pushed(self, event):
        return super()._pushed(event)[::-1]


class ForgetsDepartures(SSP):
    """The worker's count stays and freezes the minimum, as if it had not left."""

    def handle(self, event):
        if isinstance(event, Left):
            self._blocked_since_s.pop(event.worker, None)
            return self._left(event.worker)
        return super().handle(event)


class NeverReleases(SSP):
    def __init__(self, n_workers, *, staleness):
        super().__init__(n_workers, staleness=staleness)
        self._gate.release = lambda grant: []


class BringsBackStaleEntries(SSP):
    """A worker that left while blocked is still in the queue when it joins."""

    def __init__(self, n_workers, *, staleness):
        super().__init__(n_workers, staleness=staleness)
        self._gate.leave = lambda worker: None


class JoinsAnywhere(SSP):
    def _joined(self, worker):
        return [self._grant(worker)]


class JoinsWhereItWas(ASP):
    """A worker that joins keeps its own count, so that the others seem to be ahead."""

    def handle(self, event):
        if isinstance(event, Joined):
            self._progress.active.add(event.worker)
            self._progress._active_at.setdefault(self._progress.iters[event.worker], set()).add(event.worker)
            return [self._grant(event.worker)]
        return super().handle(event)


class OverwritesAContribution(BSP):
    def _joined(self, worker):
        return [self._grant(worker)]


class BlocksEveryWorker(BSP):
    def _end_round_if_complete(self):
        return []


class AcceptsLateContributions(KAsync):
    def _accepted_staleness(self):
        return super()._accepted_staleness() + 1


class RemembersOtherRuns(ASP):
    runs = count()

    def __init__(self, n_workers):
        super().__init__(n_workers)
        self._run = next(self.runs)

    def _grant(self, worker, **chosen):
        return super()._grant(worker, credits=self._run)
