"""Elastic averaging SGD (EASGD): workers and a centre are drawn towards each other.

A contribution is the position of a worker. The worker continues from its own position and from the centre as it was
before the contribution moved it: both sides move by the same pair of values. Therefore the grant precedes the update.

References
----------
S. Zhang, A. Choromanska and Y. LeCun, "Deep learning with Elastic Averaging SGD", NIPS 2015.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from hpcsync.paradigms.asp import ASP
from hpcsync.paradigms.base import Paradigm
from hpcsync.paradigms.bsp import BSP
from hpcsync.paradigms.events import Action, Apply, Event
from hpcsync.paradigms.options import (
    Count,
    JobTables,
    NotNegative,
    OptionError,
    ParadigmOptions,
    Part,
    default,
    every,
)
from hpcsync.paradigms.papers import Reference, neurips


class _GrantsFirst(Paradigm):
    """Mix-in that grants before it updates, so that workers read the centre without their own contributions."""

    name = "easgd"

    def handle(self, event: Event) -> list[Action]:
        """Process one event; grants precede the update."""
        return sorted(super().handle(event), key=lambda action: isinstance(action, Apply))


class AsynchronousEASGD(_GrantsFirst, ASP):
    """Asynchronous EASGD: each worker moves itself and the centre independently of the others.

    Parameters
    ----------
    n_workers
        Number of workers.
    """


class SynchronousEASGD(_GrantsFirst, BSP):
    """Synchronous EASGD: all workers move at once, and the centre moves by the sum of their moves.

    Parameters
    ----------
    n_workers
        Number of workers.
    """

    synchronous = False  # contributions are positions, computed from the workers' own weights


def elastic(n_workers: int, *, synchronous: bool = False) -> Paradigm:
    """Create EASGD in its synchronous or asynchronous form.

    Parameters
    ----------
    n_workers
        Number of workers.
    synchronous
        Whether all workers move at once.

    Returns
    -------
    Paradigm
        A `SynchronousEASGD` or an `AsynchronousEASGD`.
    """
    return (SynchronousEASGD if synchronous else AsynchronousEASGD)(n_workers)


ZHANG = Reference(
    "zhang2015deep",
    "inproceedings",
    ("Zhang, Sixin", "Choromanska, Anna", "LeCun, Yann"),
    "Deep Learning with Elastic Averaging SGD",
    2015,
    neurips(28),
)


@dataclass(frozen=True, kw_only=True)
class EasgdOptions(ParadigmOptions):
    """Elastic averaging SGD (EASGD): a worker and the servers' centre move towards each other.

    Parameters
    ----------
    period
        Iterations between two exchanges of a worker with the centre.
    alpha
        Share of their distance by which worker and centre move. With `synchronous` at most 2 / (workers + 1).
    beta
        workers x `alpha`; not together with `alpha`.
    synchronous
        All workers exchange in the same round.
    """

    name: Literal["easgd"] = "easgd"
    period: Count = 10
    alpha: Part | None = default(None, "`beta` / workers")
    beta: NotNegative | None = default(None, "0.9")
    synchronous: bool = False

    policy = staticmethod(elastic)
    contribution = "position"
    allocates = True
    grants_first = True
    papers = (ZHANG,)
    place = 90
    colour = "#882255"
    waiting = "none (`synchronous`: all, every `period` iterations)"
    update = "workers and a centre move towards each other"
    source = "Zhang et al., NIPS 2015"

    def _check_options(self) -> None:
        if self.alpha is not None and self.beta is not None:
            raise OptionError("paradigm.beta", self.beta, f"must be omitted beside paradigm.alpha = {self.alpha}")

    def check(self, job: JobTables) -> None:
        """Raise OptionError for a rate with which workers and centre diverge."""
        n_workers = job.cluster.workers
        limit = 2 / (n_workers + 1) if self.synchronous else 1.0
        if self.moving_rate(n_workers) > limit:
            key, factor = ("beta", n_workers) if self.alpha is None else ("alpha", 1)
            raise OptionError(
                f"paradigm.{key}",
                getattr(self, key),
                f"must be at most {limit * factor:g} with cluster.workers = {n_workers}: above that, workers and "
                "centre diverge",
            )

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the policy; the period and the rate concern the workers alone."""
        return {"synchronous": self.synchronous}

    def moving_rate(self, n_workers: int) -> float:
        """Return alpha."""
        return self.alpha if self.alpha is not None else (0.9 if self.beta is None else self.beta) / n_workers

    @property
    def exchange_every(self) -> int:
        """Iterations from one push to the next."""
        return self.period

    @property
    def lead_bound(self) -> float:
        """Largest lead over the slowest worker at which a worker starts, in pushes."""
        return 0 if self.synchronous else math.inf

    @property
    def counts_workers(self) -> bool:
        """True if an update takes one contribution of each of several workers."""
        return self.synchronous

    @property
    def guarantees(self) -> tuple[str, ...]:
        """Guarantees that the audit verifies."""
        both = ("moves", "slowest-runs")
        return (*both, "no-staleness", "complete-rounds") if self.synchronous else (*both, "nobody-waits")

    @property
    def label(self) -> str:
        """Name with the main options, for figures."""
        return f"EASGD, every {self.period}" + (", synchronous" if self.synchronous else "")

    def describe(self, n_workers: int) -> str:
        """Return the paradigm in a sentence."""
        together = "all workers at once" if self.synchronous else "each worker by itself"
        rate = self.moving_rate(n_workers)
        return f"workers and the centre move {rate:.3g} of their distance towards each other, {together}"

    def moves(self, size: str, sent: str, *, compressed: bool) -> tuple[str, str]:
        """Return when bytes move, and which."""
        return every(self.period), f"{size} of weights from the worker, and as many of the centre to it"
