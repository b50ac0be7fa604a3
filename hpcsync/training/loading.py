"""The batches of one worker, from a data set or a data loader as the script has it.

Four kinds of data are told apart (`source`):

- a data set with ``len(data)`` and ``data[i]``, and a data loader with torch's default samplers: the batches are those
  of `hpcsync.training.sampler`, and only the worker's own are loaded;
- a data loader with a sampler or batch sampler of the script: every worker draws the same batches of indices from it,
  and loads batch j if j mod P is its number among P workers;
- data that can only be read from the beginning: every worker reads all batches and uses every P-th;
- data of which every worker has another part already (`sharded`): the worker uses all batches.

Where a sampler or iterable data draw from the global random generators, they draw from generators that are seeded for
them: all workers draw the same batches, and each worker others if its data are its own.
"""

from __future__ import annotations

import random
import warnings
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter

from hpcsync.config.errors import JobError, shown
from hpcsync.planning.checks import is_whole
from hpcsync.training.sampler import batch_indices, fetch, n_batches, sequence_indices, whole_batches

STREAM, PROCESSES_STREAM = 7, 8  # random streams of a job's seed

T = TypeVar("T")
Batch = tuple[int, Any]  # number of samples, and what the script gets
Load = Callable[[Iterable[Any], int], Iterator[Batch]]  # loads batches given by their indices, of a training epoch
Settings = Callable[[DataLoader[Any]], Mapping[str, Any]]
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


# ---- data with indices, in the job's order ----


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


# ---- data in the order of the script ----


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
                self._note(epoch, _numbers_of(batch if self._load is not None else _first_array(batch)))
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


# ---- what the script gave ----


def refuse(data: Any, batch_size: int | None, *, sharded: bool = False) -> None:
    """Raise if `shard` cannot use these data.

    Raises
    ------
    JobError
        If so; the message says what to give instead.
    """
    name = type(data).__name__
    if isinstance(data, _BaseDataLoaderIter):  # may have drawn its order by now, on each worker another
        raise JobError("shard: the iterator of a DataLoader was given: give the DataLoader itself")
    if isinstance(data, Mapping):
        first = next(iter(data), "train")
        raise JobError(f"shard: a {name} is several data sets: give one of them, such as data[{first!r}]")
    if isinstance(data, DataLoader):
        if batch_size is not None:
            raise JobError(f"shard: batch_size = {batch_size}: must be left out with a DataLoader, which has its own")
        if not sharded and (divided := next(filter(_is_divided, _samplers(data)), None)) is not None:
            kind = type(divided).__name__
            raise JobError(f"shard: a {kind} has a part for each process already: leave it out, or give sharded=True")
    elif not (_has_indices(data) or isinstance(data, Iterable) or data is None):
        raise JobError(
            f"shard: a {name} is no data: give a data set, a DataLoader, or an iterable of batches, such as "
            "iter(draw_batch, None) for a function"
        )
    elif batch_size is None and (_has_indices(data) or isinstance(data, IterableDataset) or data is None):
        raise JobError("shard: batch_size: must be given with a data set")
    if batch_size is not None and not (is_whole(batch_size) and batch_size >= 1):
        value = batch_size.item() if isinstance(batch_size, np.generic) else batch_size
        raise JobError(f"shard: batch_size = {shown(value)}: must be a whole number of at least 1")


def set_epoch(data: Any, epoch: int) -> None:
    """Tell data set and samplers the training epoch, if they have `set_epoch`."""
    for each in [data.dataset, *_samplers(data)] if isinstance(data, DataLoader) else [data]:
        if hasattr(each, "set_epoch"):
            each.set_epoch(epoch)


def source(
    data: Any,
    batch_size: int | None,
    part: Part,
    *,
    sharded: bool = False,
    settings: Settings = lambda loader: {},
    at_once: bool = False,
    note: Note = lambda epoch, numbers: None,
) -> Source:
    """Return the worker's batches of a data set or data loader.

    Parameters
    ----------
    data
        What the script gave.
    batch_size
        Samples of a batch; for a data set only.
    part
        Part of the worker.
    sharded
        True if the data are a part of the worker's own already.
    settings
        Returns the arguments with which a data loader starts its processes.
    at_once
        True if a batch is known only when it is requested, so that none can be loaded in advance.
    note
        Takes, in a training epoch that is read, numbers that are alike on all workers if their data are.

    Raises
    ------
    JobError
        If the data cannot be used (`refuse`), or not in this way.
    """
    refuse(data, batch_size, sharded=sharded)
    number, stream = part.worker, (part.seed, STREAM, *([part.worker] if sharded else []))
    if sharded:
        part, note = Part(part.seed, 0, 1), lambda epoch, numbers: None
    if not isinstance(data, DataLoader) and _has_indices(data):
        assert batch_size is not None
        _refuse_too_large(batch_size, len(data), at_once=at_once)
        first = partial(fetch, data, np.zeros(1, np.int64))
        return Ordered(len(data), batch_size, part, _noted(partial(_fetched, data), data, note), first)
    if not isinstance(data, DataLoader) and batch_size is not None:
        data = DataLoader(data if isinstance(data, IterableDataset) else _Wrapped(data), batch_size)
    if at_once and not (_is_torchs(data) and _is_default(data) and data.batch_sampler is not None):
        raise JobError(
            "shard: batches of allocated sizes need samples with indices in the run's order: give a data set with "
            "len(data) and data[i], or a DataLoader of one, with a batch_size and without samplers of your own"
        )
    if not _is_torchs(data):
        return Read(lambda epoch: _sized(with_generators(data, *stream, epoch)), part, 0, sharded=sharded, note=note)
    is_iterable, batches = isinstance(data.dataset, IterableDataset), data.batch_sampler
    seed = (_seed(data, part), number if sharded or not is_iterable else 0)
    loader = _Loader(data, seed, _processes(data, settings, at_once=at_once))
    if is_iterable:
        return Read(partial(_read, loader, stream), part, _batch_size(data), sharded=sharded, note=note)
    if not _is_default(data):
        sampler = data.sampler if batches is None else batches
        draw = partial(with_generators, sampler, *stream)
        return Read(draw, part, _batch_size(data), loader.load, note=note)
    _refuse_too_large(data.batch_size or 1, len(data.dataset), at_once=at_once)
    return Ordered(
        len(data.dataset),
        data.batch_size or 1,
        part,
        _noted(loader.load_indices if batches is not None else loader.load_items, data.dataset, note),
        lambda: data.collate_fn([data.dataset[0]] if batches is not None else data.dataset[0]),
        shuffled=type(data.sampler) is RandomSampler,
        drops_last=data.drop_last,
    )


def _noted(load: Callable[[Iterable[np.ndarray], int], Iterator[Batch]], data: Any, note: Note) -> Load:
    """Return a function that loads batches and notes what the data are."""
    numbers: list[float] = []

    def load_and_note(batches: Iterable[np.ndarray], epoch: int) -> Iterator[Batch]:
        numbers[:] = numbers or _numbers_of_data(data)
        note(epoch, numbers)
        return load(batches, epoch)

    return load_and_note


def _numbers_of_data(data: Any) -> list[float]:
    """Return numbers that tell a data set from others, as far as they are known without loading a sample."""
    found = [float(len(data))]
    if isinstance(data, Subset):
        found += [float(zlib.crc32(np.asarray(data.indices).tobytes())), *_numbers_of_data(data.dataset)]
    elif isinstance(data, TensorDataset):
        found += [*_numbers_of(data.tensors[0]), *_numbers_of(data.tensors[0][-1:])]
    return found


def _numbers_of(values: Any) -> list[float]:
    """Return the mean of the first of some values: samples, or indices of samples; nothing if they are no numbers."""
    try:
        first = values if isinstance(values, int) or getattr(values, "ndim", 1) == 0 else values[:1]
        return [float(torch.as_tensor(first).double().mean())]
    except (TypeError, ValueError, RuntimeError, LookupError):
        return []


def _refuse_too_large(batch_size: int, size: int, *, at_once: bool) -> None:
    """Raise JobError if there is no whole batch, unless the sizes of batches are allocated."""
    if not at_once and batch_size > size:
        raise JobError(
            f"shard: batch_size = {batch_size}: must be 1 to {size}, the samples of the data set: "
            "whole batches are used"
        )


def _has_indices(data: Any) -> bool:
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, IterableDataset)


def _samplers(loader: DataLoader[Any]) -> list[Any]:
    """Return the samplers of a data loader, and those that they hold."""
    found = [loader.sampler, loader.batch_sampler]
    for each in found:  # which grows
        held = getattr(each, "__dict__", {}).values()
        found += [value for value in held if isinstance(value, Sampler) and all(value is not other for other in found)]
    return found


def _is_divided(sampler: Any) -> bool:
    """Return whether a sampler draws one part of several."""
    n_parts = getattr(sampler, "num_replicas", 1)  # of samplers like torch's, too
    return is_whole(n_parts) and n_parts > 1


def _is_torchs(data: Any) -> bool:
    """Return whether this is a data loader that iterates as torch's does."""
    own = ("__iter__", "_get_iterator")
    return isinstance(data, DataLoader) and all(getattr(type(data), name) is getattr(DataLoader, name) for name in own)


def _is_default(loader: DataLoader[Any]) -> bool:
    """Return whether a data loader uses every sample once, in order or shuffled, in batches of one size."""
    sampler, batches = loader.sampler, loader.batch_sampler
    if batches is not None and (type(batches) is not BatchSampler or batches.sampler is not sampler):
        return False
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
    return type(sampler) is SequentialSampler and len(sampler) == len(loader.dataset)  # type: ignore[arg-type]


def _batch_size(loader: DataLoader[Any]) -> int:
    found = loader.batch_size or getattr(loader.batch_sampler, "batch_size", 0)
    return found if isinstance(found, int) else 0


def _seed(loader: DataLoader[Any], part: Part) -> int:
    return part.seed if loader.generator is None else loader.generator.initial_seed()


def _processes(loader: DataLoader[Any], settings: Settings, *, at_once: bool) -> Mapping[str, Any]:
    """Return the arguments of a data loader about its processes."""
    if loader.num_workers == 0 or at_once:
        return {}
    return {
        "num_workers": loader.num_workers,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
        "timeout": loader.timeout,
        "multiprocessing_context": loader.multiprocessing_context,
        "worker_init_fn": loader.worker_init_fn,
        **settings(loader),
    }


def _fetched(data: Any, batches: Iterable[np.ndarray], _: int) -> Iterator[Batch]:
    return ((len(indices), fetch(data, indices)) for indices in batches)


def _read(loader: _Loader, stream: tuple[int, ...], epoch: int) -> Iterator[Batch]:
    batches = loader.load((), epoch)
    return with_generators(batches, *stream, epoch) if loader.in_this_process else batches


# ---- data loaders ----


class _Loader:
    """A data loader like the script's, with batches as requested.

    Parameters
    ----------
    like
        The script's data loader.
    seed
        Seed of the processes, with the number of the worker.
    processes
        Arguments about its processes.
    """

    def __init__(self, like: DataLoader[Any], seed: tuple[int, int], processes: Mapping[str, Any]) -> None:
        self._seed, self._n_processes = seed, processes.get("num_workers", 0)
        self._generator, self._plan = torch.Generator(), _Plan()
        self._counts = like.batch_sampler is not None
        settings = {
            "collate_fn": _Counted(like.collate_fn) if self._counts else like.collate_fn,
            "pin_memory": like.pin_memory,
            "generator": self._generator,
            **processes,
        }
        if isinstance(like.dataset, IterableDataset):
            settings |= {"batch_size": like.batch_size, "drop_last": like.drop_last}
        else:
            settings |= {"batch_sampler": self._plan} if self._counts else {"batch_size": None, "sampler": self._plan}
        self._loader: DataLoader[Any] = DataLoader(like.dataset, **settings)

    @property
    def in_this_process(self) -> bool:
        """True if there are no other processes."""
        return self._n_processes == 0

    def load(self, plan: Iterable[Any], epoch: int) -> Iterator[Batch]:
        """Yield the batches of a plan: what a sampler of the data loader yields."""
        self._plan.entries = plan
        seed = np.random.SeedSequence([self._seed[0], PROCESSES_STREAM, self._seed[1], epoch])
        self._generator.manual_seed(int(seed.generate_state(1)[0]))
        batches = self._begin()
        return batches if self._counts else _sized(batches)

    def load_indices(self, plan: Iterable[np.ndarray], epoch: int) -> Iterator[Batch]:
        """Yield batches given by arrays of indices."""
        return self.load((indices.tolist() for indices in plan), epoch)

    def load_items(self, plan: Iterable[np.ndarray], epoch: int) -> Iterator[Batch]:
        """Yield items, which are batches, each given by an array of one index."""
        return self.load((int(index) for (index,) in plan), epoch)

    def _begin(self) -> Iterator[Any]:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Got pickle error")
                return iter(self._loader)
        except Exception as error:
            if self.in_this_process or isinstance(error, OSError | RuntimeError):
                raise
            raise JobError(
                f"shard: num_workers = {self._n_processes}: data set, collate_fn and worker_init_fn must be picklable, "
                f"because they go to other processes: {error}"
            ) from None


class _Plan(Sampler[Any]):
    """A sampler that yields what it is given."""

    def __init__(self) -> None:
        self.entries: Iterable[Any] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.entries)


class _Counted:
    """A `collate_fn` that also returns the number of samples."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any]) -> Batch:
        return len(samples), self._collate(samples)


class _Wrapped(IterableDataset[Any]):
    """An iterable of another library as torch's kind of data set."""

    def __init__(self, data: Iterable[Any]) -> None:
        self._data = data

    def __iter__(self) -> Iterator[Any]:
        return iter(self._data)


_CallsAFunction = type(iter(int, None))


def _sized(batches: Iterable[Any]) -> Iterator[Batch]:
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


def different_data(read: Iterable[Mapping[int, tuple[int, list[float]]]]) -> str:
    """Return a line if workers have read different data where all should read the same; "" if there is none.

    Parameters
    ----------
    read
        For each worker, by loader, the first training epoch that it has read and what was noted of it (`source`).
    """
    first: dict[tuple[int, int], list[float]] = {}
    for loader, (epoch, numbers) in (item for each in read for item in each.items()):
        other = first.setdefault((loader, epoch), numbers)
        if len(other) != len(numbers) or not np.allclose(other, numbers, rtol=1e-4, equal_nan=True):
            return (
                "shard: the workers have read different data, of which each has used only its share of the batches; "
                "all must read the same, or data that are a worker's own part must be given with sharded=True"
            )
    return ""


# ---- random numbers ----


def with_generators(items: Iterable[T], *seed: int) -> Iterator[T]:
    """Yield from an iterable whose global random generators are its own while it runs.

    Parameters
    ----------
    items
        Iterable that may draw from the generators of Python, NumPy and torch (CPU).
    *seed
        Seed of its generators.
    """
    python, numpy, torchs = (int(each) for each in np.random.SeedSequence(seed).generate_state(3))
    outside = _generators()
    random.seed(python)
    np.random.seed(numpy)
    torch.random.default_generator.manual_seed(torchs)
    own, iterator = _generators(), None
    _set_generators(outside)
    while True:
        outside = _generators()
        _set_generators(own)
        try:
            iterator = iter(items) if iterator is None else iterator
            item = next(iterator)
        except StopIteration:
            return
        except ValueError as error:
            of_comparison = error.__traceback__ is not None and error.__traceback__.tb_next is None
            if isinstance(iterator, _CallsAFunction) and of_comparison:
                raise JobError(
                    "shard: iter(function, None) compares each batch with None, which an array does not allow: let the "
                    "function return a tensor, or a tuple of arrays"
                ) from None
            raise
        finally:
            own = _generators()
            _set_generators(outside)
        yield item


def _generators() -> tuple[Any, Any, torch.Tensor]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _set_generators(states: tuple[Any, Any, torch.Tensor]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
