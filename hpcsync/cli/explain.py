"""Command `hpcsync explain`: why a run took its time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from hpcsync.cli import grid
from hpcsync.config.errors import JobError
from hpcsync.system import garbage
from hpcsync.system.standard_output import at_least_80_columns

if TYPE_CHECKING:
    from hpcsync.report.explanation import Explanation, WhatIf


def main(path: Path, *, as_json: bool, simulated: bool, paradigms: Sequence[str] = ()) -> int:
    """Explain the run at this path; return the exit status.

    Parameters
    ----------
    path
        A trace, or the folder of a run.
    as_json
        Whether all numbers are printed as JSON.
    simulated
        Whether the run is simulated with other times.
    paradigms
        Other paradigms to simulate: names, or tables in TOML.

    Raises
    ------
    JobError
        If the trace cannot be read, or for a paradigm that is none, or that would not be simulated.
    """
    if paradigms and not simulated:
        raise JobError("--paradigm: must be left out with --no-what-if, with which nothing is simulated")
    others = [grid.paradigm_table(text) for text in paradigms]
    with garbage.loading():
        from hpcsync.report.explanation import explain, sentences, view
        from hpcsync.trace.reader import opened

    what_if, reason = None, ""
    with opened(path) as trace:
        trace.verify()
        found = explain(trace)
        if simulated:
            from hpcsync.simulator.what_if import NotReplayed, study

            try:
                what_if = study(trace, others)
            except NotReplayed as error:
                reason = f"Not simulated with other times: {error}."
    lines = [*sentences(found, what_if), *([reason] if reason else [])]
    if as_json:
        print(json.dumps(_numbers(found, what_if, lines), indent=1, allow_nan=False))
    else:
        at_least_80_columns(Console(highlight=False)).print(view(found, lines, what_if))
    return 0


def _numbers(found: Explanation, what_if: WhatIf | None, lines: list[str]) -> dict[str, Any]:
    """Return everything that is known, with None for numbers that are not finite."""
    from hpcsync.report.between import PARTS
    from hpcsync.report.live import known

    waits = found.waits
    between = waits.between_s.tocoo()
    pairs = zip(between.row.tolist(), between.col.tolist(), between.data.tolist(), strict=True)
    numbers: dict[str, Any] = {
        "sentences": lines,
        "paradigm": found.paradigm,
        "duration_s": found.duration_s,
        "workers": [
            {
                "worker": worker,
                "host": host,
                **{f"{part}_s": float(found.parts_s[worker, i]) for i, part in enumerate(PARTS)},
                "between_s": float(found.between_s[worker]),
                "iteration_s": known(found.iteration_s[worker]),
                "slowness": known(found.slowness[worker]),
                "caused_s": float(waits.caused_s[worker]),
                "timed_s": float(waits.timed_s[worker]),
                "ended_s": float(waits.ended_s[worker]),
                "unknown_s": float(waits.unknown_s[worker]),
                "messages_s": float(waits.messages_s[worker]),
            }
            for worker, host in enumerate(found.hosts)
        ],
        "waits": [{"worker": row, "for": column, "seconds": seconds} for row, column, seconds in pairs],
    }
    if what_if is not None:
        numbers["what_if"] = {
            **what_if._asdict(),
            "slowdown": what_if.slowdown,
            "slowdown_by_worker": {str(worker): what_if.of_worker(worker) for worker in what_if.without_worker_s},
            "slowdown_by_operation": {name: what_if.of_operation(name) for name in what_if.without_operation_s},
        }
    return numbers
