"""Atomic averages of pairs on ranks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from hpcsync.core.iterations import Iterations
from hpcsync.mpi.peer.exchange import Exchange, Setup
from hpcsync.mpi.transport.pair_exchange import PairExchange
from hpcsync.paradigms.peer_method import Actions, ExchangeResult
from hpcsync.state import built
from hpcsync.trace.schema import Phase
from hpcsync.training.batch_sources import Source
from hpcsync.training.local_update import Received


class Pairing(Exchange):
    """Weights that others average with, or averages with those of others."""

    state_types = {"_n_steps": float}
    one_sided = True
    phase = Phase.PUSHING

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        link, flat = setup.link, setup.flat
        self._shares = setup.method.shares(link.comm.rank)
        self._pairs = PairExchange(
            link.comm, flat.size, flat.weights.dtype, link.transport,
            shares=self._shares, backoff=link.own_backoff(), poll=self._learn_of_deaths,
        )  # fmt: skip
        self._n_steps = 0.0  # contained in the weights of this rank, as it knows them
        self._comm_s = 0.0
        self._start: torch.Tensor | None = None  # the shared weights, until the loop begins
        if self._shares:  # nobody averages before the clocks of all ranks have been started together
            self._start = flat.weights.clone()
            with self._pairs.held():
                self._pairs.store(self._start)

    def prepare(self, source: Source | None, iterations: Iterations) -> Mapping[str, int]:
        """Share what the script has changed since, too; others may have averaged already."""
        start, self._start = self._start, None
        if start is not None and not torch.equal(start, self._flat.weights):
            with self._pairs.held():
                found = self._pairs.load()
                vector = found.vector + (self._flat.weights - start) if found.n_averaged else self._flat.weights
                self._pairs.store(vector, found.scalar, found.n_averaged)
        return super().prepare(source, iterations)

    def run(self, actions: Actions) -> ExchangeResult:
        """Carry out the actions of an iteration; waiting for a lock is waiting for others."""
        waited_s, self._comm_s = self._pairs.waited_s, 0.0
        result = super().run(actions)
        self.wait_s = self._pairs.waited_s - waited_s
        self.comm_s = max(0.0, self._comm_s - self.wait_s)
        return result

    def average_with(self, worker: int, peer: int) -> bool:
        """Average, unless the peer has died."""
        begin_s = time.perf_counter()
        with self.peer.exchanging() as x:
            n_steps = self._pairs.average(peer, x, self._n_steps)
        self._comm_s += time.perf_counter() - begin_s
        if n_steps is None:
            return False
        self._n_steps = n_steps
        return True

    def step_shared(self, worker: int, lr: float, serial: int) -> tuple[int, float]:
        """Step; publish under a serial number other than 0."""
        n_averaged = 0
        if self._shares:
            with self._pairs.held():
                found = self._pairs.load()
                if n_averaged := found.n_averaged:
                    self.peer.adopt(found.vector)
                    self._n_steps = found.scalar
                self._make_step(worker, lr)
                self._pairs.store(self.peer.shown(), self._n_steps)
        else:
            self._make_step(worker, lr)
        if serial:
            self.publish(serial)
        return n_averaged, self._n_steps

    def _make_step(self, worker: int, lr: float) -> None:
        self.step(worker, lr)
        self._n_steps += 1

    def rest(self, worker: int) -> Received | None:
        """Return the weights as others have left them after the last step, if they have changed them."""
        if not self._shares:
            return None
        found = self._pairs.load()
        return Received(found.vector.clone(), found.n_averaged, found.scalar) if found.n_averaged else None

    def forget(self, worker: int) -> None:
        """Take over the locks of a worker that has died."""
        self._pairs.forget(worker)

    def state(self) -> dict[str, Any]:
        """Return the state, with the weights as others have left them."""
        state = super().state()
        if self._shares:
            found = self._pairs.load()
            state |= {"shared": found.vector.clone(), "shared_steps": found.scalar, "n_averaged": found.n_averaged}
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state, with the shared weights."""
        others, self._start = dict(state), None
        if self._shares:
            shared = built(torch.Tensor, others.pop("shared"), torch.empty_like(self._flat.weights))
            n_steps, n_averaged = built(float, others.pop("shared_steps")), built(int, others.pop("n_averaged"))
            with self._pairs.held():
                self._pairs.store(shared, n_steps, n_averaged)
        super().restore(others)

    def free(self) -> None:
        """Free the windows; collective."""
        self._pairs.free()
