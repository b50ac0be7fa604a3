"""The vocabulary between a paradigm and whatever drives it.

A paradigm is a state machine: one event in, a list of actions out. It does no I/O, reads no clock and draws
no random numbers; time comes in with the event. The same events therefore always give the same actions, which
is what lets a simulation run the same code as real ranks, and an audit replay a trace.

    engine observes                      paradigm answers
    ---------------                      ----------------
    Pushed(worker)  a contribution       Apply(workers)      make one update of these contributions
                    is in its slot       Drop(worker)        throw this contribution away
    Left(worker)    no more will come    Grant(worker, ...)  the worker may read the weights and go on
                                         Decision(...)       an adaptive controller chose; for the trace only

Actions are carried out in the order of the list, which matters: a Grant after an Apply lets the worker read
what that update made, a Grant before it what was there before, even where the update takes the worker's own
contribution. A worker that is answered with neither Grant nor Drop is *held*: it waits for a Grant in the answer
to a later event. Every Pushed is answered by exactly one Grant, at once or later, unless the worker leaves or
the run ends first. Iteration 1 needs no Grant: every worker begins with it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pushed:
    """Worker `worker` has put the contribution of its next iteration into its slot.

    now_s: seconds since the start of the run, never decreasing from event to event.
    """

    now_s: float
    worker: int


@dataclass(frozen=True, slots=True)
class Left:
    """Worker `worker` takes no further part: its data has ended, or it died. It holds no grant any more."""

    now_s: float
    worker: int


@dataclass(frozen=True, slots=True)
class Apply:
    """Make one update of the model from these workers' contributions, summed in this order."""

    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Drop:
    """Throw away the contribution in this worker's slot."""

    worker: int


@dataclass(frozen=True, slots=True)
class Grant:
    """Worker `worker` may read the weights and start iteration `iteration`.

    iteration:  counts the worker's pushes; the first is 1, so the grant after push t is for iteration t + 1.
    gap_iters:  start gap, pushes of this worker minus those of the slowest active worker, when it is granted.
    credits:    extra iterations the worker may still start without asking again (DSSP's r), after this grant.
    held_s:     seconds between the push that this grant answers and the grant.
    """

    worker: int
    iteration: int
    gap_iters: int
    credits: int
    held_s: float


@dataclass(frozen=True, slots=True)
class Decision:
    """What an adaptive controller chose, and from what. Recorded, never carried out.

    inputs: one number for each of the paradigm's `decision_fields`, in that order.
    """

    controller: str
    worker: int
    chosen: float
    inputs: tuple[float, ...]


Event = Pushed | Left
Action = Apply | Drop | Grant | Decision
