"""Elastic averaging (Zhang, Choromanska and LeCun 2015): workers and a centre are drawn towards each other.

A contribution is where the worker is, and it goes on from there and from the centre as it was before the contribution
moved it: both sides move by the same pair of values. So the grant comes first, and the update after it.
"""

from __future__ import annotations

from hpcsync.paradigms.asp import ASP
from hpcsync.paradigms.base import Paradigm
from hpcsync.paradigms.bsp import BSP
from hpcsync.paradigms.events import Action, Apply, Event


class _GrantsFirst(Paradigm):
    """Lets workers read what is there before their own contributions change it."""

    name = "easgd"

    def handle(self, event: Event) -> list[Action]:
        return sorted(super().handle(event), key=lambda action: isinstance(action, Apply))


class AsynchronousEASGD(_GrantsFirst, ASP):
    """Each worker and the centre move when the worker likes."""


class SynchronousEASGD(_GrantsFirst, BSP):
    """All workers move at once, and the centre with the sum of their moves."""

    synchronous = False  # its contributions are positions, computed from the workers' own weights


def elastic(n_workers: int, *, synchronous: bool = False) -> Paradigm:
    """The paradigm of this name, in either of its forms."""
    return (SynchronousEASGD if synchronous else AsynchronousEASGD)(n_workers)
