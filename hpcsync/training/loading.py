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

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
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
from hpcsync.training.batch_sources import Batch, Load, Note, Ordered, Part, Read, Source, sample_numbers, sized
from hpcsync.training.planned_loader import PlannedLoader
from hpcsync.training.rng_state import with_generators
from hpcsync.training.sampler import fetch

STREAM = 7  # random stream of a job's seed

Settings = Callable[[DataLoader[Any]], Mapping[str, Any]]


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
        return Read(
            lambda epoch: sized(with_generators(_batches_of(data), *stream, epoch)), part, 0, sharded=sharded, note=note
        )
    is_iterable, batches = isinstance(data.dataset, IterableDataset), data.batch_sampler
    seed = (_seed(data, part), number if sharded or not is_iterable else 0)
    loader = PlannedLoader(data, seed, _processes(data, settings, at_once=at_once))
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
        found += [*sample_numbers(data.tensors[0]), *sample_numbers(data.tensors[0][-1:])]
    return found


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


def _read(loader: PlannedLoader, stream: tuple[int, ...], epoch: int) -> Iterator[Batch]:
    batches = loader.load((), epoch)
    return with_generators(batches, *stream, epoch) if loader.in_this_process else batches


_CallsAFunction = type(iter(int, None))


def _batches_of(data: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches; refuse arrays from `iter(function, None)`."""
    batches = iter(data)
    try:
        for batch in batches:  # noqa: UP028 - `yield from` would close the script's iterator where its loop ends
            yield batch
    except ValueError as error:
        of_comparison = error.__traceback__ is not None and error.__traceback__.tb_next is None
        if isinstance(batches, _CallsAFunction) and of_comparison:
            raise JobError(
                "shard: iter(function, None) compares each batch with None, which an array does not allow: let the "
                "function return a tensor, or a tuple of arrays"
            ) from None
        raise


class _Wrapped(IterableDataset[Any]):
    """An iterable of another library as torch's kind of data set."""

    def __init__(self, data: Iterable[Any]) -> None:
        self._data = data

    def __iter__(self) -> Iterator[Any]:
        return iter(self._data)


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
