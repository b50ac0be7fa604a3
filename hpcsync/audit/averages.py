"""Checks of averages of pairs: every one was atomic, of two workers with weights 1/2, and is noticed by both."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hpcsync.audit.averaging_order import Averaged, Changed, unexplained
from hpcsync.audit.check import SAME, Check, check_all
from hpcsync.audit.peer_recount import PeerRecount, previous
from hpcsync.trace.schema import Rows


def averages_are_noticed(run: PeerRecount, name: str) -> Check:
    """Check that an initiator receives one model, and the peer as many as others have initiated averages with it.

    Averages of a worker that died, or of which the row is missing in an unfinished trace, may have no row.
    """
    steps, died = run.steps, run.died["worker"]
    initiates = run.initiates[steps["worker"]]
    received = np.bincount(run.rows["worker"], run.rows["n_received"], minlength=run.n_workers).astype(int)
    initiated = np.bincount(run.peer[run.exchanged], minlength=run.n_workers)
    least = np.where(np.isin(np.arange(run.n_workers), died) | (not run.finished), 0, initiated)
    most = initiated + run.unrecorded.sum() + (0 if run.finished else run.n_workers)
    wrong = ~run.initiates & ((received < least) | (received > most))
    return check_all(
        name,
        (
            initiates & (steps["n_received"] != run.exchanged),
            lambda i: f"{run.step_name(i)} received {steps['n_received'][i]} models in an average",
        ),
        (
            wrong,
            lambda w: f"worker {w} received {received[w]} models, others have averaged with it {initiated[w]} times",
        ),
    )


def averages_are_atomic(run: PeerRecount) -> Check:
    """Check that the numbers that were averaged along with the weights follow from one order of all averages.

    The number of a worker is the count of steps that its weights contain. In the order of each worker, an average sets
    it and the peer's to their mean, and a step adds 1. At the end the numbers add up to the number of all steps: the
    mixing matrices are doubly stochastic.
    """
    rows, number = run.rows, run.rows["weight"]
    before = np.append(number, 0.0)[previous(rows["worker"])]
    averaged = np.zeros(len(rows), bool)
    averaged[run.is_step] = run.exchanged
    alone = run.initiates[rows["worker"]] & ~averaged
    last = np.zeros(run.n_workers)
    last[rows["worker"]] = number  # the last row of a worker wins
    complete = run.finished and not len(run.died)
    total, n_steps = float(last.sum()), len(run.steps)
    unordered = list(_unordered(run, before, averaged))
    return check_all(
        "averages are atomic, of two workers, and lose no step",
        (
            alone & (number != before + run.is_step),
            lambda i: f"/exchanges row {i}: worker {rows['worker'][i]} has the number {number[i]} after {before[i]}",
        ),
        (
            np.ones(len(unordered), bool),
            lambda i: "no order of the averages with worker {} and of its steps leads to {}".format(*unordered[i]),
        ),
        (
            np.array([complete and abs(total - n_steps) > SAME * max(1, n_steps)]),
            lambda _: f"at the end the workers' numbers add up to {total}, but {n_steps} steps were made",
        ),
    )


def _unordered(run: PeerRecount, before: Rows, averaged: Rows) -> Iterator[tuple[int, str]]:
    """Yield each worker whose history has no order, and what cannot be explained."""
    rows, dead = run.rows, set(run.died["worker"].tolist())
    missing = dead if run.finished else set(range(run.n_workers))  # workers whose latest average may have no row
    unsure_s = min((float(rows["now_s"][rows["worker"] == w].max(initial=-np.inf)) for w in missing), default=np.inf)
    numbers, before_them, workers, counts, steps = (
        column.tolist() for column in (rows["weight"], before, rows["worker"], rows["n_received"], run.is_step)
    )
    peer = np.full(len(rows), -1)
    peer[averaged] = run.peer[run.exchanged]
    for worker in np.flatnonzero(~run.initiates).tolist():
        own = np.flatnonzero(rows["worker"] == worker).tolist()
        with_it = np.flatnonzero(averaged & (peer == worker)).tolist()
        found = unexplained(
            [Changed(counts[row], steps[row], numbers[row]) for row in own],
            [Averaged(workers[row], before_them[row], numbers[row]) for row in with_it],
            complete=not missing,
        )
        if found is not None and found == len(own):
            yield worker, "all averages"
        elif found is not None and rows["now_s"][own[found]] < unsure_s:
            yield worker, f"/exchanges row {own[found]}"
