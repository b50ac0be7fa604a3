"""A process's global random generators, from which models, losses and data sets may draw: their state, and others."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from hpcsync.state import built, plain

T = TypeVar("T")


class Generators(NamedTuple):
    """States of the generators, as their modules return them; long sequences of numbers are arrays."""

    python: tuple[int, np.ndarray, float | None]
    numpy: tuple[str, np.ndarray, int, int, float]
    torch: torch.Tensor
    cuda: torch.Tensor | None


def state(device: torch.device) -> dict[str, Any]:
    """Return the states of Python's, NumPy's and torch's generators, the latter also on this device."""
    numpy: Any = np.random.get_state()
    name, key, *rest = numpy
    version, numbers, gauss = random.getstate()
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    saved: Any = (name, key.astype(np.int64), *rest)
    python = (version, np.array(numbers), gauss)
    states: dict[str, Any] = plain(Generators(python, saved, torch.get_rng_state(), cuda))
    return states


def restore(states: Mapping[str, Any], device: torch.device) -> None:
    """Restore the states that `state` returned; that of the GPU only on a GPU."""
    generators: Generators = built(Generators, states)
    version, numbers, python_gauss = generators.python
    random.setstate((version, tuple(numbers.tolist()), python_gauss))
    name, key, pos, has_gauss, gauss = generators.numpy
    np.random.set_state((name, key.astype(np.uint32), pos, has_gauss, gauss))
    torch.set_rng_state(generators.torch)
    if generators.cuda is not None and device.type == "cuda":
        torch.cuda.set_rng_state(generators.cuda, device)


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
