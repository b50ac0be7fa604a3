"""Roles of the ranks: the first ranks are servers, the others are workers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Roles:
    """Division of `n_servers + n_workers` ranks. Server 0 is rank 0 and decides.

    Attributes
    ----------
    n_servers
        Number of servers.
    n_workers
        Number of workers.
    """

    n_servers: int
    n_workers: int

    @property
    def n_ranks(self) -> int:
        """Number of ranks."""
        return self.n_servers + self.n_workers

    @property
    def evaluator(self) -> int:
        """Reader number of the evaluation that runs beside server 0: the one after the last worker."""
        return self.n_workers

    def is_server(self, rank: int) -> bool:
        """Return True if the rank is a server."""
        return rank < self.n_servers

    def name(self, rank: int) -> str:
        """Return the name of a rank for messages and files."""
        return f"server-{rank}" if self.is_server(rank) else f"worker-{self.worker(rank)}"

    def worker(self, rank: int) -> int:
        """Return the worker number of a rank that is not a server."""
        return rank - self.n_servers

    def rank_of(self, reader: int) -> int:
        """Return the rank of a reader, which is a worker or the evaluator."""
        return 0 if reader == self.evaluator else self.n_servers + reader

    def shards(self, size: int) -> list[slice]:
        """Return every server's slice of a flat vector of `size` elements; sizes differ by at most one."""
        n = self.n_servers
        return [slice(size * server // n, size * (server + 1) // n) for server in range(n)]
