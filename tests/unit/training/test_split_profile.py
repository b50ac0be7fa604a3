"""Measured times of a batch in each half: what is timed, the number of threads, and the fixed time."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hpcsync.planning.split_cost import Times
from hpcsync.training import split_profile
from hpcsync.training.model_split import ModelSplit
from hpcsync.training.split_profile import fixed, measured
from hpcsync.workloads.registry import cross_entropy


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


class Timed(nn.Module):
    """A matrix whose passes take a fixed time plus a time per row on its clock, forward and backward alike.

    The first forward pass, in which memory is touched, takes 9 seconds more.
    """

    def __init__(self, clock: Clock, n_in: int, n_out: int, forward_s: float, row_s: float = 0.0) -> None:
        super().__init__()
        self.linear, self.clock, self.forward_s, self.row_s = nn.Linear(n_in, n_out), clock, forward_s, row_s
        self.threads: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.threads.append(torch.get_num_threads())
        takes_s = self.forward_s + self.row_s * len(x)
        self.clock.now_s += takes_s + (9.0 if len(self.threads) == 1 else 0.0)
        y = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda _: self.wait(takes_s))
        return y

    def wait(self, takes_s: float) -> None:
        self.clock.now_s += takes_s


@pytest.mark.parametrize(("enough_s", "times"), [(0.0, 3), (1000.0, 9)])
def test_times_of_halves(enough_s: float, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(split_profile, "time", SimpleNamespace(perf_counter=clock.perf_counter))
    monkeypatch.setattr(split_profile, "ENOUGH_S", enough_s)
    halves = ModelSplit(Timed(clock, 3, 4, 2.0), Timed(clock, 4, 2, 1.0, 0.5))
    before = torch.get_num_threads()
    batch = (torch.randn(6, 3), torch.zeros(6, dtype=torch.long))
    assert measured(halves, cross_entropy, batch) == Times(2.0, 2.0, 2 * (1.0 + 6 * 0.5), 2 * 1.0)
    assert torch.get_num_threads() == before and set(halves.below.threads + halves.above.threads) == {1}
    assert len(halves.below.threads) == 1 + 1 + times, "for the activations, to warm up, and what counts"


def test_the_time_independent_of_the_batch_size() -> None:
    assert fixed(5.0, 14.0) == 2.0  # 2 + 3 n
    assert fixed(5.0, 20.0) == fixed(5.0, 21.0) == 0.0
    assert fixed(5.0, 5.0) == fixed(5.0, 4.0) == 5.0
