"""The vocabulary between a paradigm and whatever drives it.

A paradigm is a state machine: one event in, a list of actions out. It does no I/O, reads no clock and draws
no random numbers; time comes in with the event. The same events therefore always give the same actions, which
is what lets a simulation run the same code as real ranks, and an audit replay a trace.

    engine observes                      paradigm answers
    ---------------                      ----------------
    Pushed(worker)  a contribution       Apply(workers)      make one update of these contributions
                    is in its slot       Collect(worker)     add this contribution to the next update
    Left(worker)    no more will come    Drop(worker)        throw this contribution away
    Joined(worker)  it takes part again  Cancel(worker)      what this worker computes now will be dropped
                                         Grant(worker, ...)  the worker may read the weights and go on
                                         Decision(...)       an adaptive controller chose; for the trace only

Actions are carried out in the order of the list, which matters: a Grant after an Apply lets the worker read
what that update made, a Grant before it what was there before, even where the update takes the worker's own
contribution. A worker whose push is not answered by a Grant at once is *held*: it waits for one in the answer to a
later event. Every Pushed and every Joined is answered by exactly one Grant, at once or later, unless the worker
leaves or the run ends first. Iteration 1 needs no Grant: every worker begins with it. (Who is to join only later
leaves at once.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

UNTIL = -1  # of local steps: until it is time


@dataclass(frozen=True, slots=True)
class Pushed:
    """Worker `worker` has put the contribution of its next iteration into its slot.

    now_s:       seconds since the start of the run, never decreasing from event to event.
    iteration_s: seconds that the whole iteration took, or would have taken had it not been cancelled: all its
                 `local_steps` together, where a worker makes several before it pushes.
    loss:        its mean loss.
    pull_s, push_s, encode_s: seconds of reading the weights before it, of putting the contribution, and of compressing
                 that before.

    Numbers are NaN where nobody knows them.
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
    """Worker `worker` takes no further part: its data has ended, or it died. It holds no grant any more."""

    now_s: float
    worker: int


@dataclass(frozen=True, slots=True)
class Joined:
    """Worker `worker`, which had left, takes part again. It counts as no less far than the slowest active worker."""

    now_s: float
    worker: int


@dataclass(frozen=True, slots=True)
class Apply:
    """Make one update of the model from these workers' contributions, summed in this order.

    weights: what each is multiplied by, in the same order; empty: 1 each.

    The update also takes what was collected since the last one, which may be all that there is.
    """

    workers: tuple[int, ...]
    weights: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Accumulate:
    """Take the contribution out of this worker's slot, times `weight`, into the sum of the next update.

    The slot is free then: the worker may be granted, and push again into the same update.
    """

    worker: int
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Drop:
    """Throw away the contribution in this worker's slot."""

    worker: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """The version that this worker computes from is over: what it computes will be dropped, so it may stop early.

    It then pushes as usual, and is answered by Drop and Grant.
    """

    worker: int


@dataclass(frozen=True, slots=True)
class Grant:
    """Worker `worker` may read the weights and start iteration `iteration`.

    iteration:  counts the worker's pushes; the first is 1, so the grant after push t is for iteration t + 1. Whoever
                joins begins again with the one that it had not pushed.
    gap_iters:  start gap, how far this worker is ahead of the slowest active worker, when it is granted: the difference
                of their pushes, to which counts what a worker was taken to have made when it joined.
    credits:    extra iterations the worker may still start without asking again (DSSP's r), after this grant.
    held_s:     seconds between the push, or the return, that this grant answers and the grant.

    local_steps: what the iteration consists of: so many steps of the worker's own; 0: as many as the job says; UNTIL:
                as many as fit into `commit_s`, which is to say that the last of them is the one in which so many
                seconds have passed since the worker had read the weights.
    ratio:      the share of its contribution's elements that it sends; NaN: as the compression says.
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
    """What an adaptive controller chose, and from what. Recorded, never carried out.

    inputs: one number for each of the paradigm's `decision_fields`, in that order.
    """

    controller: str
    worker: int
    chosen: float
    inputs: tuple[float, ...]


Event = Pushed | Left | Joined
Action = Apply | Accumulate | Drop | Cancel | Grant | Decision
