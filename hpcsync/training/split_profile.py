"""Measured times of a batch in each half of a split model, on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from hpcsync.planning.split_cost import Times
from hpcsync.training.gradient import Loss
from hpcsync.training.model_split import ModelSplit

REPEATED = 3, 9  # least and most repetitions, after one to warm up
ENOUGH_S = 10.0  # no further repetition after this time
MORE = 4  # factor of the batch size in a second measurement, which separates the fixed time


def measured(halves: ModelSplit, loss: Loss, batch: Sequence[torch.Tensor]) -> Times:
    """Return median times of a batch (inputs, then labels) in one thread, for a model on the CPU."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        x, *rest = batch
        with torch.no_grad():
            h = halves.below(x)
        forward_s, backward_s = _medians(lambda: _below(halves, x, h))
        (fc_s,) = _medians(lambda: _above(halves, loss, h, rest))
        (more_s,) = _medians(lambda: _above(halves, loss, *_more(h, rest)))
    finally:
        torch.set_num_threads(threads)
    return Times(forward_s, backward_s, fc_s, fixed(fc_s, more_s))


def fixed(one_s: float, more_s: float) -> float:
    """Return the time independent of the batch size, if a batch takes `one_s` and `MORE` batches take `more_s`."""
    return min(max(0.0, (MORE * one_s - more_s) / (MORE - 1)), one_s)


def _medians(measure: Callable[[], tuple[float, ...]]) -> list[float]:
    """Return the median of each measured time, without the first repetition."""
    measure()
    begin, times = time.perf_counter(), [measure()]
    while len(times) < REPEATED[0] or (len(times) < REPEATED[1] and time.perf_counter() - begin < ENOUGH_S):
        times.append(measure())
    return [median(column) for column in zip(*times, strict=True)]


def _below(halves: ModelSplit, x: torch.Tensor, gradient: torch.Tensor) -> tuple[float, float]:
    halves.below.zero_grad()
    begin = time.perf_counter()
    h = halves.below(x)
    between = time.perf_counter()
    h.backward(gradient)
    return between - begin, time.perf_counter() - between


def _more(h: torch.Tensor, rest: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    return torch.cat([h] * MORE), [torch.cat([tensor] * MORE) for tensor in rest]


def _above(halves: ModelSplit, loss: Loss, h: torch.Tensor, rest: Sequence[torch.Tensor]) -> tuple[float]:
    halves.above.zero_grad()
    entering = h.detach().requires_grad_()
    begin = time.perf_counter()
    loss(halves.above, entering, *rest).backward()
    return (time.perf_counter() - begin,)
