"""Checks of servers that make outer steps along changes of weights, recounted from the rows.

They are the rate of the outer steps, the weights of contributions, the quorum and the grace window of each update, and
the local steps of each grant. `_Account` follows the run row by row.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from hpcsync.audit.check import SAME, Check, alike, check_all, check_rows
from hpcsync.audit.server_recount import Recount, other_steps
from hpcsync.paradigms.options import ParadigmOptions
from hpcsync.paradigms.records import UNUSED
from hpcsync.trace.schema import ELAPSED, Change


def check_outer_steps(recount: Recount, options: Any) -> list[Check]:
    """Return the checks of this module; `options` has quorum, grace_s, weigh, steps and by_speed."""
    account = _Account(recount, options)
    account.run()
    return [
        rate_is_constant(recount, options),
        weights_are_shares(recount, by_samples=options.weigh == "samples"),
        _first("updates wait for the quorum and the grace window", account.wrong_updates, account.n_updates),
        _first("local steps follow the workers' speeds", account.wrong_steps, account.n_grants),
        check_all(
            "pushes have the granted local steps", other_steps(recount, 1 if options.by_speed else options.steps)
        ),
    ]


def rate_is_constant(recount: Recount, options: ParadigmOptions) -> Check:
    """Check that every update has the outer learning rate."""
    updates, rate = recount.updates, options.moving_rate(recount.n_workers)
    return check_rows(
        f"the outer learning rate is {rate:g}",
        updates["lr"] != rate,
        lambda i: f"version {updates['version'][i]}: lr {updates['lr'][i]}",
    )


def weights_are_shares(recount: Recount, *, by_samples: bool) -> Check:
    """Check that the weights of an update's contributions are their shares of its samples, or of their number."""
    rows = recount.applied
    update = recount.applied_version - 1
    size = recount.pushes["batch_size"][rows].astype(float) if by_samples else np.ones(len(rows))
    size[np.isin(recount.pushes["problem"][rows], [*UNUSED])] = 0.0
    total = np.bincount(update, size, minlength=len(recount.updates))
    expected = np.zeros(len(recount.pushes))
    expected[rows] = size / np.where(total > 0, total, 1.0)[update]
    # Contributions of the update that an unfinished trace ends with may be missing.
    known = np.ones(len(expected), bool)
    known[rows] = recount.applied_version <= len(recount.complete_seq)
    weight = recount.pushes["weight"]
    return check_rows(
        f"weights are shares of the update's {'samples' if by_samples else 'contributions'}",
        known & ~alike(weight, expected),
        lambda i: f"push of seq {recount.pushes['seq'][i]} has weight {weight[i]}, not {expected[i]}",
    )


class _Account:
    """State of the run after each row: contributions that wait, the end of the grace window, and speeds.

    Attributes
    ----------
    wrong_updates, wrong_steps
        Descriptions of what differs from the recount.
    n_updates, n_grants
        Numbers of rows compared.
    """

    def __init__(self, recount: Recount, options: Any) -> None:
        self.recount = recount
        self.options = options
        self.wrong_updates: list[str] = []
        self.wrong_steps: list[str] = []
        self.n_updates = self.n_grants = 0
        self._active = set(range(recount.n_workers))
        self._waiting: set[int] = set()  # workers whose contributions wait
        self._due_s = math.inf
        self._step_s: dict[int, float] = {}  # of each worker's latest push
        self._have_pushed: set[int] = set()

    def run(self) -> None:
        """Follow the run until it stops."""
        recount, rows = self.recount, self._rows()
        n_contributions = recount.updates["n_contributions"][: len(recount.update_seq)]
        made = dict(zip(recount.update_seq.tolist(), n_contributions.tolist(), strict=True))
        for row, following in itertools.zip_longest(rows, rows[1:]):
            if row["seq"] > recount.stop_seq:
                return
            if "gap_iters" in row:
                self._compare_steps(row)
                continue
            self._happen(row)
            if following is None and not recount.finished:
                return  # its update may not have been recorded
            stops = following is not None and following["seq"] == recount.stop_seq
            self._compare_update(row, made.get(row["seq"], 0), stops)

    def _rows(self) -> list[dict[str, Any]]:
        """Return events, elapsed times and grants in their order."""
        recount = self.recount
        elapsed = recount.decisions[recount.decisions["controller"] == ELAPSED.encode()]
        tables = (recount.pushes, recount.membership, elapsed, recount.grants)
        rows = [dict(zip(table.dtype.names or (), row, strict=True)) for table in tables for row in table.tolist()]
        return sorted(rows, key=lambda row: int(row["seq"]))

    def _happen(self, row: dict[str, Any]) -> None:
        worker = row["worker"]
        if "outcome" in row:
            self._waiting.add(worker)
            self._have_pushed.add(worker)
            step_s = (row["load_s"] + row["compute_s"] / row["share"]) / row["local_steps"]
            if 0 < step_s < math.inf:
                self._step_s[worker] = step_s
            if len(self._waiting) == self.options.quorum:
                self._due_s = row["now_s"] + self.options.grace_s
        elif "change" in row:
            (self._active.add if row["change"] == Change.JOINED else self._active.discard)(worker)
        elif not math.isclose(row["chosen"], self._due_s, rel_tol=SAME):
            self.wrong_updates.append(f"seq {row['seq']}: the time {row['chosen']} s was set, not {self._due_s} s")

    def _compare_update(self, row: dict[str, Any], n_contributions: int, stops: bool) -> None:
        """Compare whether the row's answer is an update of all contributions that wait; the run may stop instead."""
        is_due = bool(self._waiting) and (row["now_s"] >= self._due_s or self._active <= self._waiting)
        expected = len(self._waiting) if is_due else 0
        self.n_updates += n_contributions > 0
        if n_contributions != expected and not (stops and n_contributions == 0):
            waits = f"{len(self._waiting)} contributions wait, due at {self._due_s} s"
            made = f"an update of {n_contributions} contributions" if n_contributions else "no update"
            self.wrong_updates.append(f"{made} at seq {row['seq']}, {row['now_s']} s: {waits}")
        if n_contributions or is_due:
            self._waiting.clear()
            self._due_s = math.inf

    def _compare_steps(self, grant: dict[str, Any]) -> None:
        if grant["local_steps"] == 0:
            return
        own_s, expected = self._step_s.get(grant["worker"]), self.options.steps
        if self.options.by_speed and grant["worker"] not in self._have_pushed:
            expected = 1
        elif self.options.by_speed and own_s is not None:
            fastest_s = min(self._step_s[worker] for worker in self._active if worker in self._step_s)
            expected = max(1, math.floor(expected * (fastest_s / own_s) * (1 + SAME)))
        self.n_grants += 1
        if grant["local_steps"] != expected:
            self.wrong_steps.append(f"grant of seq {grant['seq']}: {grant['local_steps']} local steps, not {expected}")


def _first(name: str, wrong: list[str], n_rows: int) -> Check:
    return Check(name, not wrong, n_rows, wrong[0] if wrong else "")
