"""What simulations with and without servers have in common: begin and end of the run, its evaluations and problems."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from hpcsync.config.job import Job, Script
from hpcsync.core.coordinator import Coordinator
from hpcsync.core.peer_coordinator import PeerCoordinator
from hpcsync.core.step_problems import ProblemReport, loss_check
from hpcsync.simulator.event_loop import Loop
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
    attributes: Mapping[str, int] = {}

    def __init__(self, job: Job, workload: Workload, loop: Loop, watch: Watch) -> None:
        assert not isinstance(job.workload, Script)
        self._job, self._loop, self._watch = job, loop, watch
        self._batch_size = job.workload.batch_size
        self._problem_of, self._look_at = loss_check(job), ProblemReport(job.stop.on_nan).see
        self._evaluated = workload.evaluate is not None
        self._evaluations = EvaluationSchedule(job.evaluation.every_samples if self._evaluated else 0)
        self._evaluating = False  # while an evaluation that takes time is under way

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
        if seconds is None:
            self._conclude(judged)
        else:
            self._evaluating = True
            self._loop.after(seconds, self._evaluation_ends, judged)

    def _evaluation_ends(self, judged: Judged) -> None:
        self._evaluating = False
        self._conclude(judged)
