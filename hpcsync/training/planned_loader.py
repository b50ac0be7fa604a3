"""A data loader like one of the script's, with other processes and with batches as they are requested."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from hpcsync.config.errors import JobError
from hpcsync.training.batch_sources import Batch, sized

PROCESSES_STREAM = 8  # random stream of a job's seed


class PlannedLoader:
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
        return batches if self._counts else sized(batches)

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
