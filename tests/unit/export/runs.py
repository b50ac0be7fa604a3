"""Traces for the tests of exports, and the files of runs."""

from __future__ import annotations

from pathlib import Path

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


def simulated(folder: Path, paradigm: str = '{name = "ssp", staleness = 1}') -> Path:
    """Return the folder of a run in virtual time."""
    return pages.simulated(folder, f"paradigm={paradigm}", "stop={updates = 30}")
