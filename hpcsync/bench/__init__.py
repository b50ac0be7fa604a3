"""`hpcsync bench`: what each part costs, beside the machine's own limit, measured in the same job.

A ratio from one job says more than two numbers from two: machines differ, and are shared. So every figure comes with
its limit, measured by the same processes in turn with it.

This imports no MPI: targets that need ranks run in a job of their own, which writes its figures into a file.
"""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from hpcsync import __version__, launcher
from hpcsync.bench.figures import Figure, table
from hpcsync.bench.machine import machine, versions
from hpcsync.job_errors import JobError, did_you_mean, shown


class Target(NamedTuple):
    """module: has `measure`, called on every rank, or in this process if there are no ranks."""

    module: str
    title: str
    ranks: int = 0
    timeout_s: float = 300.0


TARGETS = {
    "transfers": Target("transfers", "One-sided transfers between two ranks of this node", 2),
    "round-trip": Target("round_trip", "Push, apply, grant, pull: one server, one worker", 2),
    "latency": Target("latency", "Round trips of a small model: one server", 4),
    "allreduce": Target("allreduce", "Training on the mean gradient of all ranks", 4, 600.0),
    "decisions": Target("decisions", "One decision of a paradigm"),
    "tracing": Target("tracing", "One traced event"),
    "events": Target("events", "Events of the simulator's loop"),
    "simulation": Target("simulation", "Whole simulations"),
}


class BenchError(Exception):
    """A measurement's own job did not end well."""


def main(targets: Sequence[str], path: str | Path | None = None) -> int:
    """Measure these, or everything, and print a table for each; into `path` goes everything as JSON. Exit status.

    Raises JobError for an unknown target, or a file that cannot be written, before anything is measured.
    """
    chosen = parse(targets)
    if path is not None:
        try:
            Path(path).touch()
        except OSError as error:
            raise JobError(f"--json {path}: {error.strerror}") from None
    console = Console(highlight=False)
    console.print(f"hpcsync {__version__} on {machine()}\n{versions()}")
    measured: dict[str, Any] = {"machine": machine(), "versions": versions(), "hpcsync": __version__, "targets": {}}
    status = 0
    for name in chosen:
        target = TARGETS[name]
        try:
            library, figures = measure(target)
        except BenchError as error:
            console.print(f"\n{name}: {error}", markup=False)
            status = 1
            continue
        console.print()
        console.print(table(f"{name}: {target.title}" + (f" ({library})" if library else ""), figures))
        measured["targets"][name] = {"library": library, "figures": [figure.as_dict() for figure in figures]}
    if path is not None:
        Path(path).write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")
    return status


def parse(targets: Sequence[str]) -> list[str]:
    """The names of what to measure, all of them for none. Raises JobError."""
    for name in targets:
        if name not in TARGETS:
            raise JobError(f"bench {shown(name)}: must be one of {', '.join(TARGETS)}{did_you_mean(name, TARGETS)}")
    return list(dict.fromkeys(targets)) or list(TARGETS)


def measure(target: Target) -> tuple[str, list[Figure]]:
    """The MPI library ("" for a target that needs none), and the figures. Raises BenchError."""
    if target.ranks == 0:
        return "", importlib.import_module(f"{__name__}.{target.module}").measure()
    with tempfile.TemporaryDirectory() as folder:
        result, output = Path(folder) / "result.json", Path(folder) / "output"
        argv = ["python", "-m", "mpi4py", "-m", f"{__name__}.rank", target.module, str(result)]
        with open(output, "wb") as file:
            ended = launcher.launch(target.ranks, argv, timeout_s=target.timeout_s, output=file)
        if ended.signum is not None:
            raise KeyboardInterrupt
        if ended.status != 0 or not result.exists():
            raise BenchError(f"status {ended.status}\n{output.read_text(errors='replace').strip()}")
        found = json.loads(result.read_text())
    return found["library"], [Figure(**figure) for figure in found["figures"]]
