"""One rank of `hpcsync run`: a training script whose model and data are named in the job file."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hpcsync.api.ranks import aborting, agree, join, world
from hpcsync.api.user_errors import end_refused
from hpcsync.config import job as jobs
from hpcsync.config.errors import JobError
from hpcsync.config.job import Job, Script
from hpcsync.config.user_code import import_beside
from hpcsync.core.job_validation import check
from hpcsync.core.session import Session
from hpcsync.core.stanza_resolution import resolved
from hpcsync.export import loggers
from hpcsync.run_dir import layout, lock
from hpcsync.run_dir.checkpoint import Resumed
from hpcsync.run_dir.progress_line import say
from hpcsync.system import gpu_selection
from hpcsync.training.gradient import Replica, worker_seed
from hpcsync.training.optimizers import OptimizerSpec
from hpcsync.workloads.calibration import calibration
from hpcsync.workloads.registry import build

if TYPE_CHECKING:
    from mpi4py import MPI


def main(
    path: str | Path,
    overrides: Sequence[str],
    ranks: int | None,
    out: str | Path | None,
    resume: bool = False,
    lock_token: str = "",
    log: str | None = None,
) -> int:
    """Run this rank of a job; a failure ends all ranks at once.

    Parameters
    ----------
    path, overrides, ranks, out, resume
        As on the command line.
    lock_token
        Token of the lock that the process which started the ranks holds on `out`.
    log
        A key of `hpcsync.export.loggers.LOGS`, or None.

    Returns
    -------
    int
        Exit status of this rank: 0. A JobError ends all ranks with status 2.

    Raises
    ------
    LaunchError
        If the launcher started the ranks wrongly.
    """
    if not (found := gpu_selection.found()).why:  # a CUDA-aware MPI binds to the GPU that is current when it starts
        with suppress(JobError):  # reported below, once
            cluster = jobs.load_begun(path, overrides, ranks).cluster
            gpu_selection.claim(gpu_selection.choose(cluster.device, cluster.window, found))
    comm = world()
    assert comm is not None, "called on a rank"
    from hpcsync.mpi.transport.node_topology import arranged

    import_beside(path)
    lock.inherit(lock_token)
    try:
        with aborting(comm, but=JobError):
            if agree(comm, lambda: layout.finished_already(out, resume)):
                if comm.rank == 0:
                    print(f"finished already: {out}")
                return 0
            agree(comm, lambda: loggers.load(log))
            before = agree(comm, lambda: layout.resuming(out, resume))
            job = agree(comm, lambda: layout.job_of(path, overrides, ranks, before))
            if job.cluster.on_death == "restart" and not lock_token:
                raise JobError(
                    'cluster.on_death = "restart": needs hpcsync run as the process that starts the ranks, by '
                    'MPIEXEC="srun ..." under Slurm'
                )
            if resume and before is None:
                agree(comm, lambda: layout.put_aside(out, path))
            train(arranged(comm, job.cluster), job, out, before, log)
        _end_apart(comm.rank)
    except JobError as error:
        end_refused(error)
    return 0


def _end_apart(rank: int) -> None:
    """Let rank 0 of a heterogeneous job end last.

    Slurm's srun (22.05) may wait forever for a job whose components end at the same moment, although all ranks have
    reported their end. Those of a refused job do not: rank 0 ends them.
    """
    if "SLURM_HET_SIZE" in os.environ:
        from mpi4py import MPI

        MPI.Finalize()
        if rank == 0:
            time.sleep(1.0)


def train(
    comm: MPI.Intracomm, job: Job, out: str | Path | None, before: Resumed | None = None, log: str | None = None
) -> Session:
    """Train this rank's part of the job, from the beginning or from a checkpoint; return its session. Collective."""
    from hpcsync.mpi.transport.link_speed import measured_link

    jobs.refuse_simulated(job)
    if comm.rank == 0:
        say("loading model and data")
    link = measured_link(comm) if "fc_workers" in job.paradigm.open_keys else None
    # Checked on one rank only: the first optimizer of a process takes a second (torch loads its compiler).
    job = agree(comm, lambda: resolved(job, check(job), link))
    workload = build(job)
    workload.model.to(_device(comm, job))
    assert not isinstance(job.workload, Script), "such a job has no workload"
    optimizer = OptimizerSpec.of_job(job)
    torch.manual_seed(worker_seed(job.seed, max(0, comm.rank - job.cluster.servers)))
    calibrate = calibration(job, workload)
    with join(comm, job, workload.model, optimizer, workload.evaluate, out, before, calibrate, log) as sync:
        replica, n_pieces = Replica(sync.flat, sync.loss_here(workload.loss)), job.n_pieces_of(sync.worker or 0)
        for batch in sync.shard(workload.train, job.workload.batch_size, epochs=None):
            sync.step(replica.compute_in_pieces(batch, n_pieces, sync.cancelled))
    return sync


def _device(comm: MPI.Intracomm, job: Job) -> torch.device:
    """Return this rank's device, which has the same type on all ranks. Collective."""
    asked, window = job.cluster.device, job.cluster.window
    if asked == "cpu":
        return torch.device("cpu")
    from hpcsync.mpi.transport.window_selection import gpus_of_all

    found = gpus_of_all(comm)
    chosen = gpu_selection.choose(asked, window, found)
    if comm.rank == 0:
        print(found.unused, end="", flush=True)
    return gpu_selection.claim(chosen)
