"""Connect a training script to a run: one call makes it distributed."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

from hpcsync.api.ranks import agree, join, world
from hpcsync.api.single_process import LocalSession
from hpcsync.api.user_errors import print_user_errors_in_one_line
from hpcsync.config.errors import JobError, refuse_empty
from hpcsync.config.job import Job, refuse_unevaluated, refuse_unused
from hpcsync.config.overrides import default_servers
from hpcsync.core.job_validation import IN_DDP, check_device, check_model
from hpcsync.core.session import Session
from hpcsync.export import loggers
from hpcsync.paradigms import OPTIONS
from hpcsync.paradigms.allreduce import AllReduceOptions
from hpcsync.run_dir import layout, lock
from hpcsync.run_dir.checkpoint import Resumed
from hpcsync.run_dir.progress_line import say
from hpcsync.system import gpu_selection, loader_processes, rank_environment
from hpcsync.training.buffers import Calibrate
from hpcsync.training.flat_model import device_of
from hpcsync.training.script_optimizers import describe, holds_another, trained_parameters, unwrapped
from hpcsync.workloads.registry import Evaluate

if TYPE_CHECKING:
    from mpi4py import MPI


T = TypeVar("T")


def device() -> torch.device:
    """Return the device on which this process trains, and make it the current device of torch and CuPy.

    The ranks of a node take its GPUs in turn.

    Returns
    -------
    torch.device
        A GPU, or the CPU if there is no GPU that both torch and CuPy can use.

    Notes
    -----
    Call it before anything else uses a GPU and before mpi4py.MPI is imported: a CUDA-aware MPI binds to the GPU that
    is current when it starts.
    """
    print_user_errors_in_one_line()
    found = gpu_selection.found()
    if rank_environment.expected_rank() == 0:
        print(found.unused, end="", flush=True)
    return gpu_selection.claim(gpu_selection.choose("auto", "auto", found))


@lock.released_on_error()
def connect(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    paradigm: str = "bsp",
    *,
    servers: int | None = None,
    seed: int = 0,
    stop: Mapping[str, Any] | None = None,
    schedule: Mapping[str, Any] | None = None,
    lr_clock: str = "samples",
    async_lr_scale: float | str | None = None,
    clip_norm: float | None = None,
    evaluate: Evaluate | None = None,
    every_samples: int = 5000,
    buffers: str = "worker",
    calibrate: Calibrate | None = None,
    compute: Mapping[str, Any] | None = None,
    batches: Mapping[str, Any] | None = None,
    compression: Mapping[str, Any] | None = None,
    window: str | int = "auto",
    placement: str = "packed",
    colocated: bool = False,
    name: str | None = None,
    out: str | Path | None = None,
    on_death: str = "end",
    checkpoint: Mapping[str, Any] | None = None,
    resume: bool = False,
    log: str | None = None,
    comm: MPI.Intracomm | None = None,
    **options: Any,
) -> Session:
    """Make this process a rank of a training run.

    If an MPI launcher has started several ranks, the first `servers` of them become servers and the others workers.
    A single process trains alone: `step` calls `optimizer.step`, and nothing is recorded.

    Parameters
    ----------
    model : torch.nn.Module or list of torch.nn.Module
        The same model on every rank; all ranks start from rank 0's weights and buffers. It must be on the CPU or on
        this rank's GPU as a whole (see `hpcsync.device`); parameters are float32, float64, bfloat16 or float16. Several
        models, such as a generator and a discriminator, are given in a list.
    optimizer : torch.optim.Optimizer or list of torch.optim.Optimizer
        The script's optimizer, with any number of parameter groups, or a list of several. It may already have a state
        (`load_state_dict`). The parameters in its groups are trained, also those that are frozen at first and trained
        later. The other parameters of the model keep their values, unless the script or the model changes them, such
        as a moving average; the final model then has the values of one worker. Until the end of the `with` block, the
        optimizer's `step` is the step of the session.

        The optimizer runs on the servers. It may be any `torch.optim.Optimizer` that needs no closure and no sparse
        gradients. If it is not element-wise (such as Muon), a shard consists of whole parameters. With "easgd",
        "ashl", "adsp", "async-diloco" and without servers the script's own optimizer runs on every worker.

        Learning rates and other numbers of its groups may be changed in the loop, for example by a scheduler. A
        gradient is used with the values at its step; an update from several gradients uses the mean of their values.
    paradigm : str
        Name of the synchronisation paradigm, as in [paradigm] of the job file; `options` are the other keys of that
        table, such as staleness=3.

        With "allreduce" the gradients are the mean over all workers when `backward` returns; call all except the last
        `backward` of a step within `Session.no_sync`. With cancel = "abort" the loop may call `Session.cancelled`
        between the pieces of a batch.
    servers : int, optional
        Number of servers; by default 1, or 0 for a paradigm without servers.
    seed : int
        Seed of the data order and of every random choice of the run.
    stop : mapping, optional
        As [stop] of the job file: samples, updates, seconds, target_accuracy, target_loss. The targets need `evaluate`.
        By default the run ends when every worker has left its `with` block.
    schedule, lr_clock, async_lr_scale
        As [optimizer.schedule] and [optimizer] of the job file, with the same defaults. The schedule's factor
        multiplies the rates of the optimizer.
    clip_norm : float, optional
        Largest norm of the gradient that the optimizer gets, as for `torch.nn.utils.clip_grad_norm_`. On servers the
        gradient is the mean over workers, which a script cannot clip.
    evaluate : callable, optional
        ``evaluate(model) -> (loss, accuracy)``. It is called every `every_samples` samples, in a thread of server 0, or
        of worker 0 if there are no servers.
    every_samples : int
        Samples between two evaluations.
    buffers : str
        As evaluation.buffers of the job file: "worker", "mean" or "recompute". Selects the buffers, such as BatchNorm's
        running statistics, of evaluations and of the final model.
    calibrate : callable, optional
        With "recompute", ``calibrate(model)`` passes data through a model to recompute its statistics, such as
        ``lambda model: torch.optim.swa_utils.update_bn(loader, model)``.
    compute : mapping, optional
        As [cluster.compute] of the job file: lengthens each iteration, to emulate an uneven cluster.
    batches : mapping, optional
        As [batches] of the job file: batch sizes proportional to the workers' speeds; `total` is required. A gradient
        must be the mean over the worker's batch; it is weighted by the size of the batch.
    compression : mapping, optional
        As [compression] of the job file, such as ``{"name": "top-k", "ratio": 0.01}``: compression of the workers'
        pushes. A single process does not compress, and trains without the momentum of "dgc".
    window : str or int
        As cluster.window of the job file: how GPU tensors are transferred between ranks. An integer is the option
        paradigm.window of "sync-switch" instead.
    placement : str
        As cluster.placement of the job file. With "spread" each server is on a node of its own, if possible; the
        session's `rank` then differs from the MPI rank, except for rank 0.
    colocated : bool
        As cluster.colocated of the job file: server i is on the node of worker i.
    name : str, optional
        Name of the run; by default the name of the script.
    out : path, optional
        Folder of the run; by default runs/NAME-TIME/. A single process writes none.
    on_death : str
        As cluster.on_death of the job file. With "continue" the run continues when the process of a worker dies, if the
        MPI library supports it.
    checkpoint : mapping, optional
        As [checkpoint] of the job file: how often the state of the run is saved in its folder.
    resume : bool
        Resume from the newest checkpoint in `out`, if there is one. Loaders continue after the samples already used,
        and the random generators of Python, NumPy and torch are restored; the script must restore any other state. In
        a single process it is an error if there is a checkpoint.
    log : str, optional
        Also log scalars of the run, on rank 0: "tensorboard", "wandb" or "mlflow"; not in a single process.
    comm : mpi4py.MPI.Intracomm, optional
        Ranks that take part; by default all.
    **options
        Keys of [paradigm] in the job file, except the name.

    Returns
    -------
    Session
        Session of this process, to be used in a `with` statement.

    Raises
    ------
    JobError
        For a setting that is not allowed, before any training begins.
    LaunchError
        If the launcher started the ranks wrongly, for example with another MPI than the one that mpi4py loads.

    Notes
    -----
    If one of these exceptions is not caught, all ranks end with status 2, and one line replaces the traceback.

    Examples
    --------
    ::

        model = Net().to(hpcsync.device())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with hpcsync.connect(model, optimizer, "ssp", staleness=3) as sync:
            for x, y in sync.shard(dataset, batch_size=32, epochs=10):
                optimizer.zero_grad()
                loss = criterion(model(x), y)
                loss.backward()
                sync.step(loss)

    Start it with ``hpcsync launch -n 4 -- python train.py``: one server and three workers.
    """
    print_user_errors_in_one_line()
    loader_processes.refuse_within()
    if on_death == "restart":
        raise JobError(
            'on_death = "restart": must be "end" or "continue" in a script, whose ranks another program starts'
        )
    refuse_empty("out", out)
    models, given = _listed(model, torch.nn.Module, "model"), _listed(optimizer, torch.optim.Optimizer, "optimizer")
    if comm is None and rank_environment.under_launcher():
        loader_processes.start(tensor for each in models for tensor in chain(each.parameters(), each.buffers()))
    comm = comm or world()
    options = {"name": paradigm, **options}
    if isinstance(window, int):
        options["window"], window = window, "auto"
    servers = default_servers(options) if servers is None else servers
    before: Resumed | None = None
    if comm is None or comm.size == 1:
        if layout.resuming(out, resume) is not None:
            raise JobError(f"resume: needs several ranks: a single process cannot resume the run in {out}")
        lock.release_all()  # it writes no run
        comm, n_workers = None, OPTIONS[paradigm].least_workers if paradigm in OPTIONS else 1
        options, batches = _for_single_process(options, batches)
    else:
        from hpcsync.mpi.session_base import refuse_within_another

        refuse_within_another(comm)
        agree(comm, lambda: loggers.load(log, "log"))
        before = agree(comm, lambda: layout.resuming(out, resume))
        n_workers = (
            comm.size - servers if before is None or before.job.paradigm.needs_all else before.job.cluster.workers
        )
    optimizers = tuple(map(unwrapped, given))
    model = models[0] if len(models) == 1 else torch.nn.ModuleList(models)
    check_device(model, "model")
    parameters = trained_parameters(optimizers, model)
    table = {
        "name": name or layout.name_of_script("script"),
        "seed": seed,
        "workload": {"name": "script"},
        "optimizer": {
            **describe(optimizers),
            "lr_clock": lr_clock,
            **({} if async_lr_scale is None else {"async_lr_scale": async_lr_scale}),
            "schedule": dict(schedule) if schedule else None,
            "clip_norm": clip_norm,
        },
        "stop": dict(stop or {}),
        "evaluation": {"every_samples": every_samples, "buffers": buffers},
        "checkpoint": dict(checkpoint or {}),
        "paradigm": options,
        "batches": dict(batches or {"policy": "equal"}),
        "compression": dict(compression or {"name": "none"}),
        "cluster": {
            "servers": servers,
            "workers": n_workers,
            "device": device_of(model).type,
            "window": window,
            "on_death": on_death,
            "placement": placement,
            "colocated": colocated and comm is not None,
            "compute": dict(compute) if compute else None,
        },
    }
    job = Job.from_table(table)
    if before is None:
        refuse_unused(job, table)
    if not job.paradigm.steps_on_workers:
        _refuse_holders(job, optimizers)
    if len(optimizers) > 1:
        _refuse_several_optimizers(job)
    if evaluate is None:
        refuse_unevaluated(job, "needs evaluate, which measures it")
    if (buffers == "recompute") != (calibrate is not None):
        raise JobError(f'buffers = "{buffers}": "recompute" needs calibrate, and no other choice takes it')
    if comm is None:
        check_model(job, model, "model", parameters=parameters)
        if job.paradigm.separates_layers:  # a single process trains all layers
            one = job.cluster.model_copy(update={"workers": 1})
            job = job.model_copy(update={"paradigm": AllReduceOptions(), "cluster": one})
        if out is not None:
            print(f"hpcsync: single process: no trace is written to {out}", file=sys.stderr, flush=True)
        return LocalSession(job, model, optimizers, evaluate, calibrate)
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise JobError(IN_DDP)
    from hpcsync.mpi.transport.node_topology import arranged

    trained = {id(p) for p in parameters}
    n_left_out = sum(p.requires_grad and id(p) not in trained for p in model.parameters())
    n_frozen = sum(not p.requires_grad for p in parameters)
    if job.paradigm.separates_layers and (n_left_out or n_frozen):
        raise JobError(
            f'paradigm.name = "{job.paradigm.name}": the optimizer must have exactly the trainable parameters: '
            f"{n_left_out} are in none, and {n_frozen} of its own are frozen"
        )
    if comm.rank == 0 and n_left_out:
        say(f"{n_left_out} trainable parameters are in no optimizer and keep their values")
    if resume and before is None:
        agree(comm, lambda: layout.put_aside(out))
    session = join(arranged(comm, job.cluster), job, model, optimizers, evaluate, out, before, calibrate, log)
    session.take_over()
    return session


def _listed(given: Any, kind: type[T], name: str) -> list[T]:
    """Return what a script gave, one object or a list of several; raise JobError if one is of another kind."""
    found = [*given] if isinstance(given, list | tuple) else [given]
    for each in found:
        if not isinstance(each, kind):
            raise JobError(f"{name}: must be a torch {kind.__name__} or a list of them, not {type(each).__name__}")
    return found


def _for_single_process(
    options: dict[str, Any], batches: Mapping[str, Any] | None
) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
    """Return the paradigm's options and [batches] without what needs several workers: k, group sizes and limits."""
    k = options.get("k")
    if type(k) is int and k > 1:
        options = {**options, "k": 1}
    options = {key: value for key, value in options.items() if key not in ("k_min", "k_start", "fc_workers")}
    return options, batches and {key: batches[key] for key in ("policy", "total") if key in batches}


def _refuse_several_optimizers(job: Job) -> None:
    """Raise JobError for a job with which a script must have one optimizer."""
    if job.compresses and job.paradigm.contribution == "gradient":
        raise JobError(
            f'compression.name = "{job.compression.name}": must be left out with several optimizers: '
            "a step changes the parameters of one, and what was kept back of the others would be lost"
        )
    if job.batches.policy != "equal":
        raise JobError(
            f'batches.policy = "{job.batches.policy}": must be "equal" with several optimizers: '
            "each step is allocated samples of its own, and those of a batch's further steps would not be trained on"
        )
    if job.paradigm.mixes_pushes:
        raise JobError(
            f'paradigm.name = "{job.paradigm.name}": must be another with several optimizers: '
            "an update would be of pushes that step different ones"
        )


def _refuse_holders(job: Job, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        if holds_another(optimizer):
            raise JobError(
                f"optimizer {type(optimizer).__name__}: must not wrap another optimizer with paradigm.name = "
                f'"{job.paradigm.name}", which steps on servers; "allreduce" and others that step on workers take it'
            )
