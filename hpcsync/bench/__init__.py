"""Benchmarks (`hpcsync bench`): the cost of each part beside the machine's own limit, measured in the same job.

A ratio from one job is more reliable than two numbers from two jobs, because machines differ and are shared. Every
figure therefore comes with its limit, which the same processes measure alternately with it.

This package imports no MPI: targets that need ranks run in a job of their own, which writes its figures to a file.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from hpcsync.bench.figures import Figure, table
from hpcsync.bench.machine import machine, versions
from hpcsync.config.errors import JobError, did_you_mean, shown
from hpcsync.mpi.transport.window_trials import reason, rehearse, serving
from hpcsync.system import gpu_selection, launcher
from hpcsync.system.interpreter import python
from hpcsync.system.namespaces import Hosts, Unavailable
from hpcsync.version import __version__


class Target(NamedTuple):
    """Benchmark that `hpcsync bench` can run.

    Attributes
    ----------
    module : str
        Module whose `measure` is called on every rank, or in this process if there are no ranks.
    title : str
        Title of the table.
    ranks : int
        Number of ranks; 0 if no MPI is needed.
    timeout_s : float
        Time limit of the job, in seconds.
    windows : int
        Number of kinds of GPU windows to measure, the fastest first, each in a job of its own since it may crash. 0 if
        the target moves no tensors in windows; `measure` then takes no transport.
    devices : sequence of str
        Devices of the target. Without ranks, `measure` takes one if there are several.
    rates : sequence of str
        For a target between hosts, the rates of their links in tc's words; one rank runs on each host, in one job per
        rate. The hosts are network namespaces of this machine, except within an allocation of several nodes, whose
        nodes and links are used as they are. Such a target is measured only if it is named.
    """

    module: str
    title: str
    ranks: int = 0
    timeout_s: float = 300.0
    windows: int = 0
    devices: Sequence[str] = ("cpu",)
    rates: Sequence[str] = ()


DEVICES = ("cpu", "cuda")
TARGETS = {
    "transfers": Target(
        "transfers", "One-sided transfers between two ranks of this node", 2, windows=3, devices=DEVICES
    ),
    "round-trip": Target(
        "round_trip", "Push, apply, grant, pull: one server, one worker", 2, 600.0, windows=1, devices=DEVICES
    ),
    "latency": Target("latency", "Round trips of a small model: one server", 4, windows=1, devices=DEVICES),
    "training": Target("gpu_training", "Training a transformer by two workers", 3, 600.0, windows=1, devices=("cuda",)),
    "allreduce": Target("allreduce", "Training on the mean gradient of all ranks", 4, 600.0),
    "hosts": Target("between_hosts", "Training between four hosts", 4, 600.0, rates=("1gbit", "200mbit")),
    "decisions": Target("decisions", "One decision of a paradigm"),
    "tracing": Target("tracing", "One traced event"),
    "prediction": Target("prediction", "Predicted speeds of a worker, and the cost of the predictors"),
    "compression": Target("compression", "Codecs of contributions", devices=DEVICES),
    "events": Target("event_loop", "Events of the simulator's loop"),
    "simulation": Target("simulation", "Whole simulations"),
}


class BenchError(Exception):
    """A benchmark's own job failed."""


def main(
    targets: Sequence[str],
    path: str | Path | None = None,
    device: str = "cpu",
    compared: str | Path | None = None,
) -> int:
    """Run benchmarks and print a table for each.

    Parameters
    ----------
    targets
        Names of the benchmarks; none for all that the device allows.
    path
        File for all results, as JSON.
    device
        "cpu" or "cuda".
    compared
        File of earlier results, with which these are compared.

    Returns
    -------
    int
        Exit status.

    Raises
    ------
    JobError
        Before any measurement, for an unknown target, a GPU that cannot be used, or a file that cannot be written or
        read.
    """
    chosen = parse(targets, device)
    if any(TARGETS[name].ranks for name in chosen):
        launcher.refuse_without_mpi()
    earlier = None if compared is None else read(compared)
    if device == "cuda" and (why := gpu_selection.found().why):
        raise JobError(f"--device cuda: {why}")
    if path is not None:
        try:
            Path(path).open("a").close()
        except OSError as error:
            raise JobError(f"--json {path}: {error.strerror}") from None
    console = Console(highlight=False)
    about = {"machine": machine(device), "versions": versions(device), "device": device}
    console.print(f"hpcsync {__version__} on {about['machine']}\n{about['versions']}")
    if earlier is not None:
        line = f"compared with {compared}: hpcsync {earlier.hpcsync} on {earlier.machine}"
        console.print(line, markup=False, soft_wrap=True)
    kinds = ["host"]
    if device == "cuda":
        kinds, about["windows"] = windows()
        console.print(f"windows: {about['windows']}", markup=False)
    measured: dict[str, Any] = {**about, "hpcsync": __version__, "targets": {}}
    for name in chosen:
        before = None if earlier is None else earlier.figures.get(name, [])
        if found := _measured(name, device, kinds, console, before):
            measured["targets"][name] = found
        if path is not None:  # at once: the next target may be interrupted
            Path(path).write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")
    return int(len(measured["targets"]) < len(chosen))


class Results(NamedTuple):
    """Results in a file that `main` has written: version, machine, and the figures of each target."""

    hpcsync: str
    machine: str
    figures: dict[str, list[Figure]]


def read(path: str | Path) -> Results:
    """Return the results in a file.

    Raises
    ------
    JobError
        If the file cannot be read, or holds no such results.
    """
    names = {each.name for each in fields(Figure)}
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        figures = {
            name: [Figure(**{key: each[key] for key in names}) for each in target["figures"]]
            for name, target in found["targets"].items()
        }
        return Results(str(found["hpcsync"]), str(found["machine"]), figures)
    except OSError as error:
        raise JobError(f"--compare {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise JobError(f"--compare {path}: must be a file that hpcsync bench --json has written") from None


def _measured(
    name: str, device: str, kinds: Sequence[str], console: Console, earlier: Sequence[Figure] | None = None
) -> dict[str, Any]:
    """Measure one target and print its table; return the results for the file, empty if nothing could be measured.

    The failure of one kind of window, or of links, among several is a result.
    """
    target = TARGETS[name]
    library, figures, failed = "", [], {}
    for kind in _links(target) or kinds[: target.windows or 1]:
        try:
            library, found = measure(target, device, kind)
            figures += found
        except BenchError as error:
            console.print(f"\n{name}{f', {kind}' if target.rates or device == 'cuda' else ''}: {error}", markup=False)
            failed[kind] = str(error)
    if not figures:
        return {}
    console.print()
    console.print(table(f"{name}: {target.title}" + (f" ({library})" if library else ""), figures, earlier))
    return {"library": library, "figures": [figure.as_dict() for figure in figures], "failed": failed}


def parse(targets: Sequence[str], device: str = "cpu") -> list[str]:
    """Return the names of the targets to measure on this device, by default all that it allows on one host.

    Raises
    ------
    JobError
        For an unknown device or target.
    """
    if device not in DEVICES:
        raise JobError(f"--device {shown(device)}: must be cpu or cuda")
    allowed = [name for name, target in TARGETS.items() if device in target.devices]
    for name in targets:
        if name not in allowed:
            meant = "" if name in TARGETS else did_you_mean(name, allowed)
            raise JobError(f"bench {shown(name)}: must be one of {', '.join(allowed)} with --device {device}{meant}")
    return list(dict.fromkeys(targets)) or [name for name in allowed if not TARGETS[name].rates]


def _links(target: Target) -> Sequence[str]:
    """Return the rates of the links between which to measure; "as it is" for those of an allocation."""
    return target.rates if launcher.on_one_node(os.environ) else target.rates and ("as it is",)


def windows() -> tuple[list[str], str]:
    """Return the kinds of windows that work for this node's GPUs, the fastest first, and the results of every kind.

    Raises
    ------
    JobError
        If none works.
    """
    found = rehearse()
    if not (kinds := serving(found)):
        raise JobError(f"--device cuda: no kind of window works: {reason(found)}")
    return kinds, reason(found, kinds[0])


def measure(target: Target, device: str = "cpu", kind: str = "host") -> tuple[str, list[Figure]]:
    """Run one benchmark.

    Parameters
    ----------
    target
        Benchmark to run.
    device
        "cpu" or "cuda".
    kind
        Kind of window, or rate of the links between hosts.

    Returns
    -------
    library : str
        MPI library, "" for a target that needs none.
    figures : list of Figure
        Results; on a GPU their names include the kind of window, between hosts the rate of the links.

    Raises
    ------
    BenchError
        If the benchmark's job fails.
    """
    if target.ranks == 0:
        module = importlib.import_module(f"{__name__}.{target.module}")
        return "", module.measure(device) if len(target.devices) > 1 else module.measure()
    with tempfile.TemporaryDirectory() as folder:
        result, output = Path(folder) / "result.json", Path(folder) / "output"
        argv = python("-m", "mpi4py", "-m", f"{__name__}.rank", target.module, str(result))
        argv += [device, kind] if target.windows else []
        with open(output, "wb") as file, _environment(target, kind) as given:
            ended = launcher.launch(target.ranks, argv, timeout_s=target.timeout_s, output=file, given=given)
        if ended.signum is not None:
            raise KeyboardInterrupt
        if ended.status != 0 or not result.exists():
            how = f"not finished after {target.timeout_s:.0f} s" if ended.timed_out else f"status {ended.status}"
            raise BenchError(f"{how}\n{output.read_text(errors='replace').strip()}")
        found = json.loads(result.read_text())
    figures = [Figure(**figure) for figure in found["figures"]]
    if device == "cuda" or target.rates:
        figures = [replace(figure, what=f"{kind}: {figure.what}") for figure in figures]
    return found["library"], figures


@contextlib.contextmanager
def _environment(target: Target, rate: str) -> Iterator[dict[str, str] | None]:
    """Yield an environment that starts each rank on its own host, with links of this rate; None for that of here."""
    if rate not in target.rates:
        yield None
        return
    try:
        hosts = Hosts(target.ranks, rate)
    except Unavailable as why:
        raise BenchError(str(why)) from None
    with hosts:
        line = hosts.inside("head", Path.cwd(), hosts.mpiexec(range(1, target.ranks + 1)))
        yield {**os.environ, **hosts.environ(), "MPIEXEC": shlex.join(line)}
