"""Connecting a training script to a run: the one call that makes it distributed."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from hpcsync.api.single_process import LocalSession
from hpcsync.config.errors import JobError
from hpcsync.config.job import Job, default_servers
from hpcsync.config.paradigms import AllReduceOptions, StanzaOptions
from hpcsync.core.job_validation import check_model
from hpcsync.core.session import Session
from hpcsync.run_dir import layout
from hpcsync.run_dir.checkpoint import Checkpoints, Resumed
from hpcsync.system import garbage, gpu_selection, launcher
from hpcsync.system.atomic_files import NotWritten
from hpcsync.training.flat_model import device_of
from hpcsync.training.optimizers import OptimizerSpec
from hpcsync.workloads.registry import Evaluate

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcsync.mpi.session_base import Given, RankSession

T = TypeVar("T")


def device() -> torch.device:
    """This process's GPU, which becomes torch's and CuPy's current one: ranks of a node take its GPUs in turn. The CPU
    where there is none that both can use.

    Call it before anything else uses a GPU, and before mpi4py.MPI is imported: an MPI that knows GPUs looks at the
    current one when it starts.
    """
    found = gpu_selection.found()
    if launcher.expected_rank() == 0:
        print(found.unused, end="", flush=True)
    return gpu_selection.claim(gpu_selection.choose("auto", "auto", found))


def connect(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    paradigm: str = "bsp",
    *,
    servers: int | None = None,
    seed: int = 0,
    stop: Mapping[str, Any] | None = None,
    schedule: Mapping[str, Any] | None = None,
    lr_clock: str = "samples",
    async_lr_scale: float | str = 1.0,
    evaluate: Evaluate | None = None,
    every_samples: int = 5000,
    compute: Mapping[str, Any] | None = None,
    batches: Mapping[str, Any] | None = None,
    compression: Mapping[str, Any] | None = None,
    window: str = "auto",
    placement: str = "packed",
    name: str | None = None,
    out: str | Path | None = None,
    on_death: str = "end",
    checkpoint: Mapping[str, Any] | None = None,
    resume: bool = False,
    comm: MPI.Intracomm | None = None,
    **options: Any,
) -> Session:
    """Make this process a part of a training run; use the result in a `with` statement.

    Started as N ranks by an MPI launcher, the first `servers` ranks (one, or none where the paradigm has none) become
    servers and the others workers. As a single process it is the script's own training: `step` is `optimizer.step`, and
    nothing is recorded.

    model:     the same on every rank; rank 0's initial weights become everybody's. Its trainable parameters must be all
               float32 or all float64, and all on the CPU or on this rank's GPU (`hpcsync.device()`).
    optimizer: any element-wise torch.optim optimizer over all of the model's parameters, in one group. It runs on the
               servers, with "easgd", "ashl", "adsp" or without servers on every worker. Its learning rate is where
               `schedule` starts from; changing it in the script is an error.
    paradigm, options: "bsp", "asp", "ssp" (staleness), "dssp" (staleness_min, staleness_max, mode), "k-sync" and
               "k-batch-sync" (k, cancel), "k-async" and "k-batch-async" (k, staleness_max, staleness_weight), these
               four with k_min and k_start if k is "state", "loss" or "min", "easgd" (period, alpha or beta,
               synchronous), "ashl" (steps_coarse, steps_fine, staleness, ratio_coarse, ratio_fine, loss_preset,
               plateau, share, warmup, profiled), "adsp" (check_period_s, interval_min_s, rule, commits,
               search_every_s, loss_rise, loss_target), and without servers "allreduce" (bucket_mb), "local-sgd"
               (steps, outer_lr, outer_momentum), "gossip" (mode, topology, include_self, period). With "allreduce" the
               gradient is the mean of all workers' as soon as `backward` returns, which is to be called once for each
               step. With cancel = "abort" a loop may ask `cancelled` between the pieces of a batch.
    stop:      as the job file's [stop]: samples, updates, seconds, target_accuracy, target_loss (the targets need
               `evaluate`). None: the run ends when every worker has left its `with` block.
    schedule, lr_clock, async_lr_scale: as the job file's [optimizer.schedule] and [optimizer].
    evaluate:  `evaluate(model) -> (loss, accuracy)`, called every `every_samples` samples beside the servers, or
               beside worker 0's training where there are none.
    compute:   as the job file's [cluster.compute]: pads each iteration, to try an uneven cluster.
    batches:   as the job file's [batches]: gives each worker as many samples as suit its speed, of a total that must be
               said. Gradients are means over a worker's batch; they are weighted with its size.
    compression: as the job file's [compression], {"name": "top-k", "ratio": 0.01}: what a worker's pushes are turned
               into before they travel. In a single process nothing does, and the momentum of "dgc" is missing.
    window:    as the job file's cluster.window: how GPU tensors move between ranks.
    placement: as the job file's cluster.placement: with "spread" servers lie on nodes of their own; ranks are then
               counted in another order (the session's `rank`), except for rank 0.
    name, out: what the run is called (default: the script's name) and its folder (default: runs/NAME-TIME/).
    on_death:  as the job file's cluster.on_death: with "continue" the others go on when a worker's process dies, where
               the MPI can.
    checkpoint: as the job file's [checkpoint]: how often all that the run consists of is written into its folder.
    resume:    go on from the newest checkpoint in `out`, if there is one. Loaders then begin after what was trained on,
               and what the script has drawn from Python's, NumPy's and torch's generators goes on with them; what else
               it keeps from iteration to iteration is its own business. A single process cannot: it is refused where
               there is a checkpoint.
    comm:      the ranks that take part; default: all.

    Raises JobError for settings that are not allowed and LaunchError for a launcher that started the ranks wrongly,
    before any training begins.
    """
    comm = comm or world()
    options = {"name": paradigm, **options}
    servers = default_servers(options) if servers is None else servers
    if comm is None or comm.size == 1:
        if layout.going_on(out, resume) is not None:
            raise JobError(f"resume: must come with several ranks: one cannot go on with the run of several in {out}")
        comm, n_workers = None, 2 if paradigm == "stanza" else 1
        options, batches = _alone(options, batches)
    else:
        before = agree(comm, lambda: layout.going_on(out, resume))
        n_workers = comm.size - servers if before is None or before.job.needs_all else before.job.cluster.workers
    spec = _spec(optimizer, model)
    job = Job.from_table(
        {
            "name": name or _script_name(),
            "seed": seed,
            "workload": {"name": "script"},
            "optimizer": {
                "name": spec.name,
                "lr": spec.lr,
                "lr_clock": lr_clock,
                "async_lr_scale": async_lr_scale,
                **({"schedule": dict(schedule)} if schedule else {}),
                **spec.options,
            },
            "stop": dict(stop or {}),
            "evaluation": {"every_samples": every_samples},
            "checkpoint": dict(checkpoint or {}),
            "paradigm": options,
            **({"batches": dict(batches)} if batches else {}),
            **({"compression": dict(compression)} if compression else {}),
            "cluster": {
                "servers": servers,
                "workers": n_workers,
                "device": device_of(model).type,
                "window": window,
                "on_death": on_death,
                "placement": placement,
                **({"compute": dict(compute)} if compute else {}),
            },
        }
    )
    if evaluate is None:
        _refuse_targets(job)
    if comm is None:
        check_model(job, model, "model", evaluated=False)  # its running statistics are all here
        if isinstance(job.paradigm, StanzaOptions):  # with all the layers there is nobody to share them with
            one = job.cluster.model_copy(update={"workers": 1})
            job = job.model_copy(update={"paradigm": AllReduceOptions(name="allreduce"), "cluster": one})
        return LocalSession(job, model, optimizer, evaluate)
    from hpcsync.mpi.transport.node_topology import arranged

    if resume and before is None:
        agree(comm, lambda: layout.put_aside(out))
    session = join(arranged(comm, job.cluster), job, model, spec, evaluate, out, before)
    session.take_over(optimizer)
    return session


def join(
    comm: MPI.Intracomm,
    job: Job,
    model: torch.nn.Module,
    optimizer: OptimizerSpec,
    evaluate: Evaluate | None,
    out: str | Path | None,
    before: Resumed | None = None,
) -> RankSession:
    """This rank's session of a job on `comm`, which must have as many ranks as the job, unless it goes on from
    `before`. Collective."""
    from mpi4py import MPI

    from hpcsync.mpi.session_base import Given
    from hpcsync.mpi.transport.node_memory import MemoryUnreachable
    from hpcsync.mpi.transport.ulfm import refuse_intolerant
    from hpcsync.mpi.transport.window_selection import place

    fewer = before is not None and not job.needs_all and job.cluster.servers < comm.size < job.cluster.ranks
    if comm.size != job.cluster.ranks and not fewer:
        raise JobError(
            f"cluster.workers = {job.cluster.workers}: with cluster.servers = {job.cluster.servers} this takes "
            f"{job.cluster.ranks} ranks, but {comm.size} were started"
        )
    if before is not None and before.n_peers is not None and comm.size > before.n_peers:
        raise JobError(
            f"--resume: {comm.size} ranks were started; must be at most {before.n_peers}, as {before.checkpoint} has "
            "workers"
        )
    check_model(job, model, "model", evaluated=evaluate is not None)
    _refuse_differences(comm, job, model)
    if evaluate is not None and MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise JobError("evaluate: needs an MPI with MPI_THREAD_MULTIPLE, for the evaluation beside server 0")
    if job.cluster.on_death == "continue":
        refuse_intolerant(comm)
    if not job.has_servers and MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise JobError(
            f'paradigm.name = "{job.paradigm.name}": needs an MPI with MPI_THREAD_MULTIPLE: worker 0 hears the others '
            "while it trains"
        )
    _share_cores(comm, is_server=comm.rank < job.cluster.servers)
    with aborting(comm, but=JobError):
        placement = place(comm, job, device_of(model))
        folder = agree(comm, lambda: _make_folder(job, out, before))
        shared = comm.allreduce((folder / layout.JOB).is_file(), MPI.LAND)
    checkpoints = Checkpoints(folder, job.checkpoint.keep, before.checkpoint if before else None, shared)
    if comm.rank == 0:
        lines = [*placement.lines(), *_checkpoint_lines(checkpoints)]
        print(*(f"{line}\n" for line in lines), sep="", end="", flush=True)
    try:
        with aborting(comm, but=(MemoryUnreachable, JobError)):
            if job.steps_on_workers or comm.rank < job.cluster.servers:
                _load(optimizer, device_of(model))
            garbage.freeze()  # here, before there is a session: those are garbage when they have ended
            given = Given(comm, job, model, placement, checkpoints, optimizer, evaluate)
            return _kind(job, comm.rank)(given)
    except (MemoryUnreachable, JobError) as error:
        if comm.rank == 0 and checkpoints.resumed is None:
            layout.withdraw(folder)
        if isinstance(error, JobError):
            raise
        raise JobError(f'cluster.window = "{placement.transport.kind}": must be another here: {error}') from None


def _kind(job: Job, rank: int) -> Callable[[Given], RankSession]:
    """The session of this rank of a job."""
    from hpcsync.mpi.peer.rank0_session import Rank0Session
    from hpcsync.mpi.peer.session import PeerSession
    from hpcsync.mpi.server.local_steps import CommittingSession, ElasticSession
    from hpcsync.mpi.server.session import FollowerSession, LeaderSession, WorkerSession

    if not job.has_servers:
        return Rank0Session if rank == 0 else PeerSession
    if rank < job.cluster.servers:
        return LeaderSession if rank == 0 else FollowerSession
    if job.steps_on_workers:
        return CommittingSession if job.commits else ElasticSession
    return WorkerSession


def world() -> MPI.Intracomm | None:
    """All ranks; None for a process that no MPI launcher started. Raises LaunchError for N worlds of one."""
    if not launcher.under_launcher():
        return None
    if "mpi4py.MPI" not in sys.modules:  # it reads its settings once
        under_slurm = launcher.SLURM_PMI2_SETTINGS if launcher.under_pmi2_of_slurm() else {}
        os.environ.update({**launcher.MPI_SETTINGS, **under_slurm, **os.environ})
    from mpi4py import MPI

    launcher.refuse_singletons(MPI.COMM_WORLD.size, MPI.Get_library_version())
    return MPI.COMM_WORLD


def agree(comm: MPI.Intracomm, on_rank_0: Callable[[], T]) -> T:
    """What the function gives on rank 0, on every rank; the JobError that it raises there is raised everywhere.

    Anything else that it raises ends the job.
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
    """Every rank must train the same model in the same way: shards are cut from it, and decisions hold for all."""
    state = [(key, tuple(value.shape), str(value.dtype)) for key, value in model.state_dict().items()]
    trained = [p.requires_grad for p in model.parameters()]
    everybody = comm.allgather((job.to_toml(), device_of(model).type, state, trained))
    for rank, (job_toml, device, *its_model) in enumerate(everybody):
        if its_model != [*everybody[0][2:]]:
            raise JobError(f"model: must have the same parameters on every rank; rank {rank}'s differ from rank 0's")
        if device != everybody[0][1]:
            raise JobError(
                f"model: must be on {everybody[0][1]} on every rank, as on rank 0; rank {rank}'s is on {device}"
            )
        if job_toml != everybody[0][0]:
            raise JobError(f"connect: must be given the same on every rank; rank {rank}'s settings are not rank 0's")


def _share_cores(comm: MPI.Intracomm, *, is_server: bool) -> None:
    """Give this rank its share of the node's cores, unless OMP_NUM_THREADS says otherwise.

    A server updates in one thread: where torch splits a tensor between threads, the bits would depend on the shards.
    """
    from mpi4py import MPI

    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    share = len(os.sched_getaffinity(0)) // node.size
    node.Free()
    if is_server:
        torch.set_num_threads(1)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, share))


def _load(optimizer: OptimizerSpec, device: torch.device) -> None:
    """A process's first optimizer costs it seconds (torch loads its compiler), which are none of the run's."""
    parameter = torch.nn.Parameter(torch.zeros(1, device=device))
    parameter.grad = torch.zeros(1, device=device)
    optimizer.build(parameter).step()


@contextmanager
def aborting(comm: MPI.Intracomm, *, but: type[BaseException] | tuple[type[BaseException], ...]) -> Iterator[None]:
    """What one rank raises ends the job: the others would wait for it for ever. `but`: what all ranks raise alike."""
    try:
        yield
    except but:
        raise
    except BaseException:
        _abort(comm)
        raise


def _abort(comm: MPI.Intracomm) -> None:
    """End the job for an exception of one rank alone: the others would wait for it for ever."""
    from hpcsync.mpi.session_base import end_all

    error = sys.exception()
    assert error is not None
    if isinstance(error, NotWritten):
        print(f"hpcsync: failed: {error}", file=sys.stderr)
    else:
        traceback.print_exc()
    sys.stderr.flush()
    end_all(comm, error)


def _make_folder(job: Job, out: str | Path | None, before: Resumed | None) -> Path:
    folder = layout.choose(job, out, before)
    layout.create(folder, job, before)
    return folder.absolute()


def _checkpoint_lines(checkpoints: Checkpoints) -> Iterator[str]:
    if checkpoints.resumed is not None:
        yield f"going on from {checkpoints.resumed}"
    if not checkpoints.shared:
        yield f"no checkpoints: not every host sees {checkpoints.folder}"


def _script_name() -> str:
    """What is left of the script's name when it must name a job; nothing is left of `-`, standard input."""
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", Path(sys.argv[0]).stem).strip("._+-") or "script"


def _spec(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> OptimizerSpec:
    try:
        spec = OptimizerSpec.of(optimizer)
    except ValueError as error:
        raise JobError(str(error)) from None
    given = {id(p) for p in optimizer.param_groups[0]["params"] if p.requires_grad}
    if given != {id(p) for p in model.parameters() if p.requires_grad}:
        raise JobError("optimizer: must be given exactly the model's trainable parameters: all of them are trained")
    return spec


def _alone(
    options: dict[str, Any], batches: Mapping[str, Any] | None
) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
    """Of a paradigm's options and of [batches] what one process can keep to: k, the size of a group, and limits, are
    for several workers."""
    k = options.get("k")
    if type(k) is int and k > 1:
        options = {**options, "k": 1}
    options = {key: value for key, value in options.items() if key not in ("k_min", "k_start", "fc_workers")}
    return options, batches and {key: batches[key] for key in ("policy", "total") if key in batches}


def _refuse_targets(job: Job) -> None:
    for key in ("target_accuracy", "target_loss"):
        if (target := getattr(job.stop, key)) is not None:
            raise JobError(f"stop.{key} = {target}: must come with evaluate, which alone can find it")
