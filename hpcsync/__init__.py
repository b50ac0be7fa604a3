"""Train PyTorch models under any synchronisation paradigm, and see what each one costs.

Importing this loads neither MPI, torch, CuPy nor h5py: a training script gets them when it asks for what needs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcsync.library import connect as connect

__version__ = "0.1.0"
__all__ = ["__version__", "connect"]


def __getattr__(name: str) -> Any:
    if name == "connect":
        from hpcsync.library import connect

        return connect
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
