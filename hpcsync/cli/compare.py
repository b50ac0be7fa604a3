"""Command `hpcsync compare`: variants of a job over seeds, run as a grid or read from finished runs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcsync.cli import grid
from hpcsync.config import job as jobs
from hpcsync.config.errors import JobError
from hpcsync.system.atomic_files import whole
from hpcsync.system.signals import Interrupted, interrupt, on_signals

if TYPE_CHECKING:
    from hpcsync.report.summary import Summary

Found = dict[grid.Variant, dict[int, "Summary"]]  # summaries by seed
TUNING_SEEDS = 1_000  # the first one, counted from the seed of the job: none of those that are reported
NOT_COMPARED = ("name", "seed")  # keys in which runs of one variant may differ


class Asked(NamedTuple):
    """Options of the command line, under their names."""

    vary: Sequence[str] = ()
    seeds: int = 3
    tune: Sequence[str] = ()
    tune_seeds: int = 1
    simulate: bool = False
    jobs: int = 1
    overrides: Sequence[str] = ()
    out: Path | None = None
    csv: Path | None = None
    latex: Path | None = None


def main(paths: Sequence[Path], asked: Asked) -> int:
    """Compare a grid of runs of a job, or finished runs; return the exit status.

    Raises
    ------
    JobError
        For bad input, before anything starts.
    """
    files = [path for path in paths if path.suffix == ".toml"]
    if files and len(paths) > 1:
        raise JobError(f"compare: {files[0]} must be the only argument: a job is compared by --vary")
    if files:
        try:
            with on_signals(interrupt):
                status, found = _grid(files[0], asked)
        except Interrupted:
            print("hpcsync: interrupted; the same command resumes", file=sys.stderr)
            return 1
    else:
        if asked != Asked(csv=asked.csv, latex=asked.latex):
            raise JobError(f"compare: {paths[0]} must be a job file (.toml), to be run with these options")
        status, found = 0, grouped(paths)
    if not found:
        print("hpcsync: no run has finished", file=sys.stderr)
        return 1
    from rich.console import Console

    from hpcsync.report import variants

    conditions = dict.fromkeys(variant.condition for variant in found)
    results = [
        variants.compare({v.label: runs for v, runs in found.items() if v.condition == condition}, condition)
        for condition in conditions
    ]
    Console().print(variants.table(results))
    for file, text in ((asked.csv, variants.to_csv), (asked.latex, variants.to_latex)):
        if file is not None:
            _write(file, text(results))
    return status


def _write(file: Path, text: str) -> None:
    try:
        with whole(file) as path:
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise JobError(f"{file}: {error.strerror}") from None
    print(f"written: {file}")


# ---- a grid ----


def _grid(path: Path, asked: Asked) -> tuple[int, Found]:
    from hpcsync.system import launcher

    if launcher.under_launcher():
        raise launcher.LaunchError("compare: must be started as one process, without an MPI launcher")
    varied = grid.combinations("--vary", asked.vary, 'paradigm=["bsp", "asp"]')
    if not varied:
        raise JobError('compare: --vary is missing; must be KEY=[VALUE, ...], such as paradigm=["bsp", "asp"]')
    tuned = grid.combinations("--tune", asked.tune, "optimizer.lr=[0.03, 0.1]")
    _refuse_twice(asked)
    out = asked.out or Path("runs") / f"{jobs.load(path, asked.overrides).name}-compare"
    if tuned:
        varied = _tune(path, asked, varied, tuned, out.with_name(f"{out.name}-tuning"))
    runs = grid.plan(path, asked.overrides, varied, range(asked.seeds), out)
    return _carry_out(path, asked, runs, f"{len(varied)} variants in {out}")


def _refuse_twice(asked: Asked) -> None:
    """Raise JobError for a key that two options give."""
    keys = {"seed": "--seeds"}
    for option, axes in (("--vary", asked.vary), ("--tune", asked.tune)):
        for key in (text.partition("=")[0].strip() for text in axes):
            if (other := keys.setdefault(key, option)) != option:
                raise JobError(f"{option} {key}: must not be given, since {other} gives it")
            if option == "--tune" and not grid.is_choice(key):
                raise JobError(f"--tune {key}: must be a key of {', '.join(grid.CHOICES)}")


def _tune(
    path: Path, asked: Asked, varied: Sequence[tuple[str, ...]], tuned: Sequence[tuple[str, ...]], out: Path
) -> list[tuple[str, ...]]:
    """Return each variant with the setting that is best on the tuning seeds; all variants are given the same ones."""
    from hpcsync.report.variants import merit

    candidates = [(*variant, *setting) for variant in varied for setting in tuned]
    seeds = range(TUNING_SEEDS, TUNING_SEEDS + asked.tune_seeds)
    runs = grid.plan(path, asked.overrides, candidates, seeds, out)
    found = _carry_out(path, asked, runs, f"{len(tuned)} settings for each of {len(varied)} variants in {out}")[1]
    chosen = []
    for variant in varied:
        settings = {setting: found.get(grid.variant((*variant, *setting)), {}) for setting in tuned}
        best = min(settings, key=lambda setting: merit(settings[setting].values(), asked.tune_seeds))
        if not any(settings.values()):
            raise JobError(f"--tune: {grid.variant(variant)}: no run has finished, see the files .log in {out}")
        chosen.append((*variant, *best))
        print(f"{grid.variant(variant)}: {grid.label(best)} is the best of {len(tuned)} settings", file=sys.stderr)
        for key in grid.at_an_end(best, asked.tune):
            print(f"hpcsync: {grid.variant(variant)}: {key} is at an end of the values of --tune", file=sys.stderr)
    return chosen


def _carry_out(path: Path, asked: Asked, runs: Sequence[grid.Run], about: str) -> tuple[int, Found]:
    """Run what has not finished; return the exit status, and the summaries of all that have."""
    grid.check(path, runs, simulated=asked.simulate)
    n_before = sum(map(grid.finished, runs))
    print(f"{len(runs)} runs of {about}; {n_before} have finished already", file=sys.stderr)
    n_failed, n_left = 0, len(runs) - n_before
    for i, (run, status) in enumerate(grid.carry_out(path, runs, simulated=asked.simulate, at_once=asked.jobs), 1):
        n_failed += status != 0
        ended = "finished" if status == 0 else f"failed with status {status}, see {run.folder}.log"
        print(f"{i} of {n_left}: {run.variant}, seed {run.seed}: {ended}", file=sys.stderr)
    found: Found = {}
    for run in filter(grid.finished, runs):
        found.setdefault(run.variant, {})[run.seed] = _summary(run.folder)[1]
    for variant in dict.fromkeys(run.variant for run in runs):
        if variant not in found:
            print(f"hpcsync: {variant}: no run has finished, so it is not in the table", file=sys.stderr)
    return int(n_failed > 0), found


# ---- finished runs ----


def grouped(paths: Iterable[Path]) -> Found:
    """Return the summaries of the finished runs in these folders, by variant and seed.

    Runs are of one variant if their jobs differ in seed and name only. Runs that have not finished are left out and
    counted in a line on standard error.

    Raises
    ------
    JobError
        If a folder has no trace, a trace cannot be read, or two runs have the same job and seed.
    """
    found: dict[str, tuple[dict[str, Any], dict[int, Summary]]] = {}
    unfinished = []
    for trace in [trace for path in paths for trace in _traces(path)]:
        job, summary = _summary(trace)
        if summary.status != "finished":
            unfinished.append(trace)
            continue
        keys = {key: text for key, text in _keys(job, summary.engine) if key not in NOT_COMPARED}
        runs = found.setdefault(repr(keys), (keys, {}))[1]
        if job.seed in runs:
            raise JobError(f"{trace}: must not have the job and the seed ({job.seed}) of another run")
        runs[job.seed] = summary
    if unfinished:
        print(f"hpcsync: {len(unfinished)} runs have not finished and are left out: {unfinished[0]}", file=sys.stderr)
    variants = _named([keys for keys, _ in found.values()])
    return dict(zip(variants, (runs for _, runs in found.values()), strict=True))


def _traces(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    traces = [path / "trace.h5"] if (path / "trace.h5").exists() else sorted(path.rglob("trace.h5"))
    if not traces:
        raise JobError(f"{path}: must be a trace, or a folder with the traces of runs")
    return traces


def _summary(path: Path) -> tuple[jobs.Job, Summary]:
    from hpcsync.report.summary import summarize
    from hpcsync.trace.reader import TraceError, opened

    try:
        with opened(path) as trace:
            return trace.job, summarize(trace)
    except TraceError as error:
        raise JobError(str(error)) from None


def _keys(job: jobs.Job, engine: str | None) -> Iterable[tuple[str, str]]:
    """Return the keys of a job with their values in TOML, without a number of servers that is the default."""
    import tomllib

    table = tomllib.loads(job.to_toml())
    if table["cluster"].get("servers") == jobs.default_servers(table["paradigm"]):
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
