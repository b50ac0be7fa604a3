"""Sources of the batches of one worker: data with indices in the job's order, and data in the order of the script."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from hpcsync.config.errors import JobError
from hpcsync.training.sampler import batch_indices, n_batches, sequence_indices, whole_batches

T = TypeVar("T")
Batch = tuple[int, Any]  # number of samples, and what the script gets
Load = Callable[[Iterable[Any], int], Iterator[Batch]]  # loads batches given by their indices, of a training epoch
Note = Callable[[int, list[float]], None]  # takes a training epoch, and numbers that are alike where its data are


class Part(NamedTuple):
    """The part of one worker.

    Attributes
    ----------
    seed
        The job's seed.
    worker, n_workers
        Number of the worker among those that use batches, and how many they are.
    """

    seed: int
    worker: int
    n_workers: int

    def of(self, n_batches: int) -> int:
        """Return how many of so many batches the worker uses."""
        return len(range(self.worker, n_batches, self.n_workers))

    def uneven(self, n_batches: int) -> str | None:
        """Return which workers use one of so many batches more than the others; None if there are none."""
        if not (n_more := n_batches % self.n_workers):
            return None
        who = "worker 0 uses" if n_more == 1 else f"workers 0 to {n_more - 1} use"
        return f"{n_batches} batches in a training epoch for {self.n_workers} workers: {who} one more than the others"


class Source(ABC):
    """Batches of one worker.

    Attributes
    ----------
    batch_size
        Samples of a batch; 0 where it is not known beforehand.
    """

    batch_size = 0

    @abstractmethod
    def read(self, epoch: int, skip: int = 0) -> Iterator[Batch]:
        """Yield the worker's batches of a training epoch, without the first `skip` ones."""

    def length(self, epoch: int) -> int | None:
        """Return the number of the worker's batches in a training epoch; None if only reading tells it."""
        return None

    def pass_over(self, epoch: int) -> None:
        """Do as if a training epoch had been read, all of which was used before the run was resumed."""
        return

    def notice(self) -> str | None:
        """Return what the user should know of the division into batches, before they are read."""
        return None

    def counted(self) -> int:
        """Return the number of the worker's batches in the training epoch that has been read to its end."""
        raise NotImplementedError

    def ended(self) -> str | None:
        """Return what the user should know of the training epoch that has been read to its end."""
        return None


class Ordered(Source):
    """Data with indices, in the job's order.

    Parameters
    ----------
    size
        Samples of the data.
    batch_size
        Samples of a batch.
    part
        Part of the worker.
    load
        Loads batches, each given by an array of indices.
    first
        Returns a batch of the first sample.
    shuffled
        False: the samples are used in their own order.
    drops_last
        True if the script wants the samples of an incomplete last batch to be left out.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        part: Part,
        load: Load,
        first: Callable[[], Any],
        *,
        shuffled: bool = True,
        drops_last: bool = False,
    ) -> None:
        self.size, self.batch_size, self.first = size, batch_size, first
        self._part, self._load, self._drops_last = part, load, drops_last
        self._seed = part.seed if shuffled else None

    def length(self, epoch: int) -> int:
        """Return the number of the worker's batches in a training epoch."""
        epochs = range(epoch, epoch + 1)
        worker, n_workers = self._part.worker, self._part.n_workers
        return n_batches(worker, n_workers=n_workers, batch_size=self.batch_size, size=self.size, epochs=epochs)

    def read(self, epoch: int, skip: int = 0) -> Iterator[Batch]:
        """Yield the worker's batches of a training epoch, without the first `skip` ones."""
        per_epoch, n_workers = whole_batches(self.batch_size, self.size), self._part.n_workers
        begin = epoch * per_epoch
        first = begin + (self._part.worker - begin) % n_workers + skip * n_workers
        numbers = range(first, begin + per_epoch, n_workers)
        sizes = {"batch_size": self.batch_size, "size": self.size}
        return self._load((batch_indices(self._seed, number, **sizes) for number in numbers), epoch)

    def allocated(self, allocated: Callable[[], tuple[int, int]], epochs: range) -> Iterator[Batch]:
        """Yield batches of the sizes that are allocated, each only when it is requested.

        A batch that extends over the end of a training epoch belongs to the epoch in which it begins.

        Parameters
        ----------
        allocated
            Returns position and number of the next batch's samples in the run's endless sequence.
        epochs
            Training epochs.
        """

        def indices() -> Iterator[np.ndarray]:
            while True:
                first, n_samples = allocated()
                if first >= epochs.stop * self.size:
                    return
                yield sequence_indices(self._seed, first, n_samples, size=self.size)

        return self._load(indices(), epochs.start)

    def notice(self) -> str | None:
        """Return how many samples are left out."""
        n_left_out = self.size - whole_batches(self.batch_size, self.size) * self.batch_size
        if not n_left_out or self._drops_last:
            return None
        return (
            f"{n_left_out} of {self.size} samples are left out in each training epoch, because whole batches of "
            f"{self.batch_size} are used"
        )


class Read(Source):
    """Data that are read from the beginning, or loaded by the indices that a sampler of the script draws.

    Parameters
    ----------
    read
        Returns an iterator over all batches of a training epoch, or over what the sampler yields: batches of indices,
        or single items that are batches, the same on all workers.
    part
        Part of the worker.
    batch_size
        Samples of a batch; 0 if it is not known.
    load
        Loads batches, each given by what the sampler yields; None without a sampler.
    sharded
        True if the data of other workers are others.
    note
        Takes what tells the first batch of a training epoch from others.
    """

    def __init__(
        self,
        read: Callable[[int], Iterator[Any]],
        part: Part,
        batch_size: int,
        load: Load | None = None,
        *,
        sharded: bool = False,
        note: Note = lambda epoch, numbers: None,
    ) -> None:
        self._read, self._part, self.batch_size, self._load, self._sharded = read, part, batch_size, load, sharded
        self._n_read, self._note = 0, note

    def _count(self, batches: Iterable[T], epoch: int) -> Iterator[T]:
        self._n_read = 0
        for batch in batches:
            if self._n_read == 0:
                self._note(epoch, sample_numbers(batch if self._load is not None else _first_array(batch)))
            self._n_read += 1
            yield batch

    def read(self, epoch: int, skip: int = 0) -> Iterator[Batch]:
        """Yield the worker's batches of a training epoch; the first `skip` ones are read or drawn, but not used."""
        worker, n_workers = self._part.worker, self._part.n_workers
        own = islice(self._count(self._read(epoch), epoch), worker + skip * n_workers, None, n_workers)
        return own if self._load is None else self._load(own, epoch)

    def pass_over(self, epoch: int) -> None:
        """Let the sampler draw, because it may have a generator of its own."""
        for _ in () if self._load is None else self._read(epoch):
            pass

    def counted(self) -> int:
        """Return the number of the worker's batches in the training epoch that has been read to its end."""
        return self._part.of(self._n_read)

    def ended(self) -> str | None:
        """Return which workers use a batch more than the others, or that workers do not end together."""
        if self._sharded:
            return f"worker 0's data ended after {self._n_read} batches; those of others may end earlier or later"
        return self._part.uneven(self._n_read)


def sized(batches: Iterable[Any]) -> Iterator[Batch]:
    """Yield each batch with its number of samples."""
    return ((n_samples(batch), batch) for batch in batches)


def n_samples(batch: Any) -> int:
    """Return the number of samples in a batch: the length of its first tensor or array.

    Raises
    ------
    JobError
        If there is none.
    """
    if (found := _first_array(batch)) is None:
        raise JobError(
            f"shard: a batch that is a {type(batch).__name__} without a tensor has no number of samples: "
            "give a DataLoader with a batch_size"
        )
    return int(found.shape[0])


def _first_array(batch: Any) -> Any:
    """Return the first tensor or array in a batch; None if there is none."""
    if hasattr(batch, "shape"):
        return batch if len(batch.shape) else None
    if isinstance(batch, Mapping):
        parts: Iterable[Any] = batch.values()
    elif isinstance(batch, list | tuple):
        parts = batch
    else:
        parts = vars(batch).values() if hasattr(batch, "__dict__") else ()
    return next((found for part in parts if (found := _first_array(part)) is not None), None)


def sample_numbers(values: Any) -> list[float]:
    """Return the mean of the first of some values: samples, or indices of samples; nothing if they are no numbers."""
    try:
        first = values if isinstance(values, int) or getattr(values, "ndim", 1) == 0 else values[:1]
        return [float(torch.as_tensor(first).double().mean())]
    except (TypeError, ValueError, RuntimeError, LookupError):
        return []
