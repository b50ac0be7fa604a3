"""State of a process's global random generators, from which models, losses and data sets may draw."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def state(device: torch.device) -> dict[str, Any]:
    """Return the states of Python's, NumPy's and torch's generators, the latter also on this device."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def restore(states: dict[str, Any], device: torch.device) -> None:
    """Restore the states that `state` returned."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"].cpu())
    if states["cuda"] is not None:
        torch.cuda.set_rng_state(states["cuda"].cpu(), device)
