"""Who may go on, when, and with what: the synchronisation paradigms as pure state machines.

`create` makes one by its name; `protocol` says what goes in and what comes out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpcsync.paradigms.adsp import ADSP
from hpcsync.paradigms.ashl import ASHL
from hpcsync.paradigms.asp import ASP
from hpcsync.paradigms.base import Paradigm
from hpcsync.paradigms.bsp import BSP
from hpcsync.paradigms.dssp import DSSP
from hpcsync.paradigms.easgd import elastic
from hpcsync.paradigms.events import (
    Accumulate,
    Action,
    Apply,
    Cancel,
    Decision,
    Drop,
    Event,
    Grant,
    Joined,
    Left,
    Pushed,
)
from hpcsync.paradigms.first_k import KAsync, KBatchAsync, KBatchSync, KSync
from hpcsync.paradigms.ssp import SSP

__all__ = [
    "PARADIGMS",
    "Accumulate",
    "Action",
    "Apply",
    "Cancel",
    "Decision",
    "Drop",
    "Event",
    "Grant",
    "Joined",
    "Left",
    "Paradigm",
    "Pushed",
    "create",
]

PARADIGMS: dict[str, Callable[..., Paradigm]] = {
    "bsp": BSP,
    "asp": ASP,
    "ssp": SSP,
    "dssp": DSSP,
    "easgd": elastic,
    "k-sync": KSync,
    "k-batch-sync": KBatchSync,
    "k-async": KAsync,
    "k-batch-async": KBatchAsync,
    "ashl": ASHL,
    "adsp": ADSP,
}


def create(name: str, n_workers: int, **options: Any) -> Paradigm:
    """Make the paradigm of this name for so many workers.

    options: ssp `staleness`; dssp `staleness_min`, `staleness_max`, `mode`; easgd `synchronous`; the k family `k`,
    `k_min`, `k_start`, and k-sync and k-batch-sync `cancel`, k-async and k-batch-async `staleness_max` and
    `staleness_weight`; ashl `steps_coarse`, `steps_fine`, `staleness`, `ratio_coarse`, `ratio_fine`, `loss_preset`,
    `plateau`, `share`, `warmup`, `profiled`; adsp `check_period_s`, `interval_min_s`, `search_every_s`, which are
    needed, `rule`, `commits`, `loss_rise`, `loss_target`; bsp and asp have none.

    Raises ValueError for an unknown name or a value that is not allowed, TypeError for an option that the
    paradigm does not have or that is missing.
    """
    if name not in PARADIGMS:
        raise ValueError(f"there is no paradigm {name!r}, only {', '.join(PARADIGMS)}")
    return PARADIGMS[name](n_workers, **options)
