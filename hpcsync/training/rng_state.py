"""The generators of a process that a model, a loss or a data set may draw from without being given one."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def state(device: torch.device) -> dict[str, Any]:
    """Of Python's, NumPy's and torch's, the latter also on this device."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def restore(states: dict[str, Any], device: torch.device) -> None:
    """Let all of them go on from there."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"].cpu())
    if states["cuda"] is not None:
        torch.cuda.set_rng_state(states["cuda"].cpu(), device)
