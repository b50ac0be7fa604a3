"""Atomic averages of pairs in virtual time.

The weights that a worker shares are locked from the moment at which their owner, or one that averages with it, may read
them until they are replaced; others wait in the order in which they came.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from hpcsync.paradigms.peer_method import PENDING
from hpcsync.simulator.peer_numerics import Model, copied
from hpcsync.simulator.peer_run import PeerSimulation
from hpcsync.training.local_update import Received

Turn = Callable[[], object]


class _Shared:
    """Weights that a worker shares, with look-ahead removed.

    Attributes
    ----------
    model
        The weights; replaced, never modified.
    n_steps
        Count of steps that they contain.
    n_averaged
        Averages since their owner's last step.
    """

    __slots__ = ("_held", "_waiting", "model", "n_averaged", "n_steps")

    def __init__(self, model: Model) -> None:
        self.model = model
        self.n_steps = 0.0
        self.n_averaged = 0
        self._held = False
        self._waiting: deque[Turn] = deque()

    def lock(self, then: Turn) -> bool:
        """Take the lock and return True; or call `then` when it is this one's turn, with the lock taken."""
        if self._held:
            self._waiting.append(then)
            return False
        self._held = True
        return True

    def unlock(self) -> None:
        """Give the lock to the next one that waits."""
        if self._waiting:
            self._waiting.popleft()()
        else:
            self._held = False


class PairSimulation(PeerSimulation):
    """A worker asks for a peer's weights, reads them, and writes the mean back; the peer computes meanwhile."""

    def __init__(self, *of_every_run: Any) -> None:
        super().__init__(*of_every_run)
        self._updates: Sequence[Any] = self._numerics.updates
        self._gradients: list[Model] = [None] * len(self._updates)  # of the iterations that end
        self._n_steps = [0.0] * len(self._updates)  # contained in the weights of a worker, as it knows them
        self._shared = {
            worker: _Shared(copied(self._updates[worker].shown()))
            for worker, state in enumerate(self._workers)
            if state.machine.method.shares(worker)
        }

    def _compute(self, worker: int) -> float:
        loss = super()._compute(worker)
        self._gradients[worker] = copied(self._numerics.gradient)  # others compute before its step
        return loss

    # ---- average ----

    def average_with(self, worker: int, peer: int) -> Any:
        """Ask for the peer's weights."""
        self._links.message(self._asked, worker, peer)
        return PENDING

    def _asked(self, worker: int, peer: int) -> None:
        asked_s, shared = self._loop.now_s, self._shared[peer]

        def read() -> None:
            self._workers[worker].exchange_s += self._loop.now_s - asked_s
            self._links.send(peer, worker, self._read, worker, peer)

        if shared.lock(read):
            read()

    def _read(self, worker: int, peer: int) -> None:
        shared = self._shared[peer]
        mean = self._updates[worker].meet(shared.model)
        n_steps = self._n_steps[worker] = (self._n_steps[worker] + shared.n_steps) * 0.5
        self._links.send(worker, peer, self._written, worker, peer, mean, n_steps)

    def _written(self, worker: int, peer: int, mean: Model, n_steps: float) -> None:
        shared = self._shared[peer]
        shared.model, shared.n_steps = mean, n_steps
        shared.n_averaged += 1
        self._links.message(self._resume, worker, True)
        shared.unlock()

    # ---- step ----

    def step_shared(self, worker: int, lr: float, serial: int) -> Any:
        """Step once the worker has its own weights; no worker reads what it would publish."""
        shared, state = self._shared.get(worker), self._workers[worker]
        if shared is None:
            return 0, self._stepped(worker, lr)

        def own_turn() -> None:
            state.exchange_s = self._loop.now_s
            result = self._replace(worker, shared, lr)
            self._resume(worker, result)

        return self._replace(worker, shared, lr) if shared.lock(own_turn) else PENDING

    def _replace(self, worker: int, shared: _Shared, lr: float) -> tuple[int, float]:
        """Step on the shared weights, for which the lock is held."""
        n_averaged, update = shared.n_averaged, self._updates[worker]
        if n_averaged:
            update.adopt(shared.model)
            self._n_steps[worker] = shared.n_steps
        shared.n_steps, shared.n_averaged = self._stepped(worker, lr), 0
        shared.model = copied(update.shown())
        shared.unlock()
        return n_averaged, shared.n_steps

    def _stepped(self, worker: int, lr: float) -> float:
        self._numerics.step(worker, lr, self._gradients[worker])
        self._n_steps[worker] += 1
        return self._n_steps[worker]

    # ---- the end ----

    def rest(self, worker: int) -> Received | None:
        """Return the weights as others have left them after the owner's last step."""
        shared = self._shared.get(worker)
        if shared is None or not shared.n_averaged:
            return None
        return Received(shared.model, shared.n_averaged, shared.n_steps)
