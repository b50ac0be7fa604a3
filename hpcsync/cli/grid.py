"""Grids of jobs: every combination of values of some keys, each run in a folder of its own."""

from __future__ import annotations

import itertools
import json
import math
import re
import subprocess
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from datetime import date, time
from pathlib import Path
from typing import Any, NamedTuple

from hpcsync.config import job as jobs
from hpcsync.config.errors import JobError
from hpcsync.config.job import Job
from hpcsync.system.atomic_files import naming
from hpcsync.system.interpreter import python

CHOICES = (  # keys among whose values a user chooses; all others describe what is trained and on which cluster
    "optimizer",
    "paradigm",
    "batches",
    "compression",
    "checkpoint",
    "workload.batch_size",
    "cluster.servers",
    "cluster.window",
    "cluster.placement",
    "cluster.colocated",
    "cluster.on_death",
)


class Variant(NamedTuple):
    """Variant of a job, in short words.

    Attributes
    ----------
    condition
        Keys that describe the task and the cluster; only variants under the same condition are compared.
    label
        Keys of `CHOICES`.
    """

    condition: str
    label: str

    def __str__(self) -> str:
        return f"{self.label} {self.condition}".strip()


def is_choice(key: str) -> bool:
    """Return whether variants that differ in this key are compared with each other."""
    return any(key == choice or key.startswith(f"{choice}.") for choice in CHOICES)


def combinations(option: str, axes: Sequence[str], example: str = "seed=[1, 2, 3]") -> list[tuple[str, ...]]:
    """Return the overrides of every combination of values, with the last key changing fastest.

    Parameters
    ----------
    option : str
        Option of the command line that the axes are from, for messages.
    axes : sequence of str
        Keys with their values, ``KEY=[VALUE, ...]``.
    example : str
        An axis that would be valid, for messages.

    Raises
    ------
    JobError
        For an axis without an array of values, or with the same value twice, whose runs would be the same.
    """
    if not axes:
        return []
    found: dict[str, list[str]] = {}
    for text in axes:
        key, _, values = text.partition("=")
        try:
            parsed = tomllib.loads(f"value = {values}")["value"]
        except tomllib.TOMLDecodeError:
            parsed = None
        if not isinstance(parsed, list) or not parsed:
            raise JobError(f"{option} {text}: must be KEY=[VALUE, ...], such as {example}")
        if key.strip() in found:
            raise JobError(f"{option} {text}: {key.strip()} must be given once")
        if twice := [value for i, value in enumerate(parsed) if value in parsed[:i]]:
            raise JobError(f"{option} {text}: must be different values; {in_one_line(twice[0])} is given twice")
        found[key.strip()] = [f"{key}={in_one_line(value)}" for value in parsed]
    return list(itertools.product(*found.values()))


def refuse_same(option: str, names: Iterable[str], given: Iterable[Job]) -> None:
    """Raise JobError for two jobs that are the same, such as of a paradigm by name and by a table of its defaults."""
    before: dict[str, str] = {}
    for name, job in zip(names, given, strict=True):
        if (text := job.to_toml()) in before:
            raise JobError(f"{option}: {before[text]} and {name} must differ: they are the same job")
        before[text] = name


def in_one_line(value: Any) -> str:
    """Return a value in TOML, in one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)[1:-1]} = {in_one_line(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(in_one_line, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, date | time):
        return value.isoformat()
    return json.dumps(value, ensure_ascii=False)


def paradigm_table(text: str) -> dict[str, Any]:
    """Return the table of a paradigm from its name or from TOML, as `--paradigm` takes them. Raises JobError."""
    if re.fullmatch(r"[a-z-]+", text):
        return {"name": text}
    try:
        table = tomllib.loads(f"paradigm = {text}")["paradigm"]
    except tomllib.TOMLDecodeError:
        table = None
    if not isinstance(table, dict):
        raise JobError(f'--paradigm {text}: must be a name, or a table such as {{name = "k-sync", k = 3}}')
    return table


def variant(overrides: Sequence[str]) -> Variant:
    """Return overrides in short words, such as ``Variant("seconds=[0.02,0.04]", "ssp staleness=3")``."""
    given = [_parsed(override) for override in overrides]
    condition = " ".join(_short(key, value) for key, value in given if not is_choice(key))
    return Variant(condition, label(override for override in overrides if is_choice(_parsed(override)[0])) or "job")


def label(overrides: Iterable[str]) -> str:
    """Return overrides in short words: ``ssp staleness=3 seconds=[0.02,0.04]``."""
    return " ".join(_short(*_parsed(override)) for override in overrides)


def _short(key: str, value: Any) -> str:
    if isinstance(value, dict):
        kind = value.get("name", value.get("model"))
        rest = [f"{k}={_compact(v)}" for k, v in value.items() if k not in ("name", "model")]
        return " ".join([str(kind), *rest] if kind is not None else rest)
    if isinstance(value, str):
        return value
    return f"{key.rpartition('.')[2]}={_compact(value)}"


def _compact(value: Any) -> str:
    return value if isinstance(value, str) else in_one_line(value).replace(", ", ",").replace(" = ", "=")


def at_an_end(overrides: Sequence[str], axes: Sequence[str]) -> list[str]:
    """Return those overrides with the smallest or largest of three or more numbers of their axis."""
    found = []
    for override in overrides:
        key, value = _parsed(override)
        values = next(values for other, values in map(_parsed, axes) if other == key)
        if len(values) >= 3 and all(isinstance(each, int | float) for each in values):
            found += [f"{key} = {value}"] if value in (min(values), max(values)) else []
    return found


def _parsed(text: str) -> tuple[str, Any]:
    key, _, value = text.partition("=")
    return key.strip(), tomllib.loads(f"value = {value}")["value"]


class Run(NamedTuple):
    """One run of a grid."""

    variant: Variant
    seed: int
    overrides: tuple[str, ...]
    job: Job
    folder: Path


def plan(
    path: Path, overrides: Sequence[str], variants: Sequence[tuple[str, ...]], seeds: Iterable[int], out: Path
) -> list[Run]:
    """Return the runs of a grid: every variant with every seed.

    Parameters
    ----------
    path : path
        Job file.
    overrides : sequence of str
        Overrides of all runs.
    variants : sequence of tuple of str
        Overrides of each variant.
    seeds : iterable of int
        Seeds, counted from the seed of the job.
    out : path
        Folder of the grid; each run has a folder in it.

    Raises
    ------
    JobError
        If a job is not valid, or two variants are the same.
    """
    runs, seeds = [], list(seeds)
    for varied in variants:
        name = variant(varied)
        first = jobs.load(path, [*overrides, *varied]).seed
        for seed in (first + i for i in seeds):
            given = (*overrides, *varied, f"seed={seed}")
            folder = out / re.sub(r"[^\w.=+-]+", "-", str(name)).strip("-")[:100] / f"seed-{seed}"
            runs.append(Run(name, seed, given, jobs.load(path, given), folder))
    refuse_same("--vary", [str(run.variant) for run in runs], [run.job for run in runs])
    by_folder: dict[Path, Run] = {}
    for run in runs:
        if (other := by_folder.setdefault(run.folder, run)) is not run:
            raise JobError(f"--vary: {other.variant} and {run.variant} must differ, in their first 100 characters")
    return runs


def check(path: Path, runs: Iterable[Run], *, simulated: bool) -> None:
    """Raise JobError for a job that cannot run, or a folder that holds a run of another job or engine."""
    from hpcsync.config.user_code import import_beside
    from hpcsync.core.job_validation import check as check_job
    from hpcsync.run_dir import layout

    import_beside(path)
    runs, checked = [*runs], set()
    for run in runs:
        if not simulated:
            jobs.refuse_simulated(run.job)
        if run.variant not in checked:
            checked.add(run.variant)
            check_job(run.job)
        _refuse_other_run(run, simulated=simulated)
    for run in runs:
        layout.create_folder(run.folder.parent)


def _refuse_other_run(run: Run, *, simulated: bool) -> None:
    from hpcsync.run_dir import layout

    file = run.folder / "job.toml"
    if not file.exists():
        return
    try:
        before = Job.from_toml(file.read_text(encoding="utf-8"))
    except JobError as error:
        raise JobError(f"{file}: {error}") from None
    if jobs.used(before) != jobs.used(layout.as_begun(run.job, before)):
        raise JobError(f"--out: {run.folder} holds a run of another job; give another folder")
    if _engine(run.folder) not in (None, "simulator" if simulated else "mpi"):
        other = "a run on MPI ranks" if simulated else "a simulation"
        raise JobError(f"--out: {run.folder} holds {other}; give another folder")


def _engine(folder: Path) -> str | None:
    """Return what has made the run in a folder; None if its trace does not say so."""
    from hpcsync.trace.reader import TraceError, opened

    try:
        with opened(folder) as trace:
            return trace.attributes.get("engine")
    except TraceError:
        return None


def finished(run: Run) -> bool:
    """Return whether the run has ended."""
    return (run.folder / "summary.json").exists()


def carry_out(path: Path, runs: Iterable[Run], *, simulated: bool, at_once: int) -> Iterator[tuple[Run, int]]:
    """Run each of these in a process of its own; yield each run that has ended with its exit status.

    What a run prints is in the file beside its folder that ends in ``.log``. If this ends early, the processes are
    ended too.
    """
    processes: list[subprocess.Popen[bytes]] = []
    with ThreadPoolExecutor(at_once if simulated else 1) as pool:
        ended = {pool.submit(_execute, path, run, processes, simulated=simulated): run for run in runs}
        try:
            for future in as_completed(ended):
                yield ended[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            while not all(future.done() for future in ended):  # one may just be starting its process
                while processes:
                    processes.pop().terminate()  # once; those that have ended already stay as they are
                wait(ended, 0.1)
            raise


def _execute(path: Path, run: Run, processes: list[subprocess.Popen[bytes]], *, simulated: bool) -> int:
    from hpcsync.run_dir import layout
    from hpcsync.system.parent_death import end_with_parent

    run.folder.parent.mkdir(parents=True, exist_ok=True)
    command = python("-m", "hpcsync", "simulate" if simulated else "run", str(path))
    command += [word for override in run.overrides for word in ("--set", override)]
    command += ["--out", str(run.folder), *(["--resume"] if not simulated and run.folder.exists() else [])]
    with naming(said := run.folder.with_name(f"{run.folder.name}.log")):
        log = said.open("a", encoding="utf-8")
    with log:
        try:
            if simulated and run.folder.exists() and not layout.cleared(run.folder):
                return 0
        except JobError as error:  # another process simulates it now
            log.write(f"hpcsync: {error}\n")
            return 2
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=end_with_parent()
        )
    processes.append(process)
    return process.wait()  # in the thread with which it ends
