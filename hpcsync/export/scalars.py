"""Scalars of a run over its updates, made of the rows of its trace as they are flushed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from hpcsync.trace.schema import Outcome, Rows

BINS = 20  # of the pushes of a flush, each of which is a point


class Point(NamedTuple):
    """Scalars by name, the update (version) that they belong to, and their time in the run, in seconds."""

    scalars: dict[str, float]
    update: int
    now_s: float


class Reports:
    """Points of the rows of a run, which come table by table at each flush.

    Parameters
    ----------
    takers
        Workers that take batches (`Job.takers`); with separated layers the others train on the same samples.
    """

    def __init__(self, takers: Sequence[int]) -> None:
        self._takers = takers
        self._since_s, self._samples = math.nan, 0  # time of the last rate, and samples since then
        self._updates_s, self._versions = np.zeros(1), np.zeros(1, np.int64)

    def points(self, table: str, rows: Rows) -> Iterator[Point]:
        """Yield the points of these rows: one for each evaluation, and for each of `BINS` parts of the reports."""
        if table == "updates":
            self._updates_s = np.append(self._updates_s[-1:], rows["now_s"])
            self._versions = np.append(self._versions[-1:], rows["version"])
        elif table == "evaluations":
            for row in rows:
                scalars = {f"evaluation/{name}": float(row[name]) for name in ("loss", "accuracy")}
                yield Point(_known(scalars), int(row["version"]), float(row["now_s"]))
        elif table in ("pushes", "exchanges") and len(rows):
            for part in np.array_split(rows, min(BINS, len(rows))):
                yield self._of_part(part, has_servers=table == "pushes")

    def _of_part(self, rows: Rows, *, has_servers: bool) -> Point:
        if math.isnan(self._since_s):
            self._since_s = float(rows["begin_s"].min())  # not 0 if the run was resumed
        now_s = max(self._since_s, float(rows["now_s"].max()))
        samples = rows["batch_size"]
        applied = rows["outcome"] == Outcome.APPLIED if has_servers else np.isin(rows["worker"], self._takers)
        self._samples += int(samples[applied].sum())
        scalars = {}
        if now_s > self._since_s:
            scalars["train/samples_per_s"] = self._samples / (now_s - self._since_s)
            self._since_s, self._samples = now_s, 0
        has_loss = ~np.isnan(rows["loss"]) & (samples > 0)
        if has_loss.any():
            scalars["train/loss"] = np.average(rows["loss"][has_loss], weights=samples[has_loss])
        if not has_servers:
            at = int(np.searchsorted(self._updates_s, now_s, side="right")) - 1
            return Point(_known(scalars), int(self._versions[max(0, at)]), now_s)
        if applied.any():
            scalars["train/staleness"] = rows["staleness"][applied].mean()
        return Point(_known(scalars), int((rows["version_read"] + rows["staleness"] + applied).max()), now_s)


def _known(scalars: dict[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in scalars.items() if not np.isnan(value)}
