"""Train PyTorch models under any synchronisation paradigm, and see what each one costs.

`connect` makes a training script a rank of a run, on the device that `device` gives it.

Importing this loads neither MPI, torch, CuPy nor h5py: a training script gets them when it asks for what needs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcsync.api.connect import connect as connect
    from hpcsync.api.connect import device as device

__version__ = "0.1.0"
__all__ = ["__version__", "connect", "device"]


def __getattr__(name: str) -> Any:
    if name in ("connect", "device"):
        from hpcsync.api import connect as library

        return getattr(library, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
