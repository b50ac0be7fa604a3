"""Iterations of one worker as its training loop sees them: batches, and begin and end of each computation.

An iteration is what one step uses: usually one batch, or several batches whose gradients accumulate.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import islice, repeat
from typing import Any

from hpcsync.config.job import Job
from hpcsync.core.device_speed import Device, device
from hpcsync.state import Stateful
from hpcsync.training.sampler import batches, fetch, n_batches, sequence_indices, whole_batches

CALL_S = 5e-4  # seconds between two calls while padding


class Iterations(Stateful):
    """Batches of one worker in the job's data order, with each iteration padded to the time of its device.

    Parameters
    ----------
    job
        The job.
    worker
        Number of the worker.
    now
        Clock: seconds since the start of the run.
    leave
        Called when the worker leaves before its next batch, as the job specifies, with the time at which it joins again
        or infinity. Returns True if it does.
    while_padding
        Called repeatedly while an iteration is padded, as from within a computation.
    allocated
        Returns (first, n_samples) of the worker's next iteration in the run's sequence of samples, if batches are
        allocated; None if all batches have the same size.

    Attributes
    ----------
    batch_size
        Samples of the iteration under way so far, or of the last one.
    computed_s, load_s
        Seconds of computation, and of waiting for its batches, of the iteration that has ended.
    """

    state_types = {"_used": int, "_device": Device}

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
        self.computed_s = self.load_s = 0.0
        self._job = job
        self._worker = worker
        self._now = now
        self._leave = leave
        self._while_padding = while_padding
        self._allocated = allocated
        self._training_epochs = 0
        self._drawn = 0  # batches of the iteration under way
        self._used = 0  # batches of the iterations that have ended
        self._skip = 0  # next batches to skip, trained on before the run was resumed
        self._begin_s: float | None = None  # begin of the iteration under way
        self._device_s = 0.0  # seconds that the device takes to compute its batches so far
        self._resumed_s: float | None = None  # begin of the part of the computation under way
        self._in_parts = False
        self._device = device(job, worker)

    def shard(self, dataset: Any, batch_size: int, epochs: int | None, stopped: Callable[[], bool]) -> Iterator[Any]:
        """Yield the batches of the next training epochs, until `stopped` or the worker leaves.

        Parameters
        ----------
        dataset
            Data set; None: batches are ().
        batch_size
            Samples of every batch, or with allocated batches the size that the device's times refer to.
        epochs
            Number of training epochs; None: no end.
        stopped
            Returns True once the run is over for this worker.
        """
        first = self._training_epochs
        self._training_epochs += epochs or 0
        epoch_range = range(first, sys.maxsize if epochs is None else first + epochs)
        own = (
            self._equal_batches(dataset, batch_size, epoch_range)
            if self._allocated is None
            else self._allocated_batches(dataset, epoch_range)
        )
        while not stopped():
            begin_s = self._now()
            if self._begin_s is None and self._device.leaves(begin_s):
                if not self._leave(self._device.joins_s):
                    return
                self._device.join()
                continue
            try:
                n_samples, batch = next(own)
            except StopIteration:
                return
            if self._begin_s is None or self._allocated is not None:  # an allocated batch without a step comes again
                self._begin(begin_s)
                self.batch_size = self._drawn = 0
            loaded_s = self._now()
            self.batch_size += n_samples
            self._drawn += 1
            self.load_s += loaded_s - begin_s
            self._device_s += self._device.seconds(loaded_s, n_samples / batch_size)
            yield batch

    def begin_again(self) -> None:
        """Begin another iteration with the samples of the last one, such as the step of a second optimizer."""
        self._begin(self._now())

    def _begin(self, begin_s: float) -> None:
        self._begin_s = begin_s
        self._in_parts, self.computed_s, self.load_s, self._device_s = False, 0.0, 0.0, 0.0

    def skip(self, n_iterations: int) -> None:
        """Start after `n_iterations` iterations of one batch each, of which nothing else is known."""
        self._used = self._skip = n_iterations

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from a state: the next loaders skip the batches that were trained on."""
        super().restore(state)
        self._skip = self._used

    @property
    def under_way(self) -> bool:
        """True while an iteration has begun and not ended."""
        return self._begin_s is not None

    def pad(self, share: float) -> None:
        """Wait until the device would have computed this share of the iteration.

        Raises
        ------
        RuntimeError
            If no batch is under way.
        """
        if self._begin_s is None:
            raise RuntimeError("step was called without a batch: call it once for each batch of the session's shard")
        if self._device_s:
            self._pad(self._begin_s + self.load_s + share * self._device_s)

    def resume(self) -> None:
        """Begin a part of the computation, in an iteration that is computed in parts and waits between them."""
        self._resumed_s, self._in_parts = self._now(), True

    def rest(self, share: float) -> None:
        """End the part: wait until it has taken this share of the device's time of the iteration."""
        assert self._resumed_s is not None
        self._pad(self._resumed_s + share * self._device_s)
        self.computed_s += self._now() - self._resumed_s

    def end(self, share: float = 1.0) -> tuple[float, float]:
        """End the iteration with this share of its batch computed, padded unless its parts were.

        Returns
        -------
        begin_s, end_s : float
            Begin and end of the iteration, in seconds since the start of the run.

        Raises
        ------
        RuntimeError
            If no iteration has begun.
        """
        self.pad(0.0 if self._in_parts else share)
        assert self._begin_s is not None
        begin_s, self._begin_s = self._begin_s, None
        self._used += self._drawn
        self._drawn = 0
        end_s = self._now()
        if not self._in_parts:
            self.computed_s = max(0.0, end_s - begin_s - self.load_s)
        return begin_s, end_s

    def _pad(self, end_s: float) -> None:
        while (left_s := end_s - self._now()) > 0:
            if self._while_padding is None:
                time.sleep(left_s)
            else:
                self._while_padding()
                time.sleep(min(left_s, CALL_S))

    def _equal_batches(self, dataset: Any, batch_size: int, epochs: range) -> Iterator[tuple[int, Any]]:
        if dataset is None:
            return iter(lambda: (batch_size, ()), None)  # without end
        job, takers = self._job, self._job.takers
        n_takers, takes = len(takers), self._worker in takers
        number = takers.index(self._worker) if takes else 0
        sizes: dict[str, Any] = {"n_workers": n_takers, "batch_size": batch_size, "epochs": epochs}
        n_iterations = n_batches(number, size=len(dataset), **sizes)
        if n_takers < job.cluster.workers:  # all make equally many iterations: an incomplete last one is left out
            n_iterations = len(epochs) * whole_batches(batch_size, len(dataset)) // n_takers
        skip = min(self._skip, n_iterations)
        self._skip -= skip
        n_left = min(n_iterations - skip, sys.maxsize)
        if not takes:  # the worker computes with the batches of others
            return repeat((batch_size * len(job.groups.served(self._worker)), ()), n_left)
        own = batches(dataset, job.seed, number, skip=skip, **sizes)
        return ((batch_size, batch) for batch in islice(own, n_left))

    def _allocated_batches(self, dataset: Any, epochs: range) -> Iterator[tuple[int, Any]]:
        """Yield allocated batches.

        A batch that extends over the end of a training epoch belongs to the epoch in which it begins.
        """
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
