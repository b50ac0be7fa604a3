"""Squared norms of the servers' gradients: each server states that of its shard, and server 0 adds them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hpcsync.mpi.server.channel import ServerChannel
from hpcsync.mpi.transport import messages


class NormSum:
    """Sum over the servers of what each states of an update, on server 0.

    Parameters
    ----------
    link
        Channel of server 0.
    """

    def __init__(self, link: ServerChannel) -> None:
        self._n_servers = link.roles.n_servers
        self._inbox = link.inbox(messages.TAG_NORM, messages.NORM) if self._n_servers > 1 else None
        self._parts: dict[int, dict[int, float]] = {}  # version -> server -> its part

    @property
    def is_complete(self) -> bool:
        """Whether every server has stated its part of every update that is known here."""
        return not self._parts

    def add_own(self, version: int, gradient_sq: float) -> Iterator[tuple[int, float]]:
        """Add server 0's part of an update; yield versions that are complete, and their sums."""
        if math.isnan(gradient_sq):
            return
        if self._inbox is None:
            yield version, gradient_sq
        else:
            yield from self._add(version, 0, gradient_sq)

    def receive(self) -> Iterator[tuple[int, float]]:
        """Receive what other servers have stated; yield versions that are complete, and their sums."""
        while self._inbox is not None and (record := self._inbox.poll()) is not None:
            yield from self._add(*record)

    def _add(self, version: int, server: int, gradient_sq: float) -> Iterator[tuple[int, float]]:
        parts = self._parts.setdefault(version, {})
        parts[server] = gradient_sq
        if len(parts) == self._n_servers:
            yield version, sum(parts[server] for server in sorted(parts))
            del self._parts[version]
