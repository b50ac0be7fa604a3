"""Traces for the tests of exports, and the files of runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from hpcsync.trace.reader import Trace
from tests.unit.html_report import pages
from tests.unit.trace import peer_recorder, recorder

LAYERS = {"name": "stanza", "cut": "classifier", "fc_share": 0.5}
SIZES = {"name": "timing", "parameters": 10, "classifier": 5, "activations": 1}
KINDS = ("bsp", "asp", "dssp", "k-sync", "easgd", "permutation", "local-sgd", "stanza")


def trace(kind: str) -> Trace:
    """Return a trace in memory of a run with or without servers, or with separated layers."""
    if kind == "stanza":
        return peer_recorder.record(LAYERS, (1.0, 1.3), workload=SIZES, samples=640)
    return (peer_recorder if kind in ("permutation", "local-sgd") else recorder).record(kind)


class InSlices(Trace):
    """A trace in memory that is read in slices of `n_rows` rows, as that of a file is."""

    n_rows: int

    def slices(self, table: str) -> Iterator[np.ndarray]:
        rows = self.tables[table]
        for begin in range(0, max(len(rows), 1), self.n_rows):
            yield rows[begin : begin + self.n_rows]


def in_slices(trace: Trace, n_rows: int) -> Trace:
    """Return the same trace, read in slices."""
    found = InSlices(trace.path, trace.attributes, trace.tables)
    object.__setattr__(found, "n_rows", n_rows)
    return found


def simulated(folder: Path, paradigm: str = '{name = "ssp", staleness = 1}') -> Path:
    """Return the folder of a run in virtual time."""
    return pages.simulated(folder, f"paradigm={paradigm}", "stop={updates = 30}")
