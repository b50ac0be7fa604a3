"""Candidates for a job: paradigms with the options that matter, the simplest first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

RATES = (0.5, 1.0, 2.0)  # factors of a job's learning rate that every candidate is tried with
LOCAL_STEPS = (4, 16)
STALENESS = (3,)
BY_SPEED = {"policy": "equal-finish"}  # of batches
PERIOD_ITERATIONS = 50  # of ADSP's check period (in its paper about 100)
COMPRESSED = (("allreduce", "fp16"), ("allreduce", "powersgd"), ("bsp", "top-k"), ("asp", "top-k"))  # with codecs
LINK_SHARE = 0.1  # of an iteration: where links take less, compression saves less than a tenth of the time


@dataclass(frozen=True, eq=False)
class Candidate:
    """A paradigm, how batches are given out, and how pushes are compressed.

    Attributes
    ----------
    paradigm, batches, compression
        Tables of a job file; empty: not in it.
    """

    paradigm: dict[str, Any]
    batches: dict[str, Any] = field(default_factory=dict)
    compression: dict[str, Any] = field(default_factory=dict)


def candidates(
    n_workers: int, iteration_s: float, link_share: float, without_options: Iterable[str] = ()
) -> list[Candidate]:
    """Return candidates for a cluster, ordered from simple to intricate.

    Parameters
    ----------
    n_workers
        Number of workers, at least 2.
    iteration_s
        Duration of a synchronous iteration in seconds, of which ADSP's period is a multiple.
    link_share
        Share of it that its transfers take. From `LINK_SHARE` on, compressed ones are candidates too.
    without_options
        Paradigms that need no options. Those that are not listed here are tried with their defaults.
    """
    some = sorted({n_workers // 2, n_workers - 1})  # k, fewer than all
    paradigms: list[dict[str, Any]] = [
        {"name": "allreduce"},
        {"name": "bsp"},
        *({"name": "local-sgd", "steps": steps} for steps in LOCAL_STEPS),
        {"name": "asp"},
        *({"name": "ssp", "staleness": staleness} for staleness in STALENESS),
        *({"name": "k-sync", "k": k} for k in some),
        {"name": "k-batch-async", "k": n_workers},
        {"name": "k-sync", "k": "throughput"},
        {"name": "dssp", "staleness_min": 3, "staleness_max": 15},
        {"name": "easgd"},
        {"name": "gossip", "mode": "permutation"},
        {"name": "gossip", "mode": "pull"},
        {"name": "ad-psgd"},
        {"name": "sync-switch", "plateau": 0.01},
        {"name": "async-diloco"},
        {"name": "adsp", "check_period_s": PERIOD_ITERATIONS * iteration_s},
        {"name": "ashl"},
    ]
    listed = {paradigm["name"] for paradigm in paradigms}
    paradigms += [{"name": name} for name in without_options if name not in listed]
    found = [Candidate(paradigm) for paradigm in paradigms]
    by_speed = [Candidate({"name": name}, dict(BY_SPEED)) for name in ("allreduce", "bsp")]
    compressed = [Candidate({"name": name}, compression={"name": codec}) for name, codec in COMPRESSED]
    return [*found[:2], *by_speed, *found[2:], *(compressed if link_share >= LINK_SHARE else [])]


def kept(merits: Sequence[tuple[float, ...]], least: int) -> list[int]:
    """Return the places of the best third, at least so many, in the order of the merits.

    Parameters
    ----------
    merits
        Smallest is best.
    least
        Number that is kept at least, of so many as there are.
    """
    n = max(least, -(-len(merits) // 3))
    return sorted(range(len(merits)), key=lambda place: merits[place])[:n]
