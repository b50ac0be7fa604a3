"""Trials of an advice: candidates trained with real gradients in virtual time, each run once."""

from __future__ import annotations

import contextlib
import filecmp
import functools
import json
import multiprocessing
import os
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcsync.cli import finished_runs
from hpcsync.cli.advice_candidates import Trained, described, stem
from hpcsync.config.cluster import ClusterEvent
from hpcsync.config.errors import JobError
from hpcsync.config.job import Job
from hpcsync.config.overrides import default_servers, drop_excluded
from hpcsync.config.paradigms import kind_of
from hpcsync.report.wording import plural
from hpcsync.system.atomic_files import naming, whole

if TYPE_CHECKING:
    from hpcsync.report.summary import Summary
    from hpcsync.trace.reader import Trace


class BudgetSpent(Exception):
    """The budget was spent before a trial ended; the message says how far it is."""

    def __init__(self, about: str, n_done: int, n: int) -> None:
        are = "run is" if n == 1 else "runs are"
        super().__init__(f"The budget was spent in {about}: {n_done} of {n} {are} done; the same command resumes.")


class Trials:
    """Simulations of candidates for a job.

    Parameters
    ----------
    job
        The job on which is advised.
    path
        Its file, whose folder may have modules.
    out
        Folder of the advice; runs that it holds are not simulated again.
    trace
        Measured run of which computing times and links are taken; None: those of the job.
    times
        Measured times of computing, by worker.
    at_once
        Simulations at a time.
    keeps_scale
        Whether the job states how the rate of asynchronous updates is scaled.

    Attributes
    ----------
    until_s : float or None
        Moment, by `time.monotonic`, at which the budget is spent; None: it is not limited.
    n_simulated : int
        Number of runs that were simulated.
    failed : dict
        The logs of candidates, each with its learning rate, of which a simulation has failed.
    """

    def __init__(
        self,
        job: Job,
        path: Path,
        out: Path,
        *,
        trace: Trace | None,
        times: list[Any],
        at_once: int,
        keeps_scale: bool,
    ) -> None:
        self._job = job
        self._path = path
        self._out = out
        self._trace = trace
        self._times = times
        self._at_once = at_once
        self._keeps_scale = keeps_scale
        self._seeds_with_times: set[int] = set()
        self.until_s: float | None = None
        self.n_simulated = 0
        self.failed: dict[Trained, Path] = {}
        self._workload = json.dumps(tomllib.loads(job.to_toml())["workload"], sort_keys=True)

    def job_table(self, trained: Trained) -> dict[str, Any]:
        """Return the table of the user's job with the paradigm and the learning rate of a candidate."""
        table: dict[str, Any] = tomllib.loads(self._job.to_toml())
        table["paradigm"] = trained.candidate.paradigm
        table.pop("batches", None)
        table.pop("predicted", None)
        if trained.candidate.batches:
            table["batches"] = trained.candidate.batches
        optimizer, cluster = table["optimizer"], table["cluster"]
        optimizer["lr"] = trained.factor * optimizer["lr"]
        servers = default_servers(table["paradigm"])
        kind = kind_of(table["paradigm"])
        if servers == 0 or (kind is not None and kind.contribution != "gradient"):
            optimizer.pop("async_lr_scale", None)  # the optimizer runs on the workers
        elif not self._keeps_scale:
            optimizer["async_lr_scale"] = "1/workers"  # equal total steps, so that rates are comparable
        if (cluster.get("servers", 1) == 0) != (servers == 0):
            cluster["servers"] = servers
        drop_excluded(table, {("paradigm",)})
        if compression := trained.candidate.compression:
            table["compression"] = compression
            if compression["name"] != "none":
                table["compression"] = compression | {"gbytes_per_s": self._gbytes_per_s(table)}
        return table

    def table(self, trained: Trained, seed: int, limit_s: float) -> dict[str, Any]:
        """Return the table of the job that trains a candidate with this seed, at most for so many virtual seconds."""
        table = self.job_table(trained)
        table["seed"] = seed
        cluster, stop = table["cluster"], table["stop"]
        table["stop"] = {key: stop[key] for key in ("target_accuracy", "target_loss") if key in stop}
        table["stop"]["seconds"] = limit_s
        if self._trace is not None:
            from hpcsync.simulator.measured_cluster import network

            cluster["compute"] = {"model": "table", "table": str(self._times_file(seed))}
            cluster.pop("times_from", None)
            cluster["events"] = [event.model_dump(exclude_none=True) for event in self._events_to_come]
            served = default_servers(table["paradigm"]) != 0
            if "network" not in cluster and (links := network(self._trace, seed, cluster["workers"], served)):
                if cluster.get("colocated") or not served:
                    del links["server_bandwidth_gbit"]  # colocated servers share the links of workers
                cluster["network"] = links
        return table

    @functools.cached_property
    def _events_to_come(self) -> list[ClusterEvent]:
        """Events of the job without changes of speed that the measured times contain."""
        from hpcsync.report.aggregate import Tally

        assert self._trace is not None
        tally, recorded = Tally(self._trace), self._trace.job.cluster.events
        return [
            event
            for event in self._job.cluster.events
            if event.change not in ("slow", "recover") or event not in recorded or not tally.has_occurred(event)
        ]

    def _gbytes_per_s(self, table: dict[str, Any]) -> float:
        """Return the throughput of the job's codec, which is measured once, so that a restart continues its runs."""
        file, codec = self._out / "codecs.json", f"{table['compression']['name']} of {self._workload}"
        known: dict[str, float] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        if codec not in known:
            from hpcsync.simulator.measured_time import encoding_gbytes_per_s

            known[codec] = float(f"{encoding_gbytes_per_s(Job.from_table(table)):.3g}")
            file.parent.mkdir(parents=True, exist_ok=True)
            with whole(file) as unfinished:
                unfinished.write_text(json.dumps(known) + "\n", encoding="utf-8")
        return known[codec]

    def _times_file(self, seed: int) -> Path:
        from hpcsync.simulator.measured_cluster import resampled, write_table

        file = (self._out / f"times-{seed}.csv").absolute()
        if seed not in self._seeds_with_times:
            file.parent.mkdir(parents=True, exist_ok=True)
            new = file.with_suffix(".new")
            write_table(resampled(self._times, seed, self._job.cluster.workers), new)
            if file.exists() and not filecmp.cmp(file, new, shallow=False):
                new.unlink()
                raise JobError(f"--out: {file} holds the times of another run; give another folder")
            new.replace(file)
            self._seeds_with_times.add(seed)
        return file

    def run(
        self, number: int, every: Sequence[Trained], seeds: Sequence[int], limit_s: float, about: str = ""
    ) -> dict[Trained, dict[int, Summary]]:
        """Simulate what is missing of a trial; return its summaries, without candidates of which a simulation failed.

        Parameters
        ----------
        number
            Number of the trial, the first is 1.
        every, seeds
            Each candidate is trained with each seed.
        limit_s
            Virtual seconds of a run.
        about
            Part of the trial, in words.

        Raises
        ------
        BudgetSpent
            If the budget is spent before.
        JobError
            If a process that simulates was killed, or more than half of the candidates failed: the cause is then
            hardly in them.
        """
        todo: dict[Path, Job] = {}
        places: dict[Trained, dict[int, Path]] = {}
        for trained in every:
            for seed in seeds:
                folder = self._out / f"trial-{number}" / stem(trained) / f"seed-{seed}"
                places.setdefault(trained, {})[seed] = folder
                job = Job.from_table(self.table(trained, seed, limit_s))
                if not _finished(folder, job):
                    todo[folder] = job
        n = sum(map(len, places.values()))
        n_labels = len({trained.label for trained in every})
        name, before = f"trial {number}{', ' * bool(about)}{about}", n - len(todo)
        print(
            f"{name}: {plural(n_labels, 'candidate')}, {plural(n, 'run')}, {before} finished already", file=sys.stderr
        )
        failed = self._simulate(todo, name, before)
        left_out: dict[Trained, Path] = {}
        for trained, of_seeds in places.items():
            if logs := [folder.with_name(f"{folder.name}.log") for folder in of_seeds.values() if folder in failed]:
                left_out[trained] = logs[0]
                print(f"hpcsync: advise: {name}: {described(trained)} failed, see {logs[0]}", file=sys.stderr)
        if 2 * len(left_out) > len(every):
            raise JobError(f"advise: {name}: {len(left_out)} of {len(every)} candidates and learning rates failed")
        self.failed |= left_out
        return {
            trained: {seed: finished_runs.read(folder).summary for seed, folder in of_seeds.items()}
            for trained, of_seeds in places.items()
            if trained not in left_out
        }

    def _simulate(self, todo: Mapping[Path, Job], about: str, n_before: int) -> set[Path]:
        """Simulate jobs, several at a time; `n_before` others of the trial are done. May raise BudgetSpent.

        Returns
        -------
        set of path
            The folders of those that failed.
        """
        from rich.console import Console
        from rich.progress import track

        from hpcsync.system.parent_death import end_with

        left_s = None if self.until_s is None else self.until_s - time.monotonic()
        n_done, failed = 0, set()
        pool = ProcessPoolExecutor(self._at_once, multiprocessing.get_context("spawn"), end_with, (os.getpid(),))
        try:
            futures = {pool.submit(simulate_one, job, folder, str(self._path)): folder for folder, job in todo.items()}
            ended = as_completed(futures, left_s)
            shown = Console(stderr=True)
            for future in track(ended, about, len(futures), console=shown, disable=not shown.is_terminal):
                if future.result() != 0:
                    failed.add(futures[future])
                n_done += 1
                self.n_simulated += 1
        except TimeoutError:
            raise BudgetSpent(about, n_before + n_done, n_before + len(todo)) from None
        except BrokenProcessPool:
            raise JobError(f"advise: {about}: a process that simulates was killed: out of memory?") from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            left = multiprocessing.active_children()
            for process in left:
                process.terminate()
            for process in left:
                process.join()  # until then the folder of its run is locked
        return failed


def simulate_one(job: Job, folder: Path, path: str) -> int:
    """Simulate a job in a process of its own; why it failed is in the file beside its folder that ends in ``.log``."""
    from rich.console import Console

    from hpcsync.config.user_code import import_beside
    from hpcsync.run_dir import layout
    from hpcsync.simulator.simulate import simulate

    import_beside(Path(path))
    if folder.exists() and not layout.cleared(folder):
        return 0
    said = folder.with_name(f"{folder.name}.log")
    with naming(said):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with said.open("w", encoding="utf-8") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            try:
                return simulate(job, folder, Console(file=log, quiet=True))
            except JobError as error:
                print(f"hpcsync: {error}")
                return 2


def _finished(folder: Path, job: Job) -> bool:
    """Return whether the folder has the finished run of this job. Raises JobError if it has one of another job."""
    if not (folder / "summary.json").exists():
        return False
    if Job.from_toml((folder / "job.toml").read_text(encoding="utf-8")).to_toml() != job.to_toml():
        raise JobError(f"--out: {folder} holds a run of another job; give another folder")
    return True
