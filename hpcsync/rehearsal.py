"""Which kinds of windows serve a GPU's tensors on this machine: tried in a child job, because trying may crash or hang.

MPI library, driver, GPUs and containers all have a say in it, and none of them can be asked reliably. So two ranks of
this node make a transfer there and back, and compare every element (`mpi.placement.attempt`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from hpcsync import launcher, probes

ON_A_NODE = ("staged", "ipc", "mpi")  # tried in this order: the last one is likeliest to crash


class Trial(NamedTuple):
    """Of one kind of window: how long 4 MB took there and back (infinitely long if it was not tried), and what else is
    to be said; or what went wrong."""

    kind: str
    took_s: float | None = None
    failure: str = ""
    note: str = ""


def rehearse(kinds: Sequence[str] = ON_A_NODE) -> list[Trial]:
    """Try these kinds together in one child job; where that fails, each in its own."""
    try:
        return [Trial(**trial) for trial in probes.probe("windows", *kinds, ranks=2)["trials"]]
    except launcher.LaunchError:
        return [Trial(kinds[0], math.inf)]  # then it has to prove itself in the run: what was asked for, or the safest
    except probes.ProbeError as error:
        if len(kinds) == 1:
            return [Trial(kinds[0], failure=str(error))]
        return [trial for kind in kinds for trial in rehearse([kind])]


def fastest(trials: Sequence[Trial]) -> str | None:
    """The kind to use; None if all have failed."""
    served = [(trial.took_s, trial.kind) for trial in trials if trial.took_s is not None]
    return min(served)[1] if served else None


def reason(trials: Sequence[Trial], kind: str | None = None) -> str:
    """What was found out, in one line; first about the kind that was chosen."""
    return "; ".join(map(_said, sorted(trials, key=lambda trial: trial.kind != kind)))


def _said(trial: Trial) -> str:
    if trial.took_s is None:
        return f"{trial.kind}: {trial.failure}"
    if trial.took_s == math.inf:
        return f"{trial.kind}: not compared with others, there is no launcher for a child job"
    return f"{trial.kind}: 4 MB there and back in {1e3 * trial.took_s:.2f} ms" + f" ({trial.note})" * bool(trial.note)
