"""A worker's iterations as its training loop sees them: the batches, and when each computation began and ended."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import islice, repeat
from typing import Any

from hpcsync.config.job import Job
from hpcsync.core.device_speed import device
from hpcsync.training.sampler import batches, fetch, n_batches, sequence_indices, whole_batches

CALL_S = 5e-4  # from one call while padding to the next


class Iterations:
    """The batches of one worker, in the job's data order, with each iteration padded to what its device takes.

    now: the clock, in seconds since the start of the run.
    handed_out: (first, n_samples) of the run's sequence of samples for the worker's next iteration, where batch sizes
    are given out; None where all batches are alike.
    leave: called when the worker leaves before its next batch, because the job says so, with the time at which it is to
    join again, or infinity; returns whether it does.
    while_padding: called now and then while an iteration is padded, as it would be from within a computation.
    """

    def __init__(
        self,
        job: Job,
        worker: int,
        now: Callable[[], float],
        leave: Callable[[float], bool] = lambda joins_s: False,
        while_padding: Callable[[], None] | None = None,
        allocated: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        self.batch_size = 0
        self.computed_s = 0.0
        """Of the iteration that has ended."""
        self._job = job
        self._worker = worker
        self._now = now
        self._leave = leave
        self._while_padding = while_padding
        self._allocated = allocated
        self._training_epochs = 0
        self._ended = 0  # iterations so far
        self._skip = 0  # of the next batches, those that were trained on before the run went on
        self._begin_s: float | None = None  # of the batch that has been handed out, until its step
        self._device_s = 0.0  # what the device takes for it
        self._resumed_s: float | None = None  # when the part of its computation began that is under way
        self._in_parts = False
        self._device = device(job, worker)

    def shard(self, dataset: Any, batch_size: int, epochs: int | None, stopped: Callable[[], bool]) -> Iterator[Any]:
        """The batches of the next `epochs` training epochs (None: no end), until `stopped` or the worker leaves.

        batch_size: of all workers, or where they differ the one for which the device's times are meant. Without a data
        set, ().
        """
        first = self._training_epochs
        self._training_epochs += epochs or 0
        those = range(first, sys.maxsize if epochs is None else first + epochs)
        mine = self._alike(dataset, batch_size, those) if self._allocated is None else self._next_ones(dataset, those)
        while not stopped():
            begin_s = self._now()
            if self._device.leaves(begin_s):
                if not self._leave(self._device.joins_s):
                    return
                self._device.join()
                continue
            try:
                self.batch_size, batch = next(mine)
            except StopIteration:
                return
            self._begin_s = begin_s
            self._in_parts, self.computed_s = False, 0.0
            self._device_s = self._device.seconds(begin_s, self.batch_size / batch_size)
            yield batch

    def state(self) -> dict[str, Any]:
        """How far the worker is; between two iterations."""
        return {"ended": self._ended, "device": self._device.state()}

    def skip(self, n_iterations: int) -> None:
        """Begin after so many, of which nothing else is known."""
        self._ended = self._skip = n_iterations

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from there: loaders begin after what was trained on, as often as they are asked for it again."""
        self._ended = self._skip = state["ended"]
        self._device.restore(state["device"])

    @property
    def under_way(self) -> bool:
        """Whether a batch has been handed out whose computation has not ended."""
        return self._begin_s is not None

    def pad(self, share: float) -> None:
        """This share of the batch is computed: let that have taken what it takes the device."""
        if self._begin_s is None:
            raise RuntimeError("step without a batch: call it once for each batch of the session's shard")
        if self._device_s:
            self._pad(self._begin_s + share * self._device_s)

    def resume(self) -> None:
        """A part of the computation begins, of an iteration that is computed in parts and waits between them."""
        self._resumed_s, self._in_parts = self._now(), True

    def rest(self, share: float) -> None:
        """It ends: let it have taken this share of what the iteration takes the device."""
        assert self._resumed_s is not None
        self._pad(self._resumed_s + share * self._device_s)
        self.computed_s += self._now() - self._resumed_s

    def end(self, share: float = 1.0) -> tuple[float, float]:
        """The iteration ends with this share of its batch; when it began and ended, padded unless its parts were.
        Raises RuntimeError where none has begun."""
        self.pad(0.0 if self._in_parts else share)
        assert self._begin_s is not None
        begin_s, self._begin_s = self._begin_s, None
        self._ended += 1
        end_s = self._now()
        if not self._in_parts:
            self.computed_s = end_s - begin_s
        return begin_s, end_s

    def _pad(self, end_s: float) -> None:
        while (left_s := end_s - self._now()) > 0:
            if self._while_padding is None:
                time.sleep(left_s)
            else:
                self._while_padding()
                time.sleep(min(left_s, CALL_S))

    def _alike(self, dataset: Any, batch_size: int, epochs: range) -> Iterator[tuple[int, Any]]:
        if dataset is None:
            return iter(lambda: (batch_size, ()), None)  # without end
        job, takers = self._job, self._job.takers
        n_takers, takes = len(takers), self._worker in takers
        number = takers.index(self._worker) if takes else 0
        sizes: dict[str, Any] = {"n_workers": n_takers, "batch_size": batch_size, "epochs": epochs}
        n_iterations = n_batches(number, size=len(dataset), **sizes)
        if n_takers < job.cluster.workers:  # all make as many iterations: what not all takers have is left out
            n_iterations = len(epochs) * whole_batches(batch_size, len(dataset)) // n_takers
        skip = min(self._skip, n_iterations)
        self._skip -= skip
        n_left = min(n_iterations - skip, sys.maxsize)
        if not takes:  # it computes with those of others
            return repeat((batch_size * len(job.groups.served(self._worker)), ()), n_left)
        mine = batches(dataset, job.seed, number, skip=skip, **sizes)
        return ((batch_size, batch) for batch in islice(mine, n_left))

    def _next_ones(self, dataset: Any, epochs: range) -> Iterator[tuple[int, Any]]:
        """A batch that reaches over the end of a training epoch belongs to the one in which it begins."""
        assert self._allocated is not None
        while True:
            first, n_samples = self._allocated()
            if dataset is None:
                yield n_samples, ()
                continue
            size = len(dataset)
            if first >= epochs.stop * size:
                return
            yield n_samples, fetch(dataset, sequence_indices(self._job.seed, first, n_samples, size=size))
