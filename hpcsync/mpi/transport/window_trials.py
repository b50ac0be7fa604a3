"""Trials of the kinds of windows for GPU tensors, in a child job because a trial may crash or hang.

MPI library, driver, GPUs and containers all determine which kinds work, and none of them can be queried reliably. Two
ranks of this node therefore make a round trip (`window_test.attempt`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from hpcsync.mpi.transport import subprocess_probe
from hpcsync.system import launcher

ON_A_NODE = ("staged", "ipc", "mpi")  # tried in this order: the last one is the likeliest to crash


class WindowTrial(NamedTuple):
    """Result of the trial of one kind of window.

    Attributes
    ----------
    kind : str
        Kind of window.
    took_s : float or None
        Duration of an 8 MB round trip, in seconds; infinite if it was not tried, None if it failed.
    failure : str
        Reason of the failure, "" without one.
    note : str
        Remark for the user, "" if there is none.
    """

    kind: str
    took_s: float | None = None
    failure: str = ""
    note: str = ""


def rehearse(kinds: Sequence[str] = ON_A_NODE) -> list[WindowTrial]:
    """Try the kinds in one child job; if one fails there, those after it in another job.

    If no child job can be started, only the first kind is returned, untried: the run itself will show if it works.
    """
    found = _try_kinds(kinds)
    if fastest(found) is None and not _child_jobs_run():
        return [WindowTrial(kinds[0], math.inf)]
    return found


def serving(found: Sequence[WindowTrial]) -> list[str]:
    """Return the kinds that work, the fastest first."""
    return [kind for _, kind in sorted((one.took_s, one.kind) for one in found if one.took_s is not None)]


def fastest(found: Sequence[WindowTrial]) -> str | None:
    """Return the kind to use, or None if all failed."""
    return next(iter(serving(found)), None)


def reason(found: Sequence[WindowTrial], kind: str | None = None) -> str:
    """Return the results in one line, those of the chosen kind first."""
    return "; ".join(map(_describe, sorted(found, key=lambda one: one.kind != kind)))


def _try_kinds(kinds: Sequence[str]) -> list[WindowTrial]:
    try:
        found, failure = subprocess_probe.probe("windows", *kinds, ranks=2), ""
    except subprocess_probe.ProbeError as error:
        found, failure = error.found, str(error)
    except launcher.LaunchError as error:
        return [WindowTrial(kind, failure=str(error)) for kind in kinds]
    trials = [WindowTrial(*one) for one in found.get("windows", ())]
    if not failure:
        return trials
    n = min(len(trials), len(kinds) - 1)  # a crash after the last trial is held against that kind
    failed, *rest = kinds[n:]
    return [*trials[:n], WindowTrial(failed, failure=failure), *(_try_kinds(rest) if rest else ())]


def _child_jobs_run() -> bool:
    try:
        return bool(subprocess_probe.probe("world", ranks=2)["size"] == 2)
    except (subprocess_probe.ProbeError, launcher.LaunchError):
        return False


def _describe(one: WindowTrial) -> str:
    if one.took_s is None:
        return f"{one.kind}: {one.failure}"
    if one.took_s == math.inf:
        return f"{one.kind}: not compared with others, no child job could be started"
    return f"{one.kind}: 8 MB there and back in {1e3 * one.took_s:.2f} ms" + f" ({one.note})" * bool(one.note)
