"""Simulate many jobs, several at a time; jobs that are finished in the folder are not simulated again."""

from __future__ import annotations

import multiprocessing
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hpcsync.config.job import Job
from hpcsync.run_dir import layout


def simulate_all(
    jobs: Mapping[str, Job], out: Path, processes: int, console: Console, keep_weights: bool = False
) -> int:
    """Simulate each job into out/NAME; how many had to be. Raises RuntimeError for one that fails."""
    todo = [(job, out / name, keep_weights) for name, job in jobs.items() if not finished(out / name, job)]
    columns = TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console) as progress, _workers(min(processes, len(todo))) as carry_out:
        bar = progress.add_task("", total=len(jobs), completed=len(jobs) - len(todo))
        for _ in carry_out(todo):
            progress.advance(bar)
    return len(todo)


def finished(folder: Path, job: Job) -> bool:
    """Return True if the folder has the finished run of exactly this job, with its file of times as it is now."""
    summary = folder / layout.SUMMARY
    if not summary.exists() or Job.from_toml((folder / layout.JOB).read_text(encoding="utf-8")) != job:
        return False
    table = getattr(job.cluster.compute, "table", None)
    return table is None or Path(table).stat().st_mtime_ns <= summary.stat().st_mtime_ns


def make_empty(folder: Path) -> None:
    """Create the folder of a run, without what a run that was interrupted or had another job has left."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def write_changed(text: str, path: Path) -> None:
    """Write an input of runs, unless the file has it: those that have read it stay finished."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


@contextmanager
def _workers(processes: int) -> Iterator:
    if processes <= 1:
        yield lambda todo: map(_simulate, todo)
        return
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"))

    def carry_out(todo: Iterable[tuple[Job, Path, bool]]) -> Iterator[None]:
        for future in as_completed([pool.submit(_simulate, run) for run in todo]):
            yield future.result()

    try:
        yield carry_out
    finally:
        pool.shutdown(cancel_futures=True)  # after an error or Ctrl-C: what is under way ends, nothing else begins


def _simulate(run: tuple[Job, Path, bool]) -> None:
    from hpcsync.simulator.simulate import simulate  # in the process that simulates: it imports torch
    from hpcsync.trace.reader import load

    job, folder, keep_weights = run
    make_empty(folder)
    if simulate(job, folder, Console(quiet=True)) != 0:
        if (folder / layout.TRACE).exists() and load(folder / layout.TRACE).status == "interrupted":
            raise KeyboardInterrupt
        raise RuntimeError(f"{folder}: the simulation has failed")
    if not keep_weights:  # hundreds of runs have many
        (folder / layout.WEIGHTS).unlink()
