"""Evaluation beside server 0: its own thread, its own model, its own promised version of the weights.

Neither servers nor workers wait for it: it reads one-sided, as a worker does, and what it reads is not overwritten
meanwhile. An evaluation that becomes due while the last one still runs is skipped.
"""

from __future__ import annotations

import copy
import queue
import threading

import torch

from hpcsync.learning.flat import FlatModel
from hpcsync.learning.schedule import EvaluationSchedule
from hpcsync.learning.workloads import Evaluate
from hpcsync.mpi.link import Reader

Judged = tuple[float, int, int, float, float]


class Evaluator:
    """Evaluates a copy of `model` every `every_samples` samples (0: never)."""

    def __init__(self, reader: Reader, model: torch.nn.Module, evaluate: Evaluate, every_samples: int) -> None:
        self._flat = FlatModel(copy.deepcopy(model))
        self._evaluate = evaluate
        self._schedule = EvaluationSchedule(every_samples)
        self._reader = reader
        self._requests: queue.SimpleQueue[tuple[float, int, int] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Judged | BaseException] = queue.SimpleQueue()
        self._busy = False
        self._thread = threading.Thread(target=self._work, daemon=True, name="evaluator")
        self._thread.start()

    def due(self, samples: int) -> bool:
        return self._schedule.due(samples) and not self._busy

    def begin(self, now_s: float, version: int, samples: int) -> None:
        """Read and judge the version that all servers are about to promise to the evaluator."""
        self._busy = True
        self._schedule.begun(samples)
        self._requests.put((now_s, version, samples))

    def result(self) -> Judged | None:
        """(now_s, version, samples, loss, accuracy) of a finished evaluation, or None; raises what it raised."""
        try:
            judged = self._results.get_nowait()
        except queue.Empty:
            return None
        self._busy = False
        if isinstance(judged, BaseException):
            raise judged
        return judged

    def _work(self) -> None:
        while (request := self._requests.get()) is not None:
            try:
                self._reader.read(self._reader.wait(version=request[1]), self._flat.weights.numpy())
                self._results.put((*request, *self._evaluate(self._flat.model)))
            except BaseException as error:  # it belongs to the main thread
                self._results.put(error)

    def close(self) -> None:
        """Wait for the evaluation under way; its `result` can still be had. Harmless when repeated."""
        self._requests.put(None)
        self._thread.join()
