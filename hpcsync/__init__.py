"""Train PyTorch models under any synchronisation paradigm, and measure what each one costs.

`connect` makes a training script a rank of a run, on the device that `device` returns. `Workload` is what a function
named in a job file returns. `record` records a loop that trains with DistributedDataParallel. `load_trace` reads the
trace of a run, given its folder or its trace.h5.

Importing hpcsync loads neither MPI, torch, CuPy nor h5py; they are loaded when one of these names is first used. On a
rank that has imported torch before, it keeps the optimizers of the script from loading torch's compiler, which takes a
second or two, until that is used (`hpcsync.training.deferred_dynamo`).
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from hpcsync.version import __version__ as __version__

if TYPE_CHECKING:
    from hpcsync.api.connect import connect as connect
    from hpcsync.api.connect import device as device
    from hpcsync.api.recording import record as record
    from hpcsync.trace.reader import load as load_trace
    from hpcsync.workloads.registry import Workload as Workload

_HOMES = {
    "connect": ("hpcsync.api.connect", "connect"),
    "device": ("hpcsync.api.connect", "device"),
    "record": ("hpcsync.api.recording", "record"),
    "Workload": ("hpcsync.workloads.registry", "Workload"),
    "load_trace": ("hpcsync.trace.reader", "load"),
}
__all__ = ["Workload", "__version__", "connect", "device", "load_trace", "record"]

if "torch" in sys.modules and import_module("hpcsync.system.rank_environment").under_launcher():
    import_module("hpcsync.training.deferred_dynamo").defer()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(import_module(module), attribute)
