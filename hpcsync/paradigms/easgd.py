"""Elastic averaging SGD (EASGD): workers and a centre are drawn towards each other.

A contribution is the position of a worker. The worker continues from its own position and from the centre as it was
before the contribution moved it: both sides move by the same pair of values. Therefore the grant precedes the update.

References
----------
S. Zhang, A. Choromanska and Y. LeCun, "Deep learning with Elastic Averaging SGD", NIPS 2015.
"""

from __future__ import annotations

from hpcsync.paradigms.asp import ASP
from hpcsync.paradigms.base import Paradigm
from hpcsync.paradigms.bsp import BSP
from hpcsync.paradigms.events import Action, Apply, Event


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
