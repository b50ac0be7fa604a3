"""Sums over the rows of a trace, read slice by slice, for its summary."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hpcsync.config.cluster import ClusterEvent
from hpcsync.core.batch_sizes import sizes_at_first
from hpcsync.core.step_problems import NOT_FINITE
from hpcsync.paradigms.records import NO_PEER, Problem
from hpcsync.report.between import PARTS, Between
from hpcsync.trace.reader import Trace, TraceFile
from hpcsync.trace.schema import Outcome, Rows

NO_ROW = -2, -2  # seq and worker of no row: none follows them directly


def begins_allocation(seq: Rows, worker: Rows, before: tuple[int, int] = NO_ROW) -> Rows:
    """Return which rows of /decisions about batches begin an allocation.

    An allocation is one row for every active worker, in order and directly one after the other.

    Parameters
    ----------
    seq, worker
        Columns of the rows, each of shape (n_rows,).
    before
        `seq` and `worker` of the row before these; by default there is none.

    Returns
    -------
    numpy.ndarray
        bool, shape (n_rows,).
    """
    begins: Rows = (np.diff(seq, prepend=before[0]) != 1) | (np.diff(worker, prepend=before[1]) <= 0)
    return begins


class Tally:
    """Sums, counts and maxima of a trace: scalars of the run, and arrays of shape (n_workers,).

    Attributes
    ----------
    served
        True if there are servers; otherwise there are exchanges instead of pushes.
    staleness
        Sum over the applied pushes, in updates.
    start_gap_max
        Largest lead at the start of an iteration, in pushes.
    parts_s
        Seconds of load, compute, wait and comm.
    between
        Time of compressing and between iterations.
    averages
        Averages in which a worker took part, whichever side began them; None unless pairs of workers average.
    outdated
        Number of pushes that were computed to the end and dropped before the last update.
    ks
        Every k of the run, in order.
    batch_size
        Last allocated batch sizes; None if batches are not allocated.
    chosen
        Last choices of ASHL for each worker; NaN where it has not chosen.
    began_s
        Times at which the stages of ASHL began.
    layers
        Layers that each worker trains; None if layers are not separated.
    commits, commits_apart
        Pushes per period, as last chosen by ADSP, and the difference between the workers that pushed most and least, of
        those that were in the run from its start to its last update; None if fewer than two were.
    encode_s
        Seconds of compression; None if the run does not compress.
    steps_max
        Largest number of iterations in a push.
    diverged_s
        Time from which on no step had a finite loss and gradient until the end; None if the last ones were finite.

    Notes
    -----
    Rows are added one by one, so the sums do not depend on how the trace is sliced.
    """

    def __init__(self, trace: Trace | TraceFile) -> None:
        n_workers = trace.n_workers
        self.served = trace.job.has_servers
        self.duration_s, self.updates, self.samples = 0.0, 0, 0
        self.iterations, self.exchanges, self.wire_bytes = (np.zeros(n_workers, np.int64) for _ in range(3))
        self.pushes, self.dropped, self.staleness, self.staleness_max, self.start_gap_max = (
            np.zeros(n_workers, np.int64) for _ in range(5)
        )
        self.paradigm = trace.job.paradigm
        self.layers: list[str | None] = [None] * n_workers
        if (groups := self.paradigm.groups(n_workers)) is not None:
            self.layers = ["fully-connected" if groups.is_fc(w) else "convolution" for w in range(n_workers)]
        self.outdated, self.cancelled = 0, 0
        self.samples_computed, self.samples_dropped = np.zeros(n_workers), np.zeros(n_workers)
        k = self.paradigm.k_at_first(n_workers)
        self.ks = [] if k is None else [k]
        self.batch_size = None if trace.job.batches.policy == "equal" else sizes_at_first(trace.job)
        self._allocation = np.zeros(n_workers, np.int64)  # number of the last one of each worker
        self._last_row = NO_ROW  # seq and worker of the last row of an allocation
        self.chosen = {name: np.full(n_workers, np.nan) for name in ("local-steps", "share", "ratio")}
        self.began_s: dict[int, float] = {}
        self.commits, self._last_applied = self.paradigm.commits_at_first, 0
        self.encode_s = np.zeros(n_workers) if self.served and trace.job.compresses else None
        self.steps_max = 0
        self.diverged_s: float | None = None
        self.parts_s = {part: np.zeros(n_workers) for part in PARTS}
        self.between = Between.of(trace)
        self.averages = np.zeros(n_workers, np.int64) if self.paradigm.pairwise else None
        for table, add in (
            ("updates", self._add_updates),
            ("pushes", self._add_pushes),
            ("grants", self._add_grants),
            ("decisions", self._add_decisions),
            ("exchanges", self._add_exchanges),
        ):
            for rows in trace.slices(table):
                self.duration_s = max(self.duration_s, float(rows["now_s"].max(initial=0.0)))
                add(rows)
        self.commits_apart = None if self.commits is None else self._apart(trace)

    def _apart(self, trace: Trace | TraceFile) -> int | None:
        is_steady = np.ones(len(self.pushes), bool)
        for rows in trace.slices("membership"):
            is_steady[rows["worker"][rows["seq"] < self._last_applied]] = False
        pushes = self.pushes[is_steady]
        return int(np.ptp(pushes)) if len(pushes) > 1 else None

    def _add_pushes(self, rows: Rows) -> None:
        applied = rows[rows["outcome"] != Outcome.DROPPED]
        np.add.at(self.pushes, rows["worker"], 1)
        self._last_applied = max(self._last_applied, int(applied["seq"].max(initial=0)))
        np.add.at(self.dropped, rows["worker"], rows["outcome"] == Outcome.DROPPED)
        np.add.at(self.staleness, applied["worker"], applied["staleness"])
        np.maximum.at(self.staleness_max, applied["worker"], applied["staleness"])
        np.add.at(self.iterations, rows["worker"], rows["local_steps"])
        self.steps_max = max(self.steps_max, int(rows["local_steps"].max(initial=0)))
        self._add_drops(rows[rows["outcome"] == Outcome.DROPPED])
        np.add.at(self.samples_computed, rows["worker"], rows["share"] * rows["batch_size"])
        self.between.add(rows)
        self._add_costs(rows)
        self._add_problems(rows)
        if self.encode_s is not None:
            np.add.at(self.encode_s, rows["worker"], rows["encode_s"])

    def _add_drops(self, dropped: Rows) -> None:
        is_whole = dropped["share"] == 1
        at_the_end = dropped["version_read"] + dropped["staleness"] >= self.updates
        self.cancelled += int((~is_whole).sum())
        self.outdated += int((is_whole & ~at_the_end).sum())
        np.add.at(self.samples_dropped, dropped["worker"], dropped["share"] * dropped["batch_size"])

    def _add_exchanges(self, rows: Rows) -> None:
        np.add.at(self.iterations, rows["worker"], rows["batch_size"] > 0)
        with_other = (rows["peer"] != NO_PEER) & (rows["peer"] != rows["worker"])
        np.add.at(self.exchanges, rows["worker"], with_other)
        if self.averages is not None:
            for side in ("worker", "peer"):
                np.add.at(self.averages, rows[side][with_other], 1)
        self.between.add(rows)
        self._add_costs(rows)
        self._add_problems(rows[rows["batch_size"] > 0])

    def _add_costs(self, rows: Rows) -> None:
        np.add.at(self.wire_bytes, rows["worker"], rows["wire_bytes"])
        for part, sums_s in self.parts_s.items():
            np.add.at(sums_s, rows["worker"], rows[f"{part}_s"])

    def _add_problems(self, rows: Rows) -> None:
        rows = rows[np.isin(rows["problem"], [Problem.NONE, *NOT_FINITE])]
        finite = np.flatnonzero(rows["problem"] == Problem.NONE)
        if len(finite):
            self.diverged_s, rows = None, rows[finite[-1] + 1 :]
        if self.diverged_s is None and len(rows):
            self.diverged_s = float(rows["now_s"][0])

    def _add_grants(self, rows: Rows) -> None:
        starts = rows[rows["local_steps"] != 0]
        np.maximum.at(self.start_gap_max, starts["worker"], starts["gap_iters"])

    def _add_decisions(self, rows: Rows) -> None:
        if self.ks:
            self.ks += rows["chosen"][rows["controller"] == b"k"].astype(int).tolist()
        for name, chosen in self.chosen.items():
            of_name = rows[rows["controller"] == name.encode()]
            chosen[of_name["worker"]] = of_name["chosen"]
        for row in rows[rows["controller"] == b"stage"]:
            self.began_s[int(row["chosen"])] = float(row["now_s"])
        for row in rows[rows["controller"] == b"commits"]:
            self.commits = int(row["chosen"])
        self._add_allocations(rows[rows["controller"] == b"batches"])

    def _add_allocations(self, rows: Rows) -> None:
        if self.batch_size is None or not len(rows):
            return
        seq, worker = rows["seq"], rows["worker"]
        begins = begins_allocation(seq, worker, self._last_row)
        self.batch_size[worker] = rows["chosen"]
        self._allocation[worker] = self._allocation.max() + np.cumsum(begins)
        self._last_row = int(seq[-1]), int(worker[-1])

    def last_batch_size(self, worker: int) -> int | None:
        """Return the last allocated batch size; None without allocation, or if the last one left this worker out."""
        if self.batch_size is None or self._allocation[worker] < self._allocation.max():
            return None
        return int(self.batch_size[worker])

    def _add_updates(self, rows: Rows) -> None:
        self.updates += len(rows)
        self.samples = max(self.samples, int(rows["samples"].max(initial=0)))

    def about_drops(self) -> dict[str, Any]:
        """Return the fields of a summary about dropped contributions."""
        total, dropped = float(self.samples_computed.sum()), float(self.samples_dropped.sum())
        late, stale = (self.paradigm.drops == why for why in ("late", "stale"))
        return {
            "dropped_share": dropped / total if total else None,
            "late": self.outdated if late else None,
            "discarded": self.outdated if stale else None,
            "cancelled": self.cancelled if late else None,
        }

    def about_k(self) -> dict[str, Any]:
        """Return the fields of a summary about k."""
        last, least, most = (self.ks[-1], min(self.ks), max(self.ks)) if self.ks else (None, None, None)
        return {"k_last": last, "k_least": least, "k_most": most}

    def about_commits(self) -> dict[str, Any]:
        """Return the fields of a summary about stages, commits and compression."""
        total_s = sum(float(sums_s.sum()) for sums_s in self.parts_s.values())
        total_s += float(self.between.seconds.sum())  # which includes encode_s
        encode_s = math.nan if self.encode_s is None else float(self.encode_s.sum())
        return {
            "coarse_s": self.began_s.get(1),
            "fine_s": self.began_s.get(2),
            "commits": self.commits,
            "commits_apart": self.commits_apart,
            "encode_share": None if math.isnan(encode_s) or not total_s else encode_s / total_s,
        }

    def has_occurred(self, event: ClusterEvent) -> bool:
        """Return True if the run lasted until this event of its job.

        An event at an iteration has occurred if its worker made that iteration, or the one before if it leaves. With
        several iterations per push, those after the last push are in no row: as many may have been made as there are in
        the largest push.
        """
        if event.at_s is not None:
            return event.at_s <= self.duration_s
        assert event.at_iteration is not None
        unknown = self.steps_max if self.steps_max > 1 else 0
        return event.at_iteration - (event.change == "leave") <= self.iterations[event.worker] + unknown

    def plan(self, worker: int) -> dict[str, Any]:
        """Return the last plan of ASHL for a worker: local steps, share of the data and compression ratio."""
        steps, share, ratio = (float(chosen[worker]) for chosen in self.chosen.values())
        return {
            "local_steps": None if math.isnan(steps) else int(steps),
            "data_share": None if math.isnan(share) else share,
            "ratio": None if math.isnan(ratio) else ratio,
        }

    def about(self, workers: slice, *shares: str) -> dict[str, Any]:
        """Return the fields of a summary about the iterations of one worker or of all.

        Parameters
        ----------
        workers : slice
            Workers to sum over.
        *shares : str
            Parts of an iteration whose share of the time is included.
        """
        pushes, dropped = int(self.pushes[workers].sum()), int(self.dropped[workers].sum())
        applied = pushes - dropped
        parts_s = {part: float(sums_s[workers].sum()) for part, sums_s in self.parts_s.items()}
        parts_s["between"] = float(self.between.seconds[workers].sum())
        total_s = sum(parts_s.values())
        return {
            "iterations": int(self.iterations[workers].sum()),
            "pushes": pushes if self.served else None,
            "dropped": dropped if self.served else None,
            "exchanges": None if self.served else int(self.exchanges[workers].sum()),
            "wire_bytes": int(self.wire_bytes[workers].sum()),
            "staleness_mean": int(self.staleness[workers].sum()) / applied if applied else None,
            "staleness_max": int(self.staleness_max[workers].max()) if applied else None,
            **{f"{part}_share": parts_s[part] / total_s if total_s else None for part in shares},
        }
