"""Evaluation beside rank 0's own work: its own thread, its own model, its own copy of the weights.

Nobody waits for it: it reads one-sided, and what it reads is not overwritten meanwhile. An evaluation that becomes due
while the last one still runs is skipped.
"""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Callable

import torch

from hpcsync.mpi.transport import cuda
from hpcsync.training.flat_model import FlatModel
from hpcsync.training.lr_schedule import EvaluationSchedule
from hpcsync.workloads.registry import Evaluate

Judged = tuple[float, int, int, float, float, float]
Read = Callable[[int, torch.Tensor], float | None]


class Evaluator:
    """Evaluates a copy of `model` every `every_samples` samples (0: never).

    read: `read(version, into)` fills the flat weights, shape (size,), and gives the replicas' consensus distance (NaN
          where there are none); None where that version cannot be had any more, which ends that evaluation.
    """

    def __init__(self, read: Read, model: torch.nn.Module, evaluate: Evaluate, every_samples: int) -> None:
        self._flat = FlatModel(copy.deepcopy(model))
        cuda.ready(self._flat.weights)
        self._evaluate = evaluate
        self._schedule = EvaluationSchedule(every_samples)
        self._read = read
        self._requests: queue.SimpleQueue[tuple[float, int, int] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Judged | BaseException | None] = queue.SimpleQueue()
        self.busy = False
        self._before = 0  # when the one under way was due
        self._thread = threading.Thread(target=self._work, daemon=True, name="evaluator")
        self._thread.start()

    def due(self, samples: int) -> bool:
        return self._schedule.due(samples) and not self.busy

    def begin(self, now_s: float, version: int, samples: int) -> None:
        """Read and judge this version of the weights, which is current at now_s."""
        self.busy = True
        self._before = self._schedule.next_samples
        self._schedule.begun(samples)
        self._requests.put((now_s, version, samples))

    def state(self) -> int:
        """Samples at which the next is due, were the one under way never judged."""
        return self._before if self.busy else self._schedule.next_samples

    def resume(self, state: int) -> None:
        """From there."""
        self._schedule.next_samples = state

    def result(self) -> Judged | None:
        """(now_s, version, samples, loss, accuracy, consensus distance) of a finished evaluation, or None.

        Raises what it raised.
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
                distance = self._read(request[1], self._flat.weights)
                judged = None if distance is None else (*request, *self._evaluate(self._flat.model), distance)
                self._results.put(judged)
            except BaseException as error:  # it belongs to the main thread
                self._results.put(error)

    def close(self) -> None:
        """Wait for the evaluation under way; its `result` can still be had. Harmless when repeated."""
        self._requests.put(None)
        self._thread.join()
