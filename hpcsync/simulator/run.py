"""What simulations with and without servers have in common: begin and end of the run, its evaluations and problems."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from hpcsync.config.job import Job, Script
from hpcsync.core.coordinator import Coordinator, Recorder
from hpcsync.core.peer_coordinator import PeerCoordinator
from hpcsync.core.step_problems import ProblemReport
from hpcsync.simulator.event_loop import Loop
from hpcsync.simulator.halts import Halts
from hpcsync.training.lr_schedule import EvaluationSchedule
from hpcsync.workloads.registry import Workload

Watch = Callable[[float, Any], None]
Judged = tuple[Any, ...]  # time, version, samples, and the results of an evaluation


class Simulation(ABC):
    """Simulation of one run.

    Parameters
    ----------
    job
        Job to simulate.
    workload
        Its workload.
    loop
        Event loop.
    trace
        Receiver of the trace rows.
    watch
        Called with the virtual time in seconds and the coordinator after every push or iteration, to show progress or
        to end the run by raising.

    Attributes
    ----------
    coordinator
        Decisions and records of the run.
    attributes
        Attributes of the trace in addition to those of every run.
    """

    coordinator: Coordinator | PeerCoordinator
    attributes: Mapping[str, str | int] = {}

    def __init__(self, job: Job, workload: Workload, loop: Loop, trace: Recorder, watch: Watch) -> None:
        assert not isinstance(job.workload, Script)
        self._job, self._loop, self._watch = job, loop, watch
        self._batch_size = job.workload.batch_size
        self._with_loss, self._look_at = job.with_loss, ProblemReport(job.stop.on_nan).see
        self._evaluated = workload.evaluate is not None
        self._evaluations = EvaluationSchedule(job.evaluation.every_samples if self._evaluated else 0)
        self._evaluating = False  # while an evaluation that takes time is under way
        cluster = job.cluster
        deaths = any(event.change == "die" for event in cluster.events)
        self._halts = Halts(job, trace) if deaths or cluster.checkpoint_s is not None else None
        self._halted: set[int] = set()  # workers that wait for the end of the halt
        self._kept: list[tuple[Callable[..., object], tuple[Any, ...]]] = []  # what happens then

    def run(self) -> None:
        """Run until every worker has left; then write the final weights into the workload's model and evaluate them."""
        coordinator = self.coordinator
        self._start()
        if self._job.stop.seconds is not None:
            self._loop.at(self._job.stop.seconds, self._time_has_come)
        self._loop.run()
        if coordinator.active:
            raise RuntimeError(f"workers {sorted(coordinator.active)} are blocked forever: no events are left")
        self._finish()
        if self._evaluated:
            self._conclude(self._judge(coordinator.version, coordinator.samples, coordinator.updated_s))

    @abstractmethod
    def _start(self) -> None:
        """Schedule the first events."""

    @abstractmethod
    def _finish(self) -> None:
        """Write the final weights into the workload's model."""

    @abstractmethod
    def _judge(self, version: int, samples: int, now_s: float) -> Judged:
        """Evaluate the weights as they are; return this with the version and samples."""

    @abstractmethod
    def _conclude(self, judged: Judged) -> None:
        """Pass the result of an evaluation to the coordinator."""

    @abstractmethod
    def _time_has_come(self) -> None:
        """Handle that a time has come that was set."""

    def _evaluate_if_due(self) -> None:
        """Evaluate the current version if it is due."""
        coordinator = self.coordinator
        if coordinator.stopping or self._evaluating or not self._evaluations.begin_if_due(coordinator.samples):
            return
        self._evaluate(coordinator.version, coordinator.samples)

    def _evaluate(self, version: int, samples: int) -> None:
        """Evaluate this version, unless another evaluation is under way or the run is ending.

        Without a duration, a version that reaches the target ends the run; otherwise training goes on meanwhile.
        """
        if self._evaluating or self.coordinator.stopping:
            return
        judged, seconds = self._judge(version, samples, self._loop.now_s), self._job.evaluation.seconds
        self._evaluating = True
        if seconds is None:
            self._evaluation_ends(judged)
        else:
            self._loop.after(seconds, self._evaluation_ends, judged)

    def _evaluation_ends(self, judged: Judged) -> None:
        self._evaluating = False
        self._conclude(judged)

    # ---- checkpoints and restarts ----

    @property
    def _halted_s(self) -> float:
        """Time from which on nothing computes, if the last worker halts now."""
        return self._loop.now_s

    def _must_halt(self) -> bool:
        """Return True if workers are asked to halt, for a checkpoint or because a rank has died."""
        halts, coordinator = self._halts, self.coordinator
        if halts is None:
            return False
        if not (halts.asked or coordinator.stopping):
            halts.ask_if_due(self._loop.now_s, coordinator.version, can_save=self._can_save)
        return halts.asked

    @property
    def _can_save(self) -> bool:
        """False if there can be no further checkpoint: without servers a worker has left."""
        return self._job.has_servers or len(self.coordinator.active) == self._job.cluster.workers

    def _halt(self, worker: int, then: Callable[..., object], *args: Any) -> None:
        """Let a worker wait, and call ``then(*args)`` once the run continues: after a while when all wait."""
        coordinator = self.coordinator
        assert self._halts is not None
        self._kept.append((then, args))
        if worker in self._halted or worker not in coordinator.computing:
            return  # it joins
        self._halted.add(worker)
        if len(self._halted) == len(coordinator.computing):
            continues_s = self._halts.continues_s(
                self._halted_s, coordinator.version, coordinator.seq, can_save=self._can_save
            )
            self._loop.at(continues_s, self._end_halt)

    def _is_kept(self, then: Callable[..., object], *args: Any) -> bool:
        """Keep ``then(*args)`` until the run continues, if workers halt; return whether they do."""
        halting = self._halts is not None and self._halts.asked
        if halting:
            self._kept.append((then, args))
        return halting

    def _end_halt(self) -> None:
        """Let everything continue that has waited."""
        assert self._halts is not None
        self._halts.asked = False
        self._halted.clear()
        kept, self._kept = self._kept, []
        for then, args in kept:
            then(*args)
