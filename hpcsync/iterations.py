"""A worker's iterations as its training loop sees them: the batches, and when each computation began and ended."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from hpcsync.devices import device
from hpcsync.job import Job
from hpcsync.learning.data import batches

CALL_S = 5e-4  # from one call while padding to the next


class Iterations:
    """The batches of one worker, in the job's data order, with each iteration padded to what its device takes.

    now: the clock, in seconds since the start of the run.
    leave: called when the worker leaves before its next batch, because the job says so.
    while_padding: called now and then while an iteration is padded, as it would be from within a computation.
    """

    def __init__(
        self,
        job: Job,
        worker: int,
        now: Callable[[], float],
        leave: Callable[[], None] = lambda: None,
        while_padding: Callable[[], None] | None = None,
    ) -> None:
        self.batch_size = 0
        self._job = job
        self._worker = worker
        self._now = now
        self._leave = leave
        self._while_padding = while_padding
        self._training_epochs = 0
        self._begin_s: float | None = None  # of the batch that has been handed out, until its step
        self._device = device(job, worker)

    def shard(self, dataset: Any, batch_size: int, epochs: int | None, stopped: Callable[[], bool]) -> Iterator[Any]:
        """The batches of the next `epochs` training epochs (None: no end), until `stopped` or the worker leaves.

        Without a data set, ().
        """
        first = self._training_epochs
        self._training_epochs += epochs or 0
        mine = self._batches(dataset, batch_size, range(first, sys.maxsize if epochs is None else first + epochs))
        while not stopped():
            begin_s = self._now()
            if self._device.leaves(begin_s):
                self._leave()
                return
            self.batch_size = batch_size
            self._begin_s = begin_s
            try:
                batch = next(mine)
            except StopIteration:
                return
            yield batch

    @property
    def under_way(self) -> bool:
        """Whether a batch has been handed out whose computation has not ended."""
        return self._begin_s is not None

    def end(self) -> tuple[float, float]:
        """Pad the iteration; return when it began and ended. Raises RuntimeError where no iteration has begun."""
        if self._begin_s is None:
            raise RuntimeError("step without a batch: call it once for each batch of the session's shard")
        begin_s, self._begin_s = self._begin_s, None
        if padded_s := self._device.seconds(begin_s):
            self._pad(begin_s + padded_s)
        return begin_s, self._now()

    def _pad(self, end_s: float) -> None:
        while (left_s := end_s - self._now()) > 0:
            if self._while_padding is None:
                time.sleep(left_s)
            else:
                self._while_padding()
                time.sleep(min(left_s, CALL_S))

    def _batches(self, dataset: Any, batch_size: int, epochs: range) -> Iterator[Any]:
        if dataset is None:
            return iter(tuple, None)  # () without end
        n_workers = self._job.cluster.workers
        return batches(dataset, self._job.seed, self._worker, n_workers=n_workers, batch_size=batch_size, epochs=epochs)
