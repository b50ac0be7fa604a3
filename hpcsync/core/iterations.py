"""Iterations of one worker as its training loop sees them: batches, and begin and end of each computation.

An iteration is what one step uses: usually one batch, or several batches whose gradients accumulate.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice, repeat
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import DataLoader

from hpcsync.config.errors import JobError
from hpcsync.config.job import Job, Script
from hpcsync.core.device_speed import Device, device
from hpcsync.core.session import Asked, Batches, WithoutBatch
from hpcsync.state import Stateful
from hpcsync.system import loader_processes
from hpcsync.training.batch_sources import Batch, Ordered, Part, Source
from hpcsync.training.loading import refuse, set_epoch, source
from hpcsync.training.sampler import whole_batches

CALL_S = 5e-4  # seconds between two calls while padding
SLEEP_S = 1e6  # longest single sleep; `time.sleep` refuses about 1e10


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
    stopped
        Returns True once the run is over for this worker.
    leave
        Called when the worker leaves before its next batch, as the job specifies, with the time at which it joins again
        or infinity. Returns True if it does.
    while_padding
        Called repeatedly while an iteration is padded, as from within a computation.
    allocated
        Returns (first, n_samples) of the worker's next iteration in the run's sequence of samples, if batches are
        allocated; None if all batches have the same size.
    unused
        Returns True if no gradient has been computed since the last step.
    n_optimizers
        Optimizers that step one after the other.

    Attributes
    ----------
    batch_size
        Samples of the iteration under way so far, or of the last one.
    data_read
        For each loader the first training epoch that was read, and numbers that are alike on all workers if their data
        are.
    computed_s, load_s
        Seconds of computation, and of waiting for its batches, of the iteration that has ended.
    """

    state_types = {
        "_used": int,
        "_used_by": list[int],
        "_training_epochs": int,
        "_first_by": list[int],
        "_lengths": dict[int, int],
        "_device": Device,
    }

    def __init__(
        self,
        job: Job,
        worker: int,
        now: Callable[[], float],
        stopped: Callable[[], bool] = lambda: False,
        leave: Callable[[float], bool] = lambda joins_s: False,
        while_padding: Callable[[], None] | None = None,
        allocated: Callable[[], tuple[int, int]] | None = None,
        unused: Callable[[], bool] = lambda: False,
        n_optimizers: int = 1,
    ) -> None:
        self.batch_size = 0
        self.in_loop = False  # whether the script has a batch
        self._drew_ahead = False  # whether its loop may draw the next batch before each step
        self.computed_s = self.load_s = 0.0
        self.data_read: dict[int, tuple[int, list[float]]] = {}
        self._reading = 0  # the loader that is being read
        self._job = job
        self._worker = worker
        self._now = now
        self._stopped = stopped
        self._leave = leave
        self._while_padding = while_padding
        self._allocated = allocated
        self._unused = unused
        self._n_optimizers = n_optimizers
        self._training_epochs = 0
        self._drawn: list[int] = []  # numbers of the loaders of which the iteration under way has a batch each
        self._used = 0  # batches of the iterations that have ended
        self._used_by: list[int] = []  # those of each loader, in the order of the calls of `shard`
        self._first_by: list[int] = []  # first training epoch of each loader; -1: it has not been read
        self._n_loaders = 0  # loaders of this start of the run
        self._skip_by: list[int] = []  # next batches of each loader to skip, trained on before the run was resumed
        self._skip_others = 0  # batches to skip of loaders of which only the sum is known
        self._last_used = 0  # last loader of which batches are skipped
        self._on_continuing: Callable[[], None] = lambda: None
        self._lengths: dict[int, int] = {}  # batches of epochs, where only reading tells, or the loop ended early
        self._sources: WeakKeyDictionary[DataLoader[Any], Source] = WeakKeyDictionary()
        self._said: set[str] = set()
        self._begin_s: float | None = None  # begin of the iteration under way
        self._device_s = 0.0  # seconds that the device takes to compute its batches so far
        self._resumed_s: float | None = None  # begin of the latest part of a computation that is made in parts
        self._device = device(job, worker)

    def shard(self, asked: Asked) -> Batches:
        """Return the batches of the next training epochs, until the run is over or the worker leaves.

        Loaders have their training epochs in the order in which they are first read; one that is not read has none.
        One without an end counts as one epoch, so that the next begins with another order, the same on every worker.
        Without data the batches are ().

        Raises
        ------
        JobError
            If a step is to have several batches, but batches are allocated by the step; if an iterator is to have
            several training epochs. Reading raises it if the data cannot be used.
        """
        if asked.accumulate > 1 and self._allocated is not None:
            raise JobError(f"accumulate = {asked.accumulate}: must be 1 where batches are allocated: a step has one")
        if isinstance(asked.dataset, Iterator):
            if asked.epochs is not None and asked.epochs > 1:
                name = type(asked.dataset).__name__
                raise JobError(f"shard: epochs = {asked.epochs}: must be 1 with a {name}, which can be read only once")
            asked = asked._replace(epochs=1)
        number = self._n_loaders
        self._n_loaders += 1
        for values, value in ((self._used_by, 0), (self._first_by, -1)):
            values += [value] * (self._n_loaders - len(values))  # those of a state may be more
        return Batches(self._read(asked, number), lambda: self._n_batches(asked, number))

    def _read(self, asked: Asked, number: int) -> Iterator[Any]:
        """Yield the batches of the loader of this number; each belongs to the iteration under way.

        Raises
        ------
        JobError
            If the data cannot be used, or a batch is empty.
        """
        if self.under_way and not self.in_loop and self._unused():  # the loop before was left with its last batch
            self._begin_s = None
            self._count_drawn()
        data, epochs = asked.dataset, self._epochs_of(number, asked.epochs)
        if self._first_by[number] < 0:
            self._first_by[number] = self._training_epochs
            self._training_epochs += 1 if asked.epochs is None else asked.epochs
        if number >= self._last_used:
            self._continue()
        batches = self.source(asked)
        if batches is None:
            unit = asked.batch_size or 0
            own = self._empty_batches(unit)
        else:
            # Items of a data set that are whole batches are drawn one by one, but are not one sample each.
            unit = 0 if isinstance(data, DataLoader) and data.batch_sampler is None else batches.batch_size
            own = (self._batches_in_step if self._in_step else self._batches)(data, batches, epochs, number)
        while not self._stopped():
            begin_s = self._now()
            if self._begin_s is None and self._device.leaves(begin_s):
                if not self._leave(self._device.joins_s):
                    return
                self._device.join()
                continue
            self._reading = number
            try:
                n_samples, batch = next(own)
            except StopIteration:
                return
            if n_samples == 0:
                raise JobError("shard: the first tensor of a batch has length 0: every batch must have a sample")
            if self._begin_s is None or self._allocated is not None:  # an allocated batch without a step comes again
                self._begin(begin_s)
                self.batch_size, self._drawn = 0, []
            loaded_s = self._now()
            self.batch_size += n_samples
            self._drawn.append(number)
            self.load_s += loaded_s - begin_s
            unit = unit or n_samples
            self._device_s += self._device.seconds(loaded_s, n_samples / unit, self._job.paradigm.layer_pieces)
            self.in_loop = True
            try:
                yield batch
            finally:
                self.in_loop = False

    def _epochs_of(self, number: int, epochs: int | None) -> range:
        """Return the training epochs of a loader: if it has not been read, those after all that were."""
        first = self._training_epochs if self._first_by[number] < 0 else self._first_by[number]
        return range(first, sys.maxsize if epochs is None else first + epochs)

    def _n_batches(self, asked: Asked, number: int) -> int:
        """Return how many batches `_read` yields, before the first one and if the run does not end before.

        Raises
        ------
        TypeError
            If that is not known beforehand.
        JobError
            If the data cannot be used.
        """
        if asked.epochs is None or asked.dataset is None:
            raise TypeError("len: epochs = None, or no data, has no end but that of the run")
        if self._allocated is not None:
            raise TypeError("len: batches are allocated: how many this worker gets depends on the speeds of all")
        batches = self.source(asked)
        if self._in_step:
            assert isinstance(batches, Ordered)
            return max(0, self._n_in_step(batches, asked.epochs)[0] - self._to_skip(number))
        found, skip = 0, self._to_skip(number)
        for epoch in self._epochs_of(number, asked.epochs):
            if batches is None or (length := batches.length(epoch)) is None:
                raise TypeError("len: only reading tells how many batches these data have")
            known = self._lengths.get(epoch, length)
            found += 0 if known <= skip else length - skip
            skip = max(0, skip - known)
        return found

    @property
    def training_epochs(self) -> int:
        """Training epochs that have begun, of all loaders."""
        return self._training_epochs

    def begin_again(self) -> None:
        """Begin another iteration with the samples of the last one, for a step that has no batch of its own.

        Such as the step of a further optimizer, or the last step of a loop that draws its next batch before each step:
        its first iteration had two batches.
        """
        if not self.under_way and (self._n_optimizers > 1 or (self._drew_ahead and not self._unused())):
            self._begin(self._now())

    @property
    def left_over(self) -> bool:
        """True if a step comes after the end of the run, but is of a batch that was drawn before.

        Its loop draws the next batch before each step, or another optimizer's step with that batch ended the run.
        """
        return self._stopped() and (self.under_way or self._drew_ahead or self._n_optimizers > 1)

    def _begin(self, begin_s: float) -> None:
        self._begin_s = begin_s
        self._resumed_s, self.computed_s, self.load_s, self._device_s = None, 0.0, 0.0, 0.0

    def _count_drawn(self) -> None:
        self._used += len(self._drawn)
        for number in self._drawn:
            self._used_by[number] += 1
        self._drawn = []

    def skip(self, n_batches: int) -> None:
        """Start after so many batches, of which nothing else is known."""
        self._used = self._skip_others = n_batches

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from a state: the next loaders skip the batches that were trained on."""
        super().restore(state)
        self._skip_by, self._skip_others = [*self._used_by], self._used - sum(self._used_by)
        self._last_used = max((number for number, used in enumerate(self._used_by) if used), default=0)

    def when_continuing(self, call: Callable[[], None]) -> None:
        """Call a function where the loop continues, once it has passed through what was over at the checkpoint."""
        self._on_continuing = call

    def _continue(self) -> None:
        call, self._on_continuing = self._on_continuing, lambda: None
        call()

    def _to_skip(self, number: int) -> int:
        """Return how many batches the loader of this number is still to skip."""
        return self._skip_by[number] if number < len(self._skip_by) else self._skip_others

    def _have_skipped(self, number: int, n_batches: int) -> None:
        """Count batches that the loader of this number has skipped."""
        if number < len(self._skip_by):
            self._skip_by[number] -= n_batches
        else:
            self._used_by[number] += n_batches
            self._skip_others -= n_batches

    @property
    def under_way(self) -> bool:
        """True while an iteration has begun and not ended."""
        return self._begin_s is not None

    def pad(self, share: float) -> None:
        """Wait until the device would have computed this share of the iteration.

        Raises
        ------
        WithoutBatch
            If no batch is under way.
        """
        if self._begin_s is None:
            raise WithoutBatch
        if self._device_s:
            self._pad(self._begin_s + self.load_s + share * self._device_s)

    def resume(self) -> None:
        """Begin a part of the computation, in an iteration that is computed in parts and waits between them."""
        self._resumed_s = self._now()

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
        WithoutBatch
            If no iteration has begun.
        """
        in_parts = self._resumed_s is not None
        self.pad(0.0 if in_parts else share)
        assert self._begin_s is not None
        begin_s, self._begin_s = self._begin_s, None
        self._drew_ahead = self._drew_ahead or len(self._drawn) > 1
        self._count_drawn()
        end_s = self._now()
        if not in_parts:
            self.computed_s = max(0.0, end_s - begin_s - self.load_s)
        return begin_s, end_s

    def _pad(self, end_s: float) -> None:
        while (left_s := end_s - self._now()) > 0:
            if self._while_padding is None:
                time.sleep(min(left_s, SLEEP_S))
            else:
                self._while_padding()
                time.sleep(min(left_s, CALL_S))

    # ---- the batches ----

    def source(self, asked: Asked) -> Source | None:
        """Return the worker's batches of a data set or data loader (`hpcsync.training.loading`); None without data.

        Raises
        ------
        JobError
            If they cannot be used.
        """
        data, batch_size, _, sharded, _ = asked
        refuse(data, batch_size, sharded=sharded)
        if data is None:
            return None
        if isinstance(data, DataLoader) and data in self._sources:  # its processes may be persistent
            return self._sources[data]
        job, takers = self._job, self._job.takers
        number = takers.index(self._worker) if self._takes else 0
        found = source(
            data,
            batch_size,
            Part(job.seed, number, len(takers)),
            sharded=sharded,
            settings=partial(loader_processes.settings, say=self._say),
            at_once=self._allocated is not None,
            note=self._note_data,
        )
        if self._in_step and not isinstance(found, Ordered):
            raise JobError(
                f'shard: paradigm.name = "{job.paradigm.name}" needs samples with indices in the run\'s order: give a '
                "data set with len(data) and data[i], or a DataLoader of one without samplers of your own"
            )
        if isinstance(data, DataLoader):
            self._sources[data] = found
        if self._allocated is None:  # otherwise every sample is used
            self._say(found.notice())
        return found

    def _note_data(self, epoch: int, numbers: list[float]) -> None:
        self.data_read.setdefault(self._reading, (epoch, numbers))

    @property
    def _takes(self) -> bool:
        """True if the worker takes batches; else it computes with those of others."""
        return self._worker in self._job.takers

    @property
    def _in_step(self) -> bool:
        """True if some workers compute with the batches of others, so that all make equally many iterations."""
        return self._allocated is None and len(self._job.takers) < self._job.cluster.workers

    def _say(self, line: str | None) -> None:
        """Tell the user of a script something once, on worker 0."""
        if line is not None and self._worker == 0 and line not in self._said and isinstance(self._job.workload, Script):
            self._said.add(line)
            print(f"shard: {line}", flush=True)

    def _empty_batches(self, batch_size: int) -> Iterator[Batch]:
        while True:
            yield batch_size if self._allocated is None else self._allocated()[1], ()

    def _batches(self, data: Any, batches: Source, epochs: range, number: int) -> Iterator[Batch]:
        """Yield the worker's batches of training epochs, without those used before the run was resumed."""
        if self._allocated is not None:
            assert isinstance(batches, Ordered)
            yield from batches.allocated(self._allocated, epochs)
            return
        for epoch in epochs:
            if len(epochs) > 1:
                set_epoch(data, epoch)
            length = batches.length(epoch)
            known = self._lengths.get(epoch, length)
            skip = self._to_skip(number)
            if known is not None and known <= skip:
                self._have_skipped(number, known)
                batches.pass_over(epoch)
                continue
            self._have_skipped(number, skip)
            self._continue()
            before = self._used_by[number] - skip
            try:
                yield from batches.read(epoch, skip)
            except GeneratorExit:  # the loop was left early: for the script this epoch is over
                self._lengths[epoch] = self._used_by[number] + self._drawn.count(number) - before
                raise
            if length is None:
                if batches.counted() == 0 and epochs.stop == sys.maxsize:
                    raise JobError(
                        f"shard: worker {self._worker} has no batch in a training epoch; with epochs = None each "
                        "worker needs at least one"
                    )
                self._lengths[epoch] = batches.counted()
                self._have_skipped(number, min(0, batches.counted() - skip))
                self._say(batches.ended())

    def _n_in_step(self, batches: Ordered, n_epochs: int) -> tuple[int, int]:
        """Return the iterations of all workers in so many training epochs, and the batches that are left out."""
        return divmod(n_epochs * whole_batches(batches.batch_size, batches.size), len(self._job.takers))

    def _batches_in_step(self, data: Any, batches: Source, epochs: range, number: int) -> Iterator[Batch]:
        """Yield equally many batches on all workers: an incomplete last iteration is left out."""
        assert isinstance(batches, Ordered)
        n_iterations, n_left_out = self._n_in_step(batches, len(epochs))
        if n_left_out and epochs.stop < sys.maxsize:
            n_batches = n_iterations * len(self._job.takers) + n_left_out
            self._say(
                f"{n_left_out} of {n_batches} batches are left out at the end of the loop, because all workers make "
                "equally many iterations"
            )
        skip = self._to_skip(number)
        if skip >= n_iterations:
            self._have_skipped(number, n_iterations)
            return
        n_left = min(n_iterations - skip, sys.maxsize)
        if self._takes:
            yield from islice(self._batches(data, batches, epochs, number), n_left)
        else:
            self._have_skipped(number, skip)
            yield from repeat((batches.batch_size * len(self._job.groups.served(self._worker)), ()), n_left)
