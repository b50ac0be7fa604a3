"""State of a process's global random generators, from which models, losses and data sets may draw."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from hpcsync.state import built, plain


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
