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
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from hpcsync.bench.figures import Figure, table
from hpcsync.bench.machine import machine, versions
from hpcsync.config.errors import JobError, did_you_mean, shown
from hpcsync.mpi.transport.window_trials import reason, rehearse, serving
from hpcsync.system import gpu_selection, launcher
from hpcsync.version import __version__


class Target(NamedTuple):
    """module: has `measure`, called on every rank, or in this process if there are no ranks.

    windows: how many kinds of a GPU's windows are measured, each in a job of its own since it may crash, those first
    that are fastest; 0: no tensors move in windows, and `measure` is not told how.
    """

    module: str
    title: str
    ranks: int = 0
    timeout_s: float = 300.0
    windows: int = 0


TARGETS = {
    "transfers": Target("transfers", "One-sided transfers between two ranks of this node", 2, windows=3),
    "round-trip": Target("round_trip", "Push, apply, grant, pull: one server, one worker", 2, 600.0, windows=1),
    "latency": Target("latency", "Round trips of a small model: one server", 4, windows=1),
    "allreduce": Target("allreduce", "Training on the mean gradient of all ranks", 4, 600.0),
    "decisions": Target("decisions", "One decision of a paradigm"),
    "tracing": Target("tracing", "One traced event"),
    "prediction": Target("prediction", "Predicted speeds of a worker, and what the predictor takes"),
    "compression": Target("compression", "Codecs of what is pushed"),
    "events": Target("events", "Events of the simulator's loop"),
    "simulation": Target("simulation", "Whole simulations"),
}


class BenchError(Exception):
    """A measurement's own job did not end well."""


def main(targets: Sequence[str], path: str | Path | None = None, device: str = "cpu") -> int:
    """Measure these, or all that the device allows, and print a table for each; into `path` goes everything as JSON.

    Returns the exit status. Raises JobError for an unknown target, a GPU that is not there, or a file that cannot be
    written, before anything is measured.
    """
    chosen = parse(targets, device)
    if device == "cuda" and (why := gpu_selection.found().why):
        raise JobError(f"--device cuda: {why}")
    if path is not None:
        try:
            Path(path).touch()
        except OSError as error:
            raise JobError(f"--json {path}: {error.strerror}") from None
    console = Console(highlight=False)
    about = {"machine": machine(device), "versions": versions(device), "device": device}
    console.print(f"hpcsync {__version__} on {about['machine']}\n{about['versions']}")
    kinds = ["host"]
    if device == "cuda":
        kinds, about["windows"] = windows()
        console.print(f"windows: {about['windows']}", markup=False)
    measured: dict[str, Any] = {**about, "hpcsync": __version__, "targets": {}}
    for name in chosen:
        if found := _measured(name, device, kinds, console):
            measured["targets"][name] = found
    if path is not None:
        Path(path).write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")
    return int(len(measured["targets"]) < len(chosen))


def _measured(name: str, device: str, kinds: Sequence[str], console: Console) -> dict[str, Any]:
    """For the file, what the console shows of one target; empty if nothing could be measured.

    That one kind of window of several fails is a finding.
    """
    target = TARGETS[name]
    library, figures, failed = "", [], {}
    for kind in kinds[: target.windows or 1]:
        try:
            library, found = measure(target, device, kind)
            figures += found
        except BenchError as error:
            console.print(f"\n{name}{'' if device == 'cpu' else f', {kind}'}: {error}", markup=False)
            failed[kind] = str(error)
    if not figures:
        return {}
    console.print()
    console.print(table(f"{name}: {target.title}" + (f" ({library})" if library else ""), figures))
    return {"library": library, "figures": [figure.as_dict() for figure in figures], "failed": failed}


def parse(targets: Sequence[str], device: str = "cpu") -> list[str]:
    """The names of what to measure on this device, all that it allows for none. Raises JobError."""
    if device not in ("cpu", "cuda"):
        raise JobError(f"--device {shown(device)}: must be cpu or cuda")
    allowed = [name for name, target in TARGETS.items() if device == "cpu" or target.windows]
    where = "" if device == "cpu" else " with --device cuda"
    for name in targets:
        if name not in allowed:
            must = f"must be one of {', '.join(allowed)}{where}{did_you_mean(name, allowed)}"
            raise JobError(f"bench {shown(name)}: {must}")
    return list(dict.fromkeys(targets)) or allowed


def windows() -> tuple[list[str], str]:
    """The kinds of windows that serve for this node's GPUs, the fastest first, and what was found out about every kind.

    Raises JobError if none does.
    """
    found = rehearse()
    if not (kinds := serving(found)):
        raise JobError(f"--device cuda: no kind of window serves: {reason(found)}")
    return kinds, reason(found, kinds[0])


def measure(target: Target, device: str = "cpu", kind: str = "host") -> tuple[str, list[Figure]]:
    """The MPI library ("" for a target that needs none), and the figures, which on a GPU name the kind of window.

    Raises BenchError.
    """
    if target.ranks == 0:
        return "", importlib.import_module(f"{__name__}.{target.module}").measure()
    with tempfile.TemporaryDirectory() as folder:
        result, output = Path(folder) / "result.json", Path(folder) / "output"
        argv = ["python", "-m", "mpi4py", "-m", f"{__name__}.rank", target.module, str(result)]
        argv += [device, kind] if target.windows else []
        with open(output, "wb") as file:
            ended = launcher.launch(target.ranks, argv, timeout_s=target.timeout_s, output=file)
        if ended.signum is not None:
            raise KeyboardInterrupt
        if ended.status != 0 or not result.exists():
            how = f"no end after {target.timeout_s:.0f} s" if ended.timed_out else f"status {ended.status}"
            raise BenchError(f"{how}\n{output.read_text(errors='replace').strip()}")
        found = json.loads(result.read_text())
    figures = [Figure(**figure) for figure in found["figures"]]
    if device == "cuda":
        figures = [replace(figure, what=f"{kind}: {figure.what}") for figure in figures]
    return found["library"], figures
