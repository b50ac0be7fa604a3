"""Transports of asynchronous gossip: a worker reads or writes the memory of a peer, which may compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hpcsync.mpi.peer.exchange import Exchange, Setup
from hpcsync.mpi.transport.push_inbox import NODE_SLOTS, SLOTS, PushInbox
from hpcsync.state import built, plain
from hpcsync.trace.schema import Phase
from hpcsync.training.local_update import Received


class Pulling(Exchange):
    """Published weights that others read."""

    one_sided = True
    phase = Phase.READING

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._other = torch.empty_like(setup.flat.weights)

    def read(self, worker: int, peer: int) -> torch.Tensor:
        """Read into memory that the next read overwrites."""
        self._begin_transfer()
        self._link.published.read(peer, self._other)
        return self._other


class Pushing(Exchange):
    """Inboxes that others add to."""

    one_sided = True
    phase = Phase.PUSHING

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        link, flat = setup.link, setup.flat
        # A death while a worker adds to a slot ends the run: the more slots, the fewer adds.
        few = link.backoff.one_node and setup.job.cluster.on_death != "continue"
        self._inbox = PushInbox(
            link.comm, flat.size, flat.weights.dtype, link.transport,
            backoff=link.own_backoff(), poll=self._learn_of_deaths, n_slots=NODE_SLOTS if few else SLOTS,
        )  # fmt: skip

    def _absorbed(self) -> None:
        self._inbox.release()

    def send(self, worker: int, peer: int, model: torch.Tensor, weight: float) -> None:
        """Send; on return the model has arrived."""
        self._begin_transfer()
        self._inbox.send(peer, model, weight)

    def collect(self, worker: int) -> Received | None:
        """Return what has arrived, in memory that is valid until the end of the iteration, at the end until `free`."""
        self._begin_transfer()
        return self._inbox.collect()

    rest = collect

    def forget(self, worker: int) -> None:
        """Exclude a worker that has died from the inbox."""
        self._inbox.forget(worker)

    def state(self) -> dict[str, Any]:
        """Return the state, with the models received and not yet absorbed."""
        return super().state() | {"inbox": plain(self._inbox.keep())}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state, with the inbox."""
        others = dict(state)
        kept: Received | None = built(Received | None, others.pop("inbox"))
        super().restore(others)
        if kept is not None:
            kept = kept._replace(total=built(torch.Tensor, kept.total, torch.empty_like(self._flat.weights)))
        self._inbox.put_back(kept)

    def free(self) -> None:
        """Free the inbox; collective."""
        self._inbox.free()
