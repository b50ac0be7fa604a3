"""Which kinds of windows serve a GPU's tensors on this machine: tried in a child job, because trying may crash or hang.

MPI library, driver, GPUs and containers all have a say in it, and none of them can be asked reliably. So two ranks of
this node make a transfer there and back (`mpi.attempt`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from hpcsync.mpi.transport import subprocess_probe
from hpcsync.system import launcher

ON_A_NODE = ("staged", "ipc", "mpi")  # tried in this order: the last one is likeliest to crash


class WindowTrial(NamedTuple):
    """Of one kind of window: how long 4 MB took there and back (infinitely long if it was not tried), and what else is
    to be said; or what went wrong."""

    kind: str
    took_s: float | None = None
    failure: str = ""
    note: str = ""


def rehearse(kinds: Sequence[str] = ON_A_NODE) -> list[WindowTrial]:
    """Try these kinds together in one child job; where that fails, each in its own.

    Where none can be started, the first kind is left to prove itself in the run.
    """
    found = _tried(kinds)
    if fastest(found) is None and not _child_jobs_run():
        return [WindowTrial(kinds[0], math.inf)]
    return found


def serving(found: Sequence[WindowTrial]) -> list[str]:
    """The kinds that serve, the fastest first."""
    return [kind for _, kind in sorted((one.took_s, one.kind) for one in found if one.took_s is not None)]


def fastest(found: Sequence[WindowTrial]) -> str | None:
    """The kind to use; None if all have failed."""
    return next(iter(serving(found)), None)


def reason(found: Sequence[WindowTrial], kind: str | None = None) -> str:
    """What was found out, in one line; first about the kind that was chosen."""
    return "; ".join(map(_said, sorted(found, key=lambda one: one.kind != kind)))


def _tried(kinds: Sequence[str]) -> list[WindowTrial]:
    try:
        return [WindowTrial(*one) for one in subprocess_probe.probe("windows", *kinds, ranks=2)["windows"]]
    except (subprocess_probe.ProbeError, launcher.LaunchError) as error:
        if len(kinds) == 1:
            return [WindowTrial(kinds[0], failure=str(error))]
        return [one for kind in kinds for one in _tried([kind])]


def _child_jobs_run() -> bool:
    try:
        return bool(subprocess_probe.probe("world", ranks=2)["size"] == 2)
    except (subprocess_probe.ProbeError, launcher.LaunchError):
        return False


def _said(one: WindowTrial) -> str:
    if one.took_s is None:
        return f"{one.kind}: {one.failure}"
    if one.took_s == math.inf:
        return f"{one.kind}: not compared with others, no child job could be started"
    return f"{one.kind}: 4 MB there and back in {1e3 * one.took_s:.2f} ms" + f" ({one.note})" * bool(one.note)
