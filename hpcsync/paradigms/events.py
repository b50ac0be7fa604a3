"""Events and actions of a paradigm.

A paradigm is a state machine: it takes one event and returns a list of actions. It does no I/O, reads no clock and
draws no random numbers; the time is part of the event. Equal sequences of events therefore give equal actions, so the
simulator runs the same code as real ranks, and an audit can replay a trace. The events and actions are::

    event           meaning              action               meaning
    --------------  -------------------  -------------------  ------------------------------------------------
    PushInfo        a contribution is    Apply(workers)       make one update from these contributions
                    in its slot          Accumulate(worker)   add this contribution to the sum of the next update
    Left(worker)    the worker leaves    Drop(worker)         discard this contribution
    Joined(worker)  the worker joins     Cancel(worker)       the contribution being computed will be discarded
                    again                Grant(worker, ...)   the worker may read the weights and continue
    Elapsed         a time has come that Decision(...)        choice of an adaptive controller, for the trace only
                    the paradigm set
    Evaluated       the servers' model has
                    been evaluated

`PushInfo` and `Grant` are also messages and rows of the trace; `hpcsync.paradigms.records` declares them.

Actions are carried out in the order of the list. A Grant after an Apply lets the worker read the result of that update;
a Grant before it lets the worker read the weights before the update, even if the update contains the worker's own
contribution.

A worker whose push is not granted at once is *blocked* until a later event grants it. Every PushInfo and every Joined
is answered by exactly one Grant, unless the worker leaves or the run ends first. Iteration 1 needs no Grant. (A worker
that joins the run later leaves at its start.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hpcsync.paradigms.records import Grant, PushInfo


@dataclass(frozen=True, slots=True)
class Left:
    """Worker `worker` leaves: its data has ended, or it died. Any grant it holds is void."""

    now_s: float
    worker: int


@dataclass(frozen=True, slots=True)
class Joined:
    """Worker `worker`, which had left, joins again with at least the iterations of the slowest active worker."""

    now_s: float
    worker: int


@dataclass(frozen=True, slots=True)
class Elapsed:
    """A time has come that the paradigm has set by its property `due`; `worker` is the one whose event made it do so.

    On real ranks `now_s` may be a little later than the time that was set, and other events may come before.
    """

    now_s: float
    worker: int


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The servers' model, at its present or an earlier version, has been evaluated on held-out data: `loss`.

    Only paradigms with `uses_evaluations` receive it. `worker` is the lowest active worker, to which the row of
    /decisions is attributed. `version` is the one that was evaluated, and `current_s` a time at which it was current.
    """

    now_s: float
    worker: int
    loss: float
    version: int
    current_s: float


@dataclass(frozen=True, slots=True)
class Apply:
    """Make one update of the model from the contributions of these workers.

    The update also includes everything accumulated since the last update, which may be all it contains.

    Attributes
    ----------
    workers
        Workers whose contributions are summed, in this order.
    weights
        Factor of each contribution, in the same order. Empty: 1 for each.
    """

    workers: tuple[int, ...]
    weights: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Accumulate:
    """Add this worker's contribution, times `weight`, to the sum of the next update.

    The slot is free afterwards: the worker may be granted and push again into the same update.
    """

    worker: int
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Drop:
    """Discard the contribution in this worker's slot."""

    worker: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """Tell this worker that the contribution it is computing will be discarded, so that it may stop early.

    The worker then pushes as usual, and is answered by Drop and Grant.
    """

    worker: int


class Decision(NamedTuple):
    """Choice of an adaptive controller. It is recorded in the trace and has no further effect.

    Parameters
    ----------
    controller
        Name of the quantity or controller.
    worker
        Worker that the choice is for, or whose event caused it.
    chosen
        Value chosen.
    inputs
        One number for each of the paradigm's `decision_fields`, in that order.
    """

    controller: str
    worker: int
    chosen: float
    inputs: tuple[float, ...]


Event = PushInfo | Left | Joined | Elapsed | Evaluated
Action = Apply | Accumulate | Drop | Cancel | Grant | Decision
