"""Ranks of a run: the world that MPI started, what its ranks agree on, and the session of each."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from hpcsync.config.errors import JobError
from hpcsync.config.job import Job
from hpcsync.core.job_validation import check_model
from hpcsync.core.roles import Roles
from hpcsync.run_dir import layout, lock
from hpcsync.run_dir.checkpoint import Checkpoints, Resumed
from hpcsync.run_dir.progress_line import say
from hpcsync.state import StateError
from hpcsync.system import garbage, launcher, rank_environment
from hpcsync.system.atomic_files import NotWritten
from hpcsync.system.launch_output import print_at_once
from hpcsync.system.process_cleanup import unlink_attached
from hpcsync.system.signals import telling_that_mpi_starts
from hpcsync.training.buffers import Calibrate
from hpcsync.training.flat_model import device_of
from hpcsync.training.optimizers import OptimizerSpec
from hpcsync.training.script_optimizers import trained_parameters
from hpcsync.workloads.registry import Evaluate

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcsync.mpi.session_base import Given, RankSession

T = TypeVar("T")


@lock.released_on_error()
def join(
    comm: MPI.Intracomm,
    job: Job,
    model: torch.nn.Module,
    optimizer: OptimizerSpec | tuple[torch.optim.Optimizer, ...],
    evaluate: Evaluate | None,
    out: str | Path | None,
    before: Resumed | None = None,
    calibrate: Calibrate | None = None,
    log: str | None = None,
) -> RankSession:
    """Return this rank's session of a job. Collective.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        Communicator with as many ranks as the job has, or with fewer if the run is resumed.
    job, model, optimizer, evaluate, out
        As resolved from the arguments of `connect`.
    before : Resumed, optional
        State to resume from.
    calibrate : callable, optional
        As for `connect`.
    log : str, optional
        A key of `hpcsync.export.loggers.LOGS`.

    Raises
    ------
    JobError
        If the number of ranks, the model, the MPI library or the transport does not allow this job.
    """
    from mpi4py import MPI

    from hpcsync.mpi.session_base import Given
    from hpcsync.mpi.transport.communicator import takes_several_threads
    from hpcsync.mpi.transport.node_memory import MemoryUnreachable
    from hpcsync.mpi.transport.ulfm import refuse_intolerant
    from hpcsync.mpi.transport.window_selection import place

    job.refuse_ranks(comm.size, resumes=before is not None)
    if before is not None:
        before.refuse_ranks(comm.size)
    parameters = None if isinstance(optimizer, OptimizerSpec) else trained_parameters(optimizer, model)
    check_model(job, model, "model", parameters=parameters)
    _refuse_differences(comm, job, model)
    if evaluate is not None and not takes_several_threads(comm):
        raise JobError("evaluate: needs an MPI with MPI_THREAD_MULTIPLE: rank 0 evaluates while the run continues")
    if job.cluster.on_death == "continue":
        refuse_intolerant(comm)
    if not job.has_servers and not takes_several_threads(comm):
        raise JobError(
            f'paradigm.name = "{job.paradigm.name}": needs an MPI with MPI_THREAD_MULTIPLE: worker 0 receives messages '
            "of the others while it trains"
        )
    _share_cores(comm, is_server=comm.rank < job.cluster.servers)
    if comm.rank == 0:
        say("setting up communication")
    with aborting(comm, but=JobError):
        placement = place(comm, job, device_of(model))
        folder = agree(comm, lambda: _make_folder(job, out, before))
        shared = comm.allreduce((folder / layout.JOB).is_file(), MPI.LAND)
    checkpoints = Checkpoints(folder, job.checkpoint.keep, before.checkpoint if before else None, shared)
    if comm.rank == 0:
        lines = [*placement.lines(), *_checkpoint_lines(checkpoints), *_optimizer_lines(job, optimizer)]
        print(*(f"{line}\n" for line in lines), sep="", end="", flush=True)
    try:
        with aborting(comm, but=(MemoryUnreachable, JobError)):
            steps_here = job.paradigm.steps_on_workers or comm.rank < job.cluster.servers
            if steps_here and isinstance(optimizer, OptimizerSpec):
                _warm_up(optimizer, device_of(model))
            garbage.freeze()  # before the session exists: sessions are garbage once they have ended
            given = Given(comm, job, model, placement, checkpoints, optimizer, evaluate, calibrate, log)
            with checkpoints.restoring(Roles(job.cluster.servers, job.cluster.workers).name(comm.rank)):
                return _session_class(job, comm.rank)(given)
    except (MemoryUnreachable, JobError) as error:
        if comm.rank == 0 and checkpoints.resumed is None:
            layout.withdraw(folder)
        if isinstance(error, JobError):
            raise
        raise JobError(f'cluster.window = "{placement.transport.kind}": must be another here: {error}') from None


def _session_class(job: Job, rank: int) -> Callable[[Given], RankSession]:
    """Return the class of this rank's session; what only other ranks need is not imported."""
    if not job.has_servers and rank > 0:
        from hpcsync.mpi.peer.session import PeerSession

        return PeerSession
    if not job.has_servers:
        from hpcsync.mpi.peer.rank0_session import Rank0Session

        return Rank0Session
    if rank >= job.cluster.servers:
        from hpcsync.mpi.server.worker import WorkerSession

        return WorkerSession
    if rank > 0:
        from hpcsync.mpi.server.session import FollowerSession

        return FollowerSession
    from hpcsync.mpi.server.leader_session import LeaderSession

    return LeaderSession


def world() -> MPI.Intracomm | None:
    """Return MPI.COMM_WORLD, or None for a process that no MPI launcher started.

    Raises
    ------
    LaunchError
        If MPI cannot be loaded, or N ranks were started but each one is an MPI world of its own.
    """
    if not rank_environment.under_launcher():
        return None
    if "mpi4py.MPI" not in sys.modules:  # MPI reads its settings once
        os.environ.update({**launcher.settings_of_rank(os.environ), **os.environ})
    try:
        with telling_that_mpi_starts():
            from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        why = str(error).partition("\n")[0]
        raise launcher.LaunchError(f"mpi4py: {why}; hpcsync doctor says what to install or to load") from None

    library = MPI.Get_library_version()
    launcher.refuse_singletons(MPI.COMM_WORLD.size, library)
    if "MPICH" in library:
        MPI.COMM_WORLD.Barrier()  # all ranks have attached it
        unlink_attached()
    return MPI.COMM_WORLD


def agree(comm: MPI.Intracomm, on_rank_0: Callable[[], T]) -> T:
    """Call a function on rank 0 and return its result on every rank. Collective.

    A JobError that it raises is raised on every rank; any other exception ends the job.
    """
    result: T | JobError | None = None
    if comm.rank == 0:
        try:
            result = on_rank_0()
        except JobError as error:
            result = error
        except BaseException:
            _abort(comm)
    result = comm.bcast(result)
    if isinstance(result, JobError):
        raise result
    return result


def _refuse_differences(comm: MPI.Intracomm, job: Job, model: torch.nn.Module) -> None:
    """Raise JobError unless every rank has the same model, device and settings."""
    values = {**model.state_dict(), **dict(model.named_buffers())}  # buffers need not be in the state
    tensors = {key: value for key, value in values.items() if isinstance(value, torch.Tensor)}
    state = [(key, tuple(value.shape), str(value.dtype)) for key, value in tensors.items()]
    trained = [p.requires_grad for p in model.parameters()]
    all_ranks = comm.allgather((repr(job), device_of(model).type, state, trained))
    for rank, (its_job, device, *its_model) in enumerate(all_ranks):
        if its_model != [*all_ranks[0][2:]]:
            raise JobError(f"model: must have the same parameters on every rank; rank {rank}'s differ from rank 0's")
        if device != all_ranks[0][1]:
            raise JobError(
                f"model: must be on {all_ranks[0][1]} on every rank, as on rank 0; rank {rank}'s is on {device}"
            )
        if its_job != all_ranks[0][0]:
            raise JobError(f"connect: needs the same arguments on every rank; rank {rank}'s differ from rank 0's")


def _share_cores(comm: MPI.Intracomm, *, is_server: bool) -> None:
    """Set the number of torch threads to this rank's share of the node's cores, unless OMP_NUM_THREADS is set.

    A server updates in one thread: if torch split a tensor between threads, the bits would depend on the shards.
    """
    from hpcsync.mpi.transport.node_topology import cores_of_rank

    share = int(cores_of_rank(comm))
    if is_server:
        torch.set_num_threads(1)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, share))


def _warm_up(optimizer: OptimizerSpec, device: torch.device) -> None:
    """Make a first optimizer step, which takes seconds (torch loads its compiler) that must not count in the run."""
    parameter = torch.nn.Parameter(torch.zeros(1, device=device))
    parameter.grad = torch.zeros(1, device=device)
    optimizer.build(parameter).step()


@contextmanager
def aborting(comm: MPI.Intracomm, *, but: type[BaseException] | tuple[type[BaseException], ...]) -> Iterator[None]:
    """End the job if this rank alone raises: the others would wait for it forever.

    Parameters
    ----------
    but : exception class or tuple of them
        Exceptions that all ranks raise together; they propagate.
    """
    try:
        yield
    except but:
        raise
    except BaseException:
        _abort(comm)
        raise


def _abort(comm: MPI.Intracomm) -> None:
    """Print the exception of this rank and end the job."""
    from hpcsync.mpi.session_base import end_all

    error = sys.exception()
    assert error is not None
    if isinstance(error, KeyboardInterrupt):
        print("hpcsync: interrupted", file=sys.stderr)
    elif isinstance(error, NotWritten | StateError):
        print(f"hpcsync: failed: {error}", file=sys.stderr)
    else:
        print_at_once(traceback.format_exc())
    sys.stderr.flush()
    end_all(comm, error)


def _make_folder(job: Job, out: str | Path | None, before: Resumed | None) -> Path:
    folder = layout.choose(job, out, before)
    layout.create(folder, job, before)
    return folder.absolute()


def _checkpoint_lines(checkpoints: Checkpoints) -> Iterator[str]:
    if checkpoints.resumed is not None:
        yield f"resuming from {checkpoints.resumed}"
    if not checkpoints.shared:
        yield f"no checkpoints: {checkpoints.folder} is not visible on every host"


def _optimizer_lines(job: Job, optimizer: OptimizerSpec | Sequence[torch.optim.Optimizer]) -> Iterator[str]:
    n_servers = job.cluster.servers
    if n_servers < 2 or job.paradigm.steps_on_workers or isinstance(optimizer, OptimizerSpec):
        return
    for kind in dict.fromkeys(map(type, optimizer)):
        if not kind.__module__.startswith("torch."):  # those of torch compute with each parameter by itself
            yield (
                f"optimizer {kind.__name__}: each of {n_servers} servers steps its own parameters; "
                "one that computes with all parameters together needs one server"
            )
