"""Checks of layer separation (Stanza, Wu et al., arXiv 1812.10624).

A convolution worker computes one batch, its fully-connected worker the batches of all that it serves. The bytes that
they send each other follow from the sizes of the layers, which are attributes of the trace.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hpcsync.audit.check import Check, check_all, check_rows
from hpcsync.audit.peer_recount import PeerRecount
from hpcsync.config.job import Script
from hpcsync.planning.layer_groups import Groups
from hpcsync.planning.split_cost import SEPARATED
from hpcsync.trace.schema import Rows


class Pairs(NamedTuple):
    """Steps of convolution workers and of their fully-connected workers in the same iteration.

    Only pairs of which both steps are recorded. Indices into `PeerRecount.steps`, shape (n_pairs,).

    Attributes
    ----------
    below
        Steps of convolution workers.
    above
        Steps of fully-connected workers.
    """

    below: Rows
    above: Rows


def check_separation(run: PeerRecount, groups: Groups) -> list[Check]:
    """Return all checks of this module. The values must be valid (`peers.values_are_possible`)."""
    return [
        batches_are_of_the_groups(run, groups),
        losses_are_known_above(run),
        parts_fit(run),
        both_sides_wait(run, _pairs(run)),
        bytes_are_of_the_sizes(run, groups),
    ]


def batches_are_of_the_groups(run: PeerRecount, groups: Groups) -> Check:
    """Check that convolution workers have equal batches.

    A fully-connected worker has the batches of all convolution workers that it serves.
    """
    steps = run.steps
    if isinstance(run.job.workload, Script):
        sizes = steps["batch_size"] // _n_batches(run, groups)
        batch_size = int(sizes[0]) if len(sizes) else 0
    else:
        batch_size = run.job.workload.batch_size
    due = batch_size * _n_batches(run, groups)
    return check_rows(
        "batch sizes match the groups",
        steps["batch_size"] != due,
        lambda i: f"{run.step_name(i)} has {steps['batch_size'][i]} samples, not {due[i]}",
    )


def losses_are_known_above(run: PeerRecount) -> Check:
    """Check that convolution workers have no loss, unless a script reports one."""
    loss = run.steps["loss"]
    claimed = ~run.is_fc & ~np.isnan(loss) & (not isinstance(run.job.workload, Script))
    return check_rows(
        "only fully-connected workers have a loss",
        claimed,
        lambda i: f"{run.step_name(i)} has loss {loss[i]}, but its worker has no layers above the cut",
    )


def parts_fit(run: PeerRecount) -> Check:
    """Check that an iteration lasts at least as long as loading, computation, waiting and transfers together."""
    steps = run.steps
    spent_s = steps["load_s"] + steps["compute_s"] + steps["wait_s"] + steps["comm_s"]
    room_s = steps["now_s"] - steps["begin_s"]
    return check_rows(
        "iterations last at least as long as their parts",
        spent_s > room_s + run.uncertain_s,
        lambda i: (
            f"{run.step_name(i)} loads, computes, waits and transfers for {spent_s[i]} s, but lasts {room_s[i]} s"
        ),
    )


def both_sides_wait(run: PeerRecount, pairs: Pairs) -> Check:
    """Check that no worker of a pair computes with values that do not exist yet.

    A fully-connected worker ends after the begin of the computation that it depends on. A convolution worker ends after
    the earliest time at which its fully-connected worker can have computed the gradients.
    """
    (below, above), steps = pairs, run.steps
    uncertain_s = run.uncertain_s[below] + run.uncertain_s[above]
    possible_s = (steps["begin_s"] + steps["compute_s"])[above]
    early = steps["end_s"][above] + uncertain_s < steps["begin_s"][below]
    return check_all(
        "no worker computes before its input exists",
        (early, lambda i: f"{run.step_name(above[i])} ends before that of worker {steps['worker'][below[i]]} begins"),
        (
            steps["end_s"][below] + uncertain_s < possible_s,
            lambda i: (
                f"{run.step_name(below[i])} ends at {steps['end_s'][below[i]]} s, its gradients cannot exist before "
                f"{possible_s[i]} s"
            ),
        ),
    )


def bytes_are_of_the_sizes(run: PeerRecount, groups: Groups) -> Check:
    """Check the bytes of each step against the sizes of the layers.

    The activations of every sample cross the cut, as many gradients return, labels cross, and each group sums its part
    of the gradients in a ring.

    References
    ----------
    Volumes of Stanza, Wu et al., arXiv 1812.10624, by our own count.
    """
    name, moved = "wire_bytes match the sizes of the layers", run.steps["wire_bytes"]
    sizes = [size for size in map(run.attributes.get, SEPARATED) if isinstance(size, int)]
    if len(sizes) < len(SEPARATED):  # a run that ended before its loop began does not know the sizes
        return Check(
            name,
            len(moved) == 0,
            0,
            f"the trace lacks one of the attributes {', '.join(SEPARATED)}" if len(moved) else "",
        )
    below, above, activations, labels = sizes
    ring_below, ring_above = (
        2 * (n - 1) * size // n for n, size in ((groups.n_convolution, below), (groups.n_fc, above))
    )
    per_row = np.where(run.is_fc, activations, activations + labels)
    due = run.steps["batch_size"] * per_row + np.where(run.is_fc, ring_above, ring_below)
    return check_rows(name, moved != due, lambda i: f"{run.step_name(i)} moved {moved[i]} bytes, not {due[i]}")


def _n_batches(run: PeerRecount, groups: Groups) -> Rows:
    """Return the number of convolution workers whose batches each step computes, shape (n_steps,)."""
    n_batches = np.ones(run.n_workers, np.int64)
    n_batches[: groups.n_fc] = [len(groups.served(fc)) for fc in groups.fc]
    return n_batches[run.steps["worker"]]


def _pairs(run: PeerRecount) -> Pairs:
    step_of = np.full((run.n_workers, len(run.n_contributing)), -1)
    step_of[run.steps["worker"], run.count] = np.arange(len(run.steps))
    below = np.flatnonzero(~run.is_fc)
    above = step_of[run.peer[below], run.count[below]]
    return Pairs(below[above >= 0], above[above >= 0])
