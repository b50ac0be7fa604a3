"""Events and actions of a paradigm.

A paradigm is a state machine: it takes one event and returns a list of actions. It does no I/O, reads no clock and
draws no random numbers; the time is part of the event. Equal sequences of events therefore give equal actions, so the
simulator runs the same code as real ranks, and an audit can replay a trace. The events and actions are::

    event           meaning              action               meaning
    --------------  -------------------  -------------------  ------------------------------------------------
    Pushed(worker)  a contribution is    Apply(workers)       make one update from these contributions
                    in its slot          Accumulate(worker)   add this contribution to the sum of the next update
    Left(worker)    the worker leaves    Drop(worker)         discard this contribution
    Joined(worker)  the worker joins     Cancel(worker)       the contribution being computed will be discarded
                    again                Grant(worker, ...)   the worker may read the weights and continue
                                         Decision(...)        choice of an adaptive controller, for the trace only

Actions are carried out in the order of the list. A Grant after an Apply lets the worker read the result of that update;
a Grant before it lets the worker read the weights before the update, even if the update contains the worker's own
contribution.

A worker whose push is not granted at once is *blocked* until a later event grants it. Every Pushed and every Joined is
answered by exactly one Grant, unless the worker leaves or the run ends first. Iteration 1 needs no Grant. (A worker
that joins the run later leaves at its start.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

UNTIL = -1  # Grant.local_steps: as many steps as fit into commit_s


@dataclass(frozen=True, slots=True)
class Pushed:
    """Worker `worker` has put the contribution of its next iteration into its slot.

    Times are NaN where they are not known.

    Attributes
    ----------
    now_s
        Seconds since the start of the run; never decreases from event to event.
    worker
        Number of the worker.
    iteration_s
        Seconds of computation of the whole iteration, all its `local_steps` together; of a cancelled iteration the
        seconds that it would have taken.
    loss
        Mean loss of the iteration.
    local_steps
        Number of local steps that the iteration consists of.
    pull_s
        Seconds spent reading the weights before the iteration.
    push_s
        Seconds spent putting the contribution.
    encode_s
        Seconds spent compressing the contribution.
    """

    now_s: float
    worker: int
    iteration_s: float = math.nan
    loss: float = math.nan
    local_steps: int = 1
    pull_s: float = math.nan
    push_s: float = math.nan
    encode_s: float = math.nan


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


@dataclass(frozen=True, slots=True)
class Grant:
    """Worker `worker` may read the weights and start iteration `iteration`.

    Attributes
    ----------
    worker
        Number of the worker.
    iteration
        Iteration that the worker starts, counted in its own pushes from 1: the grant after push t is for iteration t +
        1. A worker that joins starts again with the iteration that it had not pushed.
    gap_iters
        Lead at the start: iterations that this worker is ahead of the slowest active worker. Iterations credited to a
        worker when it joined count as well.
    credits
        Further iterations that the worker may start without consulting the controller (r of DSSP).
    held_s
        Seconds between the push or join that this grant answers and the grant.
    local_steps
        Local steps of the iteration. 0: as many as the job file says. UNTIL: as many as fit into `commit_s`.
    commit_s
        With UNTIL, seconds after reading the weights. The step during which they pass is the last one.
    ratio
        Share of the contribution's elements that the worker sends; NaN: as the compression is configured.
    """

    worker: int
    iteration: int
    gap_iters: int
    credits: int
    held_s: float
    local_steps: int = 0
    commit_s: float = math.inf
    ratio: float = math.nan


@dataclass(frozen=True, slots=True)
class Decision:
    """Choice of an adaptive controller. It is recorded in the trace and has no further effect.

    Attributes
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


Event = Pushed | Left | Joined
Action = Apply | Accumulate | Drop | Cancel | Grant | Decision
