"""How many local steps a worker makes before it pushes, its share of the data, and how much of a push it sends.

Algorithms 1 and 2 of ASHL (Shen et al., IEEE Transactions on Computers 73(1), 2024): the worker that would be the last
to finish makes the fewest steps that are allowed and sends the least; the others fill the time until then, first with
steps, and what is left of it with a larger part of what they push. So workers behind slow links make fewer steps, as
slow ones do, and whoever would be the last then sends the least.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

INDEXED = 2.0  # cost of an element that is sent with its index: four bytes each


class WorkerProfile(NamedTuple):
    """What was measured of one worker, in seconds: typical values, from 0 on.

    iteration_s: one local step. push_s: sending all of a push. pull_s: reading the weights. encode_s: compressing a
    push, whatever part of it is sent.
    """

    iteration_s: float
    push_s: float
    pull_s: float
    encode_s: float


def local_steps(profiles: Sequence[WorkerProfile], preset: int) -> list[int]:
    """Algorithm 1: each worker's H, with which all need about as long as the slowest, of which it is `preset`.

    Rounded to the nearest whole number, halves up, so that nobody is off by more than half a step; never fewer than
    `preset`, from 1 on. A worker whose steps take no time that could be filled with them gets `preset` too.
    """
    comm_s = [one.push_s + one.pull_s for one in profiles]
    last_s = max(one.iteration_s * preset + comm for one, comm in zip(profiles, comm_s, strict=True))
    steps = []
    for one, comm in zip(profiles, comm_s, strict=True):
        fitting = (last_s - comm) / one.iteration_s if one.iteration_s > 0 else math.inf
        # The closed form is at least `preset`, but for errors of rounding.
        steps.append(max(math.floor(fitting + 0.5), preset) if math.isfinite(fitting) else preset)
    return steps


def shares(steps: Sequence[int]) -> list[float]:
    """Algorithm 1: each worker's D, the part of all samples that it computes when everybody makes its steps."""
    total = sum(steps)
    return [one / total for one in steps]


def ratios(profiles: Sequence[WorkerProfile], steps: Sequence[int], preset: float, cost: float = 1.0) -> list[float]:
    """Algorithm 2: each worker's R, the part of a push's elements that it sends, when it makes so many steps.

    With them all need as long as the last, which sends `preset`. 1 is for who has time for all of a push, as it is, or
    whose pushes take none. cost: bytes that a chosen element takes, over those that it takes in a whole push. In the
    paper that is 1, and R the part of the time; with INDEXED a sparse push takes what it does.
    """
    rest_s = [one.iteration_s * n + one.encode_s + one.pull_s for one, n in zip(profiles, steps, strict=True)]
    least = min(cost * preset, 1.0)
    last_s = max(rest + one.push_s * least for one, rest in zip(profiles, rest_s, strict=True))
    times = [(last_s - rest, one.push_s) for one, rest in zip(profiles, rest_s, strict=True)]
    # Below `preset` only by an error of rounding.
    return [max(left_s / (cost * push_s), preset) if left_s < push_s else 1.0 for left_s, push_s in times]
