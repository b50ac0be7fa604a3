"""Which rank is what: the first ranks are servers, the rest are workers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Roles:
    """The split of a communicator of `n_servers + n_workers` ranks. Server 0 is rank 0 and decides."""

    n_servers: int
    n_workers: int

    @property
    def n_ranks(self) -> int:
        return self.n_servers + self.n_workers

    @property
    def evaluator(self) -> int:
        """The reader after the last worker: the evaluation that runs beside server 0."""
        return self.n_workers

    def is_server(self, rank: int) -> bool:
        return rank < self.n_servers

    def name(self, rank: int) -> str:
        """Of a rank, for people and files."""
        return f"server-{rank}" if self.is_server(rank) else f"worker-{self.worker(rank)}"

    def worker(self, rank: int) -> int:
        """The worker index of a rank that is not a server."""
        return rank - self.n_servers

    def rank_of(self, reader: int) -> int:
        """The rank on which a reader (a worker, or the evaluator) lives."""
        return 0 if reader == self.evaluator else self.n_servers + reader

    def shard(self, server: int, size: int) -> slice:
        """The contiguous part of a flat vector of `size` elements that a server holds; sizes differ by at most one."""
        return slice(size * server // self.n_servers, size * (server + 1) // self.n_servers)

    def shards(self, size: int) -> list[slice]:
        """Every server's part of a flat vector of `size` elements."""
        return [self.shard(server, size) for server in range(self.n_servers)]
