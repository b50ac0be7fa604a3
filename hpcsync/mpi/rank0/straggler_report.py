"""Straggler reports on rank 0: which worker is slow, where it runs, what it is doing, and which workers wait for it."""

from __future__ import annotations

import math
import sys
from collections.abc import Container, Iterable, Mapping, Sequence

from hpcsync.core.coordinator import Coordinator
from hpcsync.core.peer_coordinator import PeerCoordinator
from hpcsync.core.straggler_detector import AWAY_S, LOOK_S, Straggler
from hpcsync.mpi.transport.worker_state import WorkerStates
from hpcsync.trace.schema import Phase
from hpcsync.trace.writer import TraceWriter

MANY = 8  # at most so many workers are listed
LONG_S = 60.0  # a transfer of this length is reported while the worker's iterations have no deadline
NAMES = {int(phase): phase.name.lower() for phase in Phase}


class StragglerReport:
    """Straggler reports on the standard error and in the trace.

    Parameters
    ----------
    run
        Coordinator of the run.
    phases
        Activities of the workers.
    trace
        Trace to write to.
    places
        Rank and host of each worker.
    bound
        The paradigm's rule for which workers wait, as a sentence.
    """

    def __init__(
        self,
        run: Coordinator | PeerCoordinator,
        phases: WorkerStates,
        trace: TraceWriter,
        places: Sequence[tuple[int, str]],
        bound: str,
    ) -> None:
        self._run = run
        self._phases = phases
        self._trace = trace
        self._places = places
        self._bound = bound
        self._looked_s = 0.0
        self._entered: list[tuple[tuple[int, int], float]] = []  # of each worker: iteration, phase, and since when

    def look(self, now_s: float) -> None:
        """Report stragglers, if `LOOK_S` seconds have passed since the previous call that did."""
        if now_s - self._looked_s < LOOK_S:
            return
        before_s, self._looked_s = self._looked_s, now_s
        iterations, phases = self.seen()
        self._see(now_s, [*zip(iterations, phases, strict=True)])
        blocked = self._run.blocked
        if blocked is None:  # without servers, where phases tell
            running = self._run.stalls.running
            blocked = {w: self._entered[w][1] for w in running if phases[w] == Phase.WAITING}
            if len(blocked) == len(running):  # those ahead wait for those behind; without these the communication hangs
                least = min((iterations[w] for w in running), default=0)
                blocked = {w: since_s for w, since_s in blocked.items() if iterations[w] > least}
        # Their scripts have not begun their loops: of a run that resumes, the times of iterations are known already.
        preparing = {w for w, phase in enumerate(phases) if phase == Phase.UNKNOWN}
        if stalls := self._run.stalls.look(now_s, preparing.union(blocked)):
            for stall in stalls:
                self._record(now_s, stall, phases[stall.worker], len(blocked))
            self._trace.flush()  # a run that stalls is often killed
            print("\n".join(self._report(now_s, stalls, phases, blocked)), file=sys.stderr, flush=True)
        if now_s - before_s <= AWAY_S and (long := self._long_transfers(now_s, before_s, blocked)):
            print(self._report_long(long, phases), file=sys.stderr, flush=True)

    def seen(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return iteration and phase of every worker."""
        seen = self._phases.seen()
        iterations, phases = zip(*(seen[rank] for rank, _ in self._places), strict=True)
        return iterations, phases

    def _see(self, now_s: float, seen: Sequence[tuple[int, int]]) -> None:
        """Note since when each worker has been in its iteration and phase."""
        before = self._entered or [(state, now_s) for state in seen]
        self._entered = [then if then[0] == state else (state, now_s) for state, then in zip(seen, before, strict=True)]

    def _long_transfers(self, now_s: float, before_s: float, blocked: Container[int]) -> list[int]:
        """Return the workers without a deadline whose transfers have reached `LONG_S` since the previous look."""
        found = []
        for worker in sorted(self._run.stalls.running):
            (_, phase), since_s = self._entered[worker]
            transfers = phase not in (Phase.UNKNOWN, Phase.COMPUTING) and worker not in blocked
            if transfers and before_s - since_s < LONG_S <= now_s - since_s:
                if math.isinf(self._run.stalls.deadline_s(worker)):
                    found.append(worker)
        return found

    def _report_long(self, workers: Sequence[int], phases: Sequence[int]) -> str:
        places = [self._place(worker, NAMES[phases[worker]]) for worker in workers[:MANY]]
        places += [f"{len(workers) - MANY} more workers"] * (len(workers) > MANY)
        return f"hpcsync: transfers have lasted {LONG_S:.0f} s: {', '.join(places)}; a connection may be blocked"

    def _record(self, now_s: float, stall: Straggler, phase: int, n_waiting: int) -> None:
        if not stall.ended:
            row = (now_s, stall.worker, stall.iteration, phase, stall.lasted_s, stall.deadline_s, n_waiting)
            self._trace.append("stalls", row)

    def _report(
        self, now_s: float, stalls: Sequence[Straggler], phases: Sequence[int], blocked: Mapping[int, float]
    ) -> Iterable[str]:
        for stall in stalls[:MANY]:
            yield f"hpcsync: {self._describe(stall, NAMES[phases[stall.worker]])}"
        if len(stalls) > MANY:
            yield f"hpcsync: and {len(stalls) - MANY} more workers"
        slow = [stall.worker for stall in stalls if not stall.ended]
        if slow:
            iters = self._run.iters
            least = min(iters[worker] for worker in slow)
            waits = [
                f"worker {w} for {now_s - blocked[w]:.1f} s" + _ahead(iters[w] - least) for w in sorted(blocked)[:MANY]
            ]
            waits += [f"{len(blocked) - MANY} more"] * (len(blocked) > MANY)
            yield f"hpcsync:   blocked: {', '.join(waits) or 'none'}; {self._bound}"

    def _describe(self, stall: Straggler, phase: str) -> str:
        if stall.ended:
            return f"worker {stall.worker} continues: its iteration {stall.iteration} took {stall.lasted_s:.1f} s"
        return (
            f"{self._place(stall.worker, phase, ' stalls')}: its iteration {stall.iteration} has "
            f"lasted {stall.lasted_s:.1f} s (usually {stall.usual_s:.3g} s, limit {stall.deadline_s:.1f} s)"
        )

    def _place(self, worker: int, phase: str, does: str = "") -> str:
        rank, host = self._places[worker]
        return f"worker {worker}{does} (rank {rank} on {host}, {phase})"


def _ahead(n_iterations: int) -> str:
    return f" ({n_iterations} ahead)" if n_iterations > 0 else ""
