"""Checks of the switch from BSP to another paradigm, recounted from the rows alone: when and how it was made.

The guarantees of both paradigms are checked on the parts of the trace (`phases`, `bounds`).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hpcsync.audit.check import Check, alike, check_all
from hpcsync.audit.phases import updates_before
from hpcsync.audit.server_recount import Recount
from hpcsync.trace.iteration_counts import NEVER
from hpcsync.trace.schema import Rows


def check_switch(recount: Recount, options: Any) -> list[Check]:
    """Return the checks of the switch itself."""
    return [
        switch_is_due(recount, options),
        nothing_is_under_way(recount),
    ]


def switch_is_due(recount: Recount, options: Any) -> Check:
    """Check that the switch follows the first round after which it is due, and its samples and losses."""
    wanted = options.samples_before(recount.job)
    rows = recount.decisions[recount.decisions["controller"] == b"switch"]
    n_rounds = len(recount.complete_seq) if not len(rows) else updates_before(recount, rows["seq"][0])
    samples, mean_loss, loss_before, checked = _rounds(recount, n_rounds, options.window)
    due = samples >= wanted
    if options.plateau is not None:
        due |= checked & (loss_before - mean_loss <= options.plateau * np.abs(loss_before))
    name = f"it switches at {wanted:g} samples" if options.plateau is None else "it switches when it is due"
    first = int(due.argmax()) + 1 if due.any() else NEVER
    if not len(rows):
        cut = not recount.finished and first == n_rounds  # the decision may be the next row
        late = first != NEVER and not cut
        return Check(
            name, not late, n_rounds, f"it is due with version {first}, but there is no switch" if late else ""
        )
    row, last = rows[0], n_rounds - 1
    momentum = math.nan if options.momentum is None else options.momentum
    recorded = [row[key] for key in ("chosen", "mean_loss", "loss_before", "momentum")]
    expected = [samples[last], mean_loss[last], loss_before[last], momentum] if n_rounds else [math.nan] * 4
    return check_all(
        name,
        (np.array([len(rows) > 1]), lambda _: f"{len(rows)} switches"),
        (np.array([first != n_rounds]), lambda _: f"it is due with version {first}, but follows version {n_rounds}"),
        (
            ~alike(recorded, expected),
            lambda i: f"the switch is recorded with {recorded[i]}, the recount gives {expected[i]}",
        ),
    )


def _rounds(recount: Recount, n_rounds: int, window: int) -> tuple[Rows, Rows, Rows, Rows]:
    """Return the samples and windows after each round.

    Returns
    -------
    samples
        Samples of all updates so far.
    mean_loss, loss_before
        Mean loss of the last whole window and of the one before; NaN where there is none.
    checked
        Rounds that complete a window.
    """
    version = recount.applied_version
    mine = recount.pushes[recount.applied[version <= n_rounds]]
    index = version[version <= n_rounds] - 1
    samples = np.cumsum(np.bincount(index, mine["batch_size"], n_rounds))
    loss = np.bincount(index, mine["loss"], n_rounds) / np.maximum(np.bincount(index, minlength=n_rounds), 1)
    counted = np.isfinite(loss)
    ends = np.flatnonzero(counted)[window - 1 :: window]
    means = loss[counted][: len(ends) * window].reshape(-1, window).mean(1)
    n_windows = np.searchsorted(ends, np.arange(n_rounds), side="right")
    known = np.concatenate([[np.nan, np.nan], means])
    return samples, known[n_windows + 1], known[n_windows], np.isin(np.arange(n_rounds), ends)


def nothing_is_under_way(recount: Recount) -> Check:
    """Check that at the switch each contribution has been applied, and that all active workers are granted with it.

    They then continue from the same version.
    """
    name, at = "all workers continue from the switch together", recount.switch_seq
    if at == NEVER:
        return Check(name, True, 0, "there was no switch")
    event = int(recount.event_at(np.array([at]))[0])
    before = recount.pushes["seq"] < at
    used = np.zeros(len(before), bool)
    used[recount.applied[recount.applied_version <= updates_before(recount, at)]] = True
    answer = recount.grants[(recount.grant_event == event) & (recount.grants["seq"] > at)]
    missing = np.setdiff1d(recount.active(event), answer["worker"]) if recount.finished else np.zeros(0, int)
    version = updates_before(recount, at)
    return check_all(
        name,
        (
            before & ~used,
            lambda i: f"push of seq {recount.pushes['seq'][i]} is not yet applied at the switch, of seq {at}",
        ),
        (np.ones(len(missing), bool), lambda i: f"worker {missing[i]} is not granted with the switch, of seq {at}"),
        (
            answer["version"] != version,
            lambda i: f"worker {answer['worker'][i]} continues from version {answer['version'][i]}, not {version}",
        ),
    )
