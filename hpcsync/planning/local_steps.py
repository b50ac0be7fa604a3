"""Local steps between pushes, shares of the data and compression ratios of ASHL.

The worker that would finish last makes the fewest steps allowed and sends the smallest share of its push. The others
fill the time until then, first with steps, then with a larger share of the push. So workers behind slow links make
fewer steps, as slow workers do.

References
----------
Shen et al. (ASHL), IEEE Transactions on Computers 73(1), 2024, doi:10.1109/TC.2023.3315847: Algorithm 1 (`local_steps`,
`shares`) and Algorithm 2 (`ratios`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

INDEXED = 2.0  # cost of an element sent with its index, four bytes each


class WorkerProfile(NamedTuple):
    """Typical times of one worker in seconds, each at least 0.

    Attributes
    ----------
    iteration_s
        One local step.
    push_s
        Sending a whole push.
    pull_s
        Reading the weights.
    encode_s
        Compressing a push, at any ratio.
    """

    iteration_s: float
    push_s: float
    pull_s: float
    encode_s: float


def local_steps(profiles: Sequence[WorkerProfile], preset: int) -> list[int]:
    """Return the number of local steps H of each worker with which all take the same time (Algorithm 1).

    Parameters
    ----------
    profiles
        Times of each worker.
    preset
        H of the slowest worker, at least 1.

    Returns
    -------
    list of int
        Rounded to the nearest integer, halves up, so that no worker is off by more than half a step; at least `preset`.
        A worker whose steps take no time gets `preset`.
    """
    times_s = [(step_s, push_s + pull_s) for step_s, push_s, pull_s, _ in profiles]
    last_s = max([step_s * preset + comm_s for step_s, comm_s in times_s])
    steps = []
    for step_s, comm_s in times_s:
        fitting = (last_s - comm_s) / step_s if step_s > 0 else math.inf
        # The closed form is at least `preset` except for rounding errors.
        steps.append(max(math.floor(fitting + 0.5), preset) if math.isfinite(fitting) else preset)
    return steps


def shares(steps: Sequence[int]) -> list[float]:
    """Return the share D of the samples that each worker computes with these local steps (Algorithm 1)."""
    total = sum(steps)
    return [one / total for one in steps]


def ratios(profiles: Sequence[WorkerProfile], steps: Sequence[int], preset: float, cost: float = 1.0) -> list[float]:
    """Return the share R of a push's elements that each worker sends, so that all take the same time (Algorithm 2).

    Parameters
    ----------
    profiles
        Times of each worker.
    steps
        Local steps H of each worker.
    preset
        R of the slowest worker.
    cost
        Bytes of an element in a sparse push over its bytes in a whole push: 1 in the paper, where R is a share of the
        push time; INDEXED if indices are sent.

    Returns
    -------
    list of float
        At least `preset`; 1 for a worker that has time for a whole push, or whose push takes no time.
    """
    times_s = [
        (step_s * n + encode_s + pull_s, push_s)
        for (step_s, push_s, pull_s, encode_s), n in zip(profiles, steps, strict=True)
    ]
    last_s = max([rest_s + push_s * (cost * preset) for rest_s, push_s in times_s])
    # Below `preset` only by a rounding error.
    return [
        max(left_s / (cost * push_s), preset) if (left_s := last_s - rest_s) < push_s else 1.0
        for rest_s, push_s in times_s
    ]
