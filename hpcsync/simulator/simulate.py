"""`hpcsync simulate`: one run in virtual time, with the same outputs as a real run."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from hpcsync.config.errors import JobError, below
from hpcsync.config.job import Job
from hpcsync.config.user_code import of_user
from hpcsync.core.assignments import decision_fields
from hpcsync.core.coordinator import Coordinator
from hpcsync.core.job_validation import check
from hpcsync.core.peer_coordinator import PeerCoordinator
from hpcsync.core.stanza_resolution import resolved
from hpcsync.report import trace_pair
from hpcsync.run_dir import layout, lock
from hpcsync.run_dir.progress_line import Progress
from hpcsync.run_dir.scalar_log import ScalarLog
from hpcsync.simulator import cluster, factory, peer_transfers, replayed_links
from hpcsync.simulator.run import Simulation
from hpcsync.simulator.server_run import ServerSimulation
from hpcsync.system.atomic_files import NotWritten
from hpcsync.system.signals import SAVING, Interrupted, interrupt, on_signals
from hpcsync.system.standard_output import at_least_80_columns
from hpcsync.trace.provenance import provenance
from hpcsync.trace.reader import load
from hpcsync.trace.writer import TraceWriter
from hpcsync.workloads.registry import Workload

CHORES_EVERY = 256  # pushes or step infos


@lock.releasing()
def simulate(job: Job, out: Path | None, console: Console, log: str | None = None) -> int:
    """Simulate a job into a folder.

    A failure of the run is reported on standard error.

    Parameters
    ----------
    job
        Job to simulate.
    out
        Output folder; None creates a new one of the job's name.
    console
        Receiver of progress and summary.
    log
        A key of `hpcsync.export.loggers.LOGS`.

    Returns
    -------
    int
        Exit status.

    Raises
    ------
    JobError
        If the job cannot be simulated; nothing has been created then.
    """
    torch.set_num_threads(1)  # reproducible bits: those of split tensors would depend on the number of cores

    workload = check(job)
    job = resolved(job, workload)
    begin = prepare(job, workload)
    folder = layout.choose(job, out)
    status = _simulate(job, workload, begin, folder, console, log)
    if status == 0 and job.cluster.times_from is not None:
        console.print()
        comparison = trace_pair.compare(load(job.cluster.times_from), load(folder / layout.TRACE))
        at_least_80_columns(console).print(trace_pair.table(comparison))
    return status


def prepare(job: Job, workload: Workload) -> Callable[..., Simulation]:
    """Return a function that creates the simulation of a job from a recorder, and a watch if there is one.

    Raises
    ------
    JobError
        If the job cannot be simulated.
    """
    if job.has_servers:
        return partial(ServerSimulation, job, workload, cluster.build(job, workload))
    source = peer_transfers if job.cluster.times_from is None else replayed_links
    return partial(factory.simulation, job, workload, source.build(job, workload))


def _simulate(
    job: Job,
    workload: Workload,
    begin: Callable[..., Simulation],
    folder: Path,
    console: Console,
    log: str | None,
) -> int:
    layout.create(folder, job)
    attributes = provenance(job, engine="simulator", mpi_library=None, hosts=["virtual"])
    path, trace, scalars = folder / layout.TRACE, None, None
    progress = Progress(console, job.stop)
    try:
        trace = TraceWriter(path, attributes, decision_fields(job))
        if log is not None:
            scalars = ScalarLog(log, folder, job)
            trace.observer = scalars.add
        for rank in range(job.cluster.ranks):
            trace.append("clocks", (0, rank, "virtual", 0.0, 0.0))
        trace.flush()
        watch = _Watch(trace, progress)
        with on_signals(watch.note):
            simulation = begin(trace, watch)
            trace.describe(simulation.attributes)
            simulation.run()
        layout.save_weights(folder, workload.model)
        trace.close("finished")
        progress.close()
        if scalars is not None:
            scalars.close("finished")
        layout.conclude(folder, console)
    except BaseException as error:
        progress.close()
        status = "interrupted" if isinstance(error, Interrupted | KeyboardInterrupt) else "failed"
        if trace is not None:
            with suppress(OSError, RuntimeError):
                trace.close(status)
        if scalars is not None:
            scalars.close(status)
        error = of_user(job, error)
        if status == "failed" and not isinstance(error, NotWritten | JobError):
            traceback.print_exc()
        so_far = "" if trace is None else f"; the trace so far is {path}"
        print(f"hpcsync: {status}: {str(error) or type(error).__name__}{so_far}{below(error)}", file=sys.stderr)
        return 1
    return 0


class _Watch:
    """Periodic work during a simulation: handle signals, flush the trace and show progress."""

    def __init__(self, trace: TraceWriter, progress: Progress) -> None:
        self.progress = progress
        self._received: list[int] = []
        self._trace = trace
        self._pushes = 0

    def note(self, number: int) -> None:
        """Note a signal until the next push; a second one before it, which may be far away, is handled at once."""
        if self._received:
            interrupt(number)
        if number != SAVING:
            self._received.append(number)

    def __call__(self, now_s: float, coordinator: Coordinator | PeerCoordinator) -> None:
        if self._received:
            interrupt(self._received.pop(0))
        self._pushes += 1
        if self._pushes % CHORES_EVERY == 0:
            self._trace.flush_if_due(time.monotonic())
            self.progress.show(now_s, coordinator)
