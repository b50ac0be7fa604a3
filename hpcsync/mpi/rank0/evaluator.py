"""Evaluation in the background: a thread with its own model and its own copy of the weights.

It reads one-sided, and the weights it reads are not overwritten meanwhile, so no rank waits for it, unless the paradigm
blocks workers until it has ended. An evaluation that becomes due while the previous one is running is skipped; one that
the paradigm wants follows it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch

from hpcsync.mpi.transport import cuda
from hpcsync.training.buffers import Buffers, Calibrate
from hpcsync.training.flat_model import FlatModel
from hpcsync.training.lr_schedule import EvaluationSchedule
from hpcsync.workloads.registry import Evaluate

Judged = tuple[float, int, int, float, float, float]
Read = Callable[[int, torch.Tensor, Buffers], float | None]


class Evaluator:
    """Background evaluation of a copy of the model.

    Parameters
    ----------
    read
        `read(version, into, buffers)` fills the flat weights, shape (size,), lets the model's buffers adopt the
        workers', and returns the replicas' consensus distance, NaN if there are no replicas. It returns None if the
        version is no longer available, which ends that evaluation.
    flat
        Copy of the model to evaluate.
    evaluate
        Evaluation of a model: returns loss and accuracy.
    every_samples
        Number of samples between evaluations; 0 for none.
    choice
        Whose buffers are evaluated.
    calibrate
        Recomputes the running statistics before each evaluation; None if they are the workers'.

    Attributes
    ----------
    busy : bool
        Whether an evaluation is running.
    """

    def __init__(
        self,
        read: Read,
        flat: FlatModel,
        evaluate: Evaluate,
        every_samples: int,
        choice: str,
        calibrate: Calibrate | None,
    ) -> None:
        self._flat = flat
        self._buffers = Buffers(self._flat.model, choice)
        self._calibrate = calibrate
        cuda.ready(self._flat.weights)
        self._evaluate = evaluate
        self._schedule = EvaluationSchedule(every_samples)
        self._read = read
        self._requests: queue.SimpleQueue[tuple[float, int, int] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Judged | BaseException | None] = queue.SimpleQueue()
        self.busy = False
        self._before = 0  # samples at which the running evaluation was due
        self._thread = threading.Thread(target=self._work, daemon=True, name="evaluator")
        self._thread.start()

    def due(self, samples: int) -> bool:
        """Return whether an evaluation is due and none is running."""
        return self._schedule.due(samples) and not self.busy

    def begin(self, now_s: float, version: int, samples: int) -> None:
        """Read and evaluate this version of the weights, which is current at `now_s`."""
        self.busy = True
        self._before = self._schedule.next_samples
        self._schedule.begin_if_due(samples)
        self._requests.put((now_s, version, samples))

    def state(self) -> int:
        """Return the samples at which the next evaluation is due, as if the running one had not begun."""
        return self._before if self.busy else self._schedule.next_samples

    def resume(self, state: int, samples: int) -> None:
        """Restore a state returned by `state`, of a run that has had so many samples."""
        self._schedule.resume(state, samples)

    def result(self) -> Judged | None:
        """Return a finished evaluation, or None.

        Returns
        -------
        tuple or None
            (now_s, version, samples, loss, accuracy, consensus distance).

        Raises
        ------
        BaseException
            The exception that the evaluation raised, if any.
        """
        try:
            judged = self._results.get_nowait()
        except queue.Empty:
            return None
        self.busy = False
        if isinstance(judged, BaseException):
            raise judged
        return judged

    def _work(self) -> None:
        with cuda.own_stream(self._flat.weights.device):
            self._judge_requests()

    def _judge_requests(self) -> None:
        while (request := self._requests.get()) is not None:
            try:
                distance = self._read(request[1], self._flat.weights, self._buffers)
                if distance is None:
                    self._results.put(None)
                    continue
                self._flat.spread()
                if self._calibrate is not None:
                    self._calibrate(self._flat.model)
                loss, accuracy = self._evaluate(self._flat.model)
                self._results.put((*request, loss, accuracy, distance))
            except BaseException as error:  # `result` raises it in the main thread
                self._results.put(error)

    def close(self) -> None:
        """Wait for the running evaluation, whose `result` remains available; harmless when repeated."""
        self._requests.put(None)
        self._thread.join()
