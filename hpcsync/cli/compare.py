"""Command `hpcsync compare`: variants of a job over seeds, run as a grid or read from finished runs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hpcsync.cli import finished_runs, grid, report
from hpcsync.cli.finished_runs import Found
from hpcsync.config import job as jobs
from hpcsync.config.errors import JobError
from hpcsync.report.wording import plural
from hpcsync.system.signals import Interrupted, interrupt, on_signals
from hpcsync.system.standard_output import at_least_80_columns

if TYPE_CHECKING:
    from hpcsync.report.summary import Summary

TUNING_SEEDS = 1_000  # the first one, counted from the seed of the job: none of those that are reported

OF_RUNS = ("csv", "latex", "report")  # options that finished runs may be given


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
    report: Path | None = None


def main(paths: Sequence[Path], asked: Asked) -> int:
    """Compare a grid of runs of a job, or finished runs; return the exit status.

    Raises
    ------
    JobError
        For bad input, or a file that cannot be written, before anything starts.
    """
    if asked.report is not None:
        report.check(asked.report)
    for file in (asked.csv, asked.latex):
        if file is not None:
            report.check_text(file)
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
        _refuse_options_of_a_grid(paths[0], asked)
        status, found = 0, finished_runs.grouped(paths)
    if not found:
        print("hpcsync: no run has finished", file=sys.stderr)
        return 1
    from rich.console import Console

    from hpcsync.report import variants

    conditions = dict.fromkeys(variant.condition for variant in found)
    results = [
        variants.compare({v.label: summaries(runs) for v, runs in found.items() if v.condition == condition}, condition)
        for condition in conditions
    ]
    at_least_80_columns(Console()).print(variants.table(results))
    for file, text in ((asked.csv, variants.to_csv), (asked.latex, variants.to_latex)):
        if file is not None:
            report.write_text(file, text(results))
    if asked.report is not None:
        report.write_report(found, asked.report)
    return status


def _refuse_options_of_a_grid(path: Path, asked: Asked) -> None:
    """Raise JobError for options that finished runs cannot be given."""
    given, default = asked._asdict(), Asked()._asdict()
    wrong = [name for name in given if name not in OF_RUNS and given[name] != default[name]]
    if wrong:
        options = ", ".join("--set" if name == "overrides" else f"--{name.replace('_', '-')}" for name in wrong)
        raise JobError(f"compare: {options}: must be left out for finished runs; {path} is no job file (.toml)")


def summaries(runs: Mapping[int, finished_runs.Read]) -> dict[int, Summary]:
    """Return the summaries of runs by seed."""
    return {seed: run.summary for seed, run in runs.items()}


# ---- a grid ----


def _grid(path: Path, asked: Asked) -> tuple[int, Found]:
    from hpcsync.run_dir import layout
    from hpcsync.system import launcher, rank_environment

    if rank_environment.under_launcher():
        raise launcher.LaunchError("compare: must be started as one process, without an MPI launcher")
    if not asked.simulate:
        launcher.refuse_without_mpi()
    varied = grid.combinations("--vary", asked.vary, 'paradigm=["bsp", "asp"]')
    if not varied:
        raise JobError('compare: --vary is missing; must be KEY=[VALUE, ...], such as paradigm=["bsp", "asp"]')
    tuned = grid.combinations("--tune", asked.tune, "optimizer.lr=[0.03, 0.1]")
    _refuse_twice(asked)
    out = asked.out or Path("runs") / f"{jobs.load(path, asked.overrides).name}-compare"
    layout.refuse_taken(out)
    if tuned:
        varied = _tune(path, asked, varied, tuned, out.with_name(f"{out.name}-tuning"))
    runs = grid.plan(path, asked.overrides, varied, range(asked.seeds), out)
    return _carry_out(path, asked, runs, out, plural(len(varied), "variant"))


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
    about = f"{plural(len(tuned), 'setting')} for each of {plural(len(varied), 'variant')}"
    found = _carry_out(path, asked, runs, out, about)[1]
    chosen = []
    for variant in varied:
        settings = {setting: found.get(grid.variant((*variant, *setting)), {}) for setting in tuned}
        best = min(settings, key=lambda setting: merit(summaries(settings[setting]).values(), asked.tune_seeds))
        if not any(settings.values()):
            raise JobError(f"--tune: {grid.variant(variant)}: no run has finished, see the files .log in {out}")
        chosen.append((*variant, *best))
        print(f"{grid.variant(variant)}: {grid.label(best)} is the best of {len(tuned)} settings", file=sys.stderr)
        for key in grid.at_an_end(best, asked.tune):
            print(
                f"hpcsync: {grid.variant(variant)}: {key} is the smallest or largest value of --tune", file=sys.stderr
            )
    return chosen


def _carry_out(path: Path, asked: Asked, runs: Sequence[grid.Run], out: Path, about: str) -> tuple[int, Found]:
    """Run what has not finished; return the exit status, and the summaries of all that have."""
    from hpcsync.run_dir import layout

    grid.check(path, runs, simulated=asked.simulate)
    left = [run for run in runs if not grid.finished(run)]
    n_failed, n_before = 0, len(runs) - len(left)
    with layout.claimed(out) if left else nullcontext():
        print(f"{plural(len(runs), 'run')} of {about} in {out}; {n_before} finished already", file=sys.stderr)
        for i, (run, status) in enumerate(grid.carry_out(path, left, simulated=asked.simulate, at_once=asked.jobs), 1):
            n_failed += status != 0
            ended = "finished" if status == 0 else f"failed with status {status}, see {run.folder}.log"
            print(f"{i} of {len(left)}: {run.variant}, seed {run.seed}: {ended}", file=sys.stderr)
    found: Found = {}
    for run in filter(grid.finished, runs):
        found.setdefault(run.variant, {})[run.seed] = finished_runs.read(run.folder)
    for variant in dict.fromkeys(run.variant for run in runs):
        if variant not in found:
            print(f"hpcsync: {variant}: no run has finished, so it is not in the table", file=sys.stderr)
    return int(n_failed > 0), found
