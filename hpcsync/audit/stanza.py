"""Where layers are separated: whether rows say what a worker of its group can have done.

A convolution worker computes a batch, its fully-connected worker the batches of all that it serves. What these send
each other follows from the sizes of the layers, which the trace has as attributes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hpcsync.audit.check import Check, check_all, check_rows
from hpcsync.audit.peer_recount import PeerRecount
from hpcsync.config.job import Script
from hpcsync.planning.layer_groups import Groups
from hpcsync.planning.split_cost import SEPARATED


class Pairs(NamedTuple):
    """Steps of convolution workers, and of each the step of its fully-connected worker in the same iteration; those of
    which both are reported. Shape (n_pairs,)."""

    below: np.ndarray
    above: np.ndarray


def check_separation(run: PeerRecount, groups: Groups) -> list[Check]:
    """All checks of this module; the values can be counted with."""
    return [
        batches_are_of_the_groups(run, groups),
        losses_are_known_above(run),
        parts_fit(run),
        both_sides_wait(run, _pairs(run)),
        bytes_are_of_the_sizes(run, groups),
    ]


def batches_are_of_the_groups(run: PeerRecount, groups: Groups) -> Check:
    """All convolution workers' batches are alike, and a fully-connected worker has one of each that it serves."""
    steps = run.steps
    if isinstance(run.job.workload, Script):
        sizes = steps["batch_size"] // _n_batches(run, groups)
        batch_size = int(sizes[0]) if len(sizes) else 0
    else:
        batch_size = run.job.workload.batch_size
    due = batch_size * _n_batches(run, groups)
    return check_rows(
        "batches are those of the groups",
        steps["batch_size"] != due,
        lambda i: f"{run.told(i)} is of {steps['batch_size'][i]} samples, not {due[i]}",
    )


def losses_are_known_above(run: PeerRecount) -> Check:
    """A convolution worker has none; what a script says there is its own affair."""
    loss = run.steps["loss"]
    claimed = ~run.is_fc & ~np.isnan(loss) & (not isinstance(run.job.workload, Script))
    return check_rows(
        "only fully-connected workers know a loss",
        claimed,
        lambda i: f"{run.told(i)} has loss {loss[i]}, of a worker that has no layers above the cut",
    )


def parts_fit(run: PeerRecount) -> Check:
    """Computation, waiting and transfers follow each other, from where an iteration begins to its report."""
    steps = run.steps
    spent_s = steps["compute_s"] + steps["wait_s"] + steps["comm_s"]
    room_s = steps["now_s"] - steps["begin_s"]
    return check_rows(
        "iterations last as long as their parts",
        spent_s > room_s + run.uncertain_s,
        lambda i: f"{run.told(i)} computes, waits and transfers for {spent_s[i]} s in {room_s[i]} s",
    )


def both_sides_wait(run: PeerRecount, pairs: Pairs) -> Check:
    """A fully-connected worker ends when what it computes with has been begun, at the earliest; a convolution worker
    when the former can have computed."""
    (below, above), steps = pairs, run.steps
    uncertain_s = run.uncertain_s[below] + run.uncertain_s[above]
    possible_s = (steps["begin_s"] + steps["compute_s"])[above]
    early = steps["end_s"][above] + uncertain_s < steps["begin_s"][below]
    return check_all(
        "nobody computes with what is not there",
        (early, lambda i: f"{run.told(above[i])} has ended before that of worker {steps['worker'][below[i]]} begins"),
        (
            steps["end_s"][below] + uncertain_s < possible_s,
            lambda i: (
                f"{run.told(below[i])} ends at {steps['end_s'][below[i]]} s, its gradients cannot be there before "
                f"{possible_s[i]} s"
            ),
        ),
    )


def bytes_are_of_the_sizes(run: PeerRecount, groups: Groups) -> Check:
    """Every sample's activations cross and as many gradients come back, labels cross, and each group sums its half of
    the gradients in a ring (volumes of Stanza, Wu et al., arXiv 1812.10624, by our own count)."""
    name, moved = "bytes are those of the layers' sizes", run.steps["wire_bytes"]
    sizes = [size for size in map(run.attributes.get, SEPARATED) if isinstance(size, int)]
    if len(sizes) < len(SEPARATED):  # a run that was ended before its loop began does not know them
        return Check(name, len(moved) == 0, 0, "the attributes do not say the sizes" if len(moved) else "")
    below, above, activations, labels = sizes
    ring_below, ring_above = (
        2 * (n - 1) * size // n for n, size in ((groups.n_convolution, below), (groups.n_fc, above))
    )
    per_row = np.where(run.is_fc, activations, activations + labels)
    due = run.steps["batch_size"] * per_row + np.where(run.is_fc, ring_above, ring_below)
    return check_rows(name, moved != due, lambda i: f"{run.told(i)} moved {moved[i]} bytes, not {due[i]}")


def _n_batches(run: PeerRecount, groups: Groups) -> np.ndarray:
    """Of how many convolution workers each step computes the batches."""
    n_batches = np.ones(run.n_workers, np.int64)
    n_batches[: groups.n_fc] = [len(groups.served(fc)) for fc in groups.fc]
    return n_batches[run.steps["worker"]]


def _pairs(run: PeerRecount) -> Pairs:
    step_of = np.full((run.n_workers, len(run.n_contributing)), -1)
    step_of[run.steps["worker"], run.count] = np.arange(len(run.steps))
    below = np.flatnonzero(~run.is_fc)
    above = step_of[run.peer[below], run.count[below]]
    return Pairs(below[above >= 0], above[above >= 0])
