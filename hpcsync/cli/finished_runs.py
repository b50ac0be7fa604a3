"""Finished runs in folders, grouped into variants, with the keys of the job file in which they differ as names."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcsync.cli import grid
from hpcsync.config import job as jobs
from hpcsync.config.errors import JobError
from hpcsync.config.overrides import default_servers
from hpcsync.system.atomic_files import below, is_folder

if TYPE_CHECKING:
    from hpcsync.report.summary import Summary


class Read(NamedTuple):
    """Run whose trace has been read, and when it began: in ISO 8601, and for equal ones the time of the file."""

    trace: Path
    job: jobs.Job
    summary: Summary
    begun: tuple[str, float]


LINK_OF_SERVERS = "cluster.network.server_bandwidth_gbit"  # a condition of those runs only that have servers

Found = dict[grid.Variant, dict[int, Read]]  # runs by seed


def grouped(paths: Iterable[Path]) -> Found:
    """Return the finished runs in these folders, by variant and seed.

    Runs are of one variant if their jobs differ in seed and name only. Runs that have not finished, and all but the
    newest of those with the same job and seed, are left out and counted in a line on standard error.

    Raises
    ------
    JobError
        If a folder has no trace, or a trace cannot be read.
    """
    from hpcsync.trace.reader import TraceInUse

    found: dict[str, tuple[dict[str, Any], dict[int, Read]]] = {}
    unfinished, older = [], []
    for path in traces(paths):
        try:
            run = read(path)
        except TraceInUse:  # it is under way
            unfinished.append(str(path))
            continue
        if run.summary.status != "finished":
            unfinished.append(str(path))
            continue
        keys = {key: text for key, text in _keys(run.job, run.summary.engine) if key != "name"}
        runs = found.setdefault(repr(keys), (keys, {}))[1]
        other = runs.get(run.job.seed, run)
        old, new = sorted((other, run), key=lambda each: each.begun)
        runs[run.job.seed] = new
        if not old.trace.samefile(new.trace):
            older.append(f"{old.trace}, older than {new.trace}")
    _print_left_out(unfinished, "not finished")
    _print_left_out(older, "the job and seed of a newer one")
    variants = _named([keys for keys, _ in found.values()])
    return dict(zip(variants, (runs for _, runs in found.values()), strict=True))


def _print_left_out(runs: Sequence[str], why: str) -> None:
    if runs:
        have = "1 run has" if len(runs) == 1 else f"{len(runs)} runs have"
        are = "is" if len(runs) == 1 else "are"
        print(f"hpcsync: {have} {why} and {are} left out: {runs[0]}", file=sys.stderr)


def traces(paths: Iterable[Path]) -> list[Path]:
    """Return the traces in these folders. Raises JobError for a folder without one."""
    return [trace for path in paths for trace in _traces(path)]


def _traces(path: Path) -> list[Path]:
    if not is_folder(path):
        return [path]
    found = [path / "trace.h5"] if (path / "trace.h5").exists() else below(path, "trace.h5")
    if not found:
        raise JobError(f"{path}: must be a trace, or a folder with the traces of runs")
    return found


def read(path: Path) -> Read:
    """Read and summarize a trace. Raises JobError if that is not possible."""
    from hpcsync.report.summary import summarize
    from hpcsync.trace.reader import opened

    with opened(path) as trace:
        begun = str(trace.attributes.get("created", "")), trace.path.stat().st_mtime
        return Read(trace.path, trace.job, summarize(trace), begun)


def _keys(job: jobs.Job, engine: str | None) -> Iterable[tuple[str, str]]:
    """Return the keys of a job with their values in TOML, without those of a seed, and what changes no run.

    This is a number of servers that is the default, and a prediction.
    """
    table = jobs.of_any_seed(job)
    if table["cluster"].get("servers") == default_servers(table["paradigm"]):
        del table["cluster"]["servers"]
    return [*_flat(table), ("engine", str(engine))]


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else grid.in_one_line(value).replace(", ", ",")


def _named(variants: Sequence[Mapping[str, str]]) -> list[grid.Variant]:
    """Return the keys in which each variant differs; a paradigm's options from others with the same paradigm."""
    found = []
    for keys in variants:
        condition: list[str] = []
        choice: list[str] = []
        for key, value in keys.items():
            alike = [other for other in variants if not _option_of_another(key, keys, other)]
            if key == LINK_OF_SERVERS:
                alike = [other for other in alike if default_servers({"name": other["paradigm.name"]})]
            if any(other.get(key) != value for other in alike):
                word = value if key.endswith(".name") or key == "engine" else f"{key.rpartition('.')[2]}={value}"
                (choice if grid.is_choice(key) else condition).append(word)
        words = (" ".join(sorted(each, key=lambda word: "=" in word)) for each in (condition, choice))
        found.append(grid.Variant(next(words), next(words) or "job"))
    return [
        each if found.count(each) == 1 else each._replace(label=f"{each.label} ({found[:i].count(each) + 1})")
        for i, each in enumerate(found)
    ]


def _option_of_another(key: str, keys: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Return whether this key is an option of a table whose kind the other variant does not share."""
    folder = key.rpartition(".")[0]
    kinds = [f"{folder}.{word}" for word in ("name", "model")]
    return any(kind in keys and kind != key and keys[kind] != other.get(kind) for kind in kinds)
