"""All-reduce: the workers sum their gradients themselves, and every update takes the mean of all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hpcsync.paradigms.options import ParadigmOptions, Positive, default, every
from hpcsync.paradigms.papers import Reference, journal
from hpcsync.paradigms.peer_method import SummedGradients

PATARASUK = Reference(
    "patarasuk2009bandwidth",
    "article",
    ("Patarasuk, Pitch", "Yuan, Xin"),
    "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations",
    2009,
    journal("Journal of Parallel and Distributed Computing", "69", "117--124", "2"),
)


@dataclass(frozen=True, kw_only=True)
class AllReduceOptions(ParadigmOptions):
    """All-reduce: each update uses the mean of all workers' gradients, which the workers sum themselves.

    Parameters
    ----------
    bucket_mb
        Megabytes of the gradient that are summed at a time.
    """

    name: Literal["allreduce"] = "allreduce"
    bucket_mb: Positive | None = default(None, "25 on one node; between nodes a quarter of the gradient, from 1 to 8")

    one_model = True
    papers = (PATARASUK,)
    place = 120
    waiting = "all workers wait for the slowest, in every iteration"
    update = "the mean of all gradients, summed without a server"
    label = "all-reduce"

    def method(self, n_workers: int, seed: int) -> SummedGradients:
        """Return the exchange."""
        return SummedGradients("all-reduce", self.bucket_mb)

    def describe(self, n_workers: int) -> str:
        """Return the paradigm in a sentence."""
        return "each update is the mean of all workers' gradients, summed among the workers"

    def moves(self, size: str, sent: str, *, compressed: bool) -> tuple[str, str]:
        """Return when bytes move, and which."""
        if compressed:
            return every(1), f"{sent} of gradient ({size}) from each worker to the others"
        return every(1), f"{size} of gradient, summed among the workers"
