"""Checks of a job that need torch: on rank 0, before files are put aside, and where a training script connects."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from hpcsync.config import torch_optimizers
from hpcsync.config.errors import JobError, shown
from hpcsync.config.job import Job, Script, refuse_unevaluated
from hpcsync.config.workloads import Timing
from hpcsync.core.stanza_resolution import stanza_options
from hpcsync.planning.checks import is_number
from hpcsync.training import compressor
from hpcsync.training.flat_model import flat_dtype, trainable
from hpcsync.training.model_split import ModelSplit, check_cut, cut
from hpcsync.training.optimizers import ELEMENTWISE, OptimizerSpec
from hpcsync.training.sampler import fetch, whole_batches
from hpcsync.workloads.registry import Workload, build

IN_DDP = "model: must not be in a DistributedDataParallel, which averages gradients itself; use its module"
CUT_SAMPLES = 2  # samples with which the halves of a model are tried


def optimizer_spec(job: Job) -> OptimizerSpec:
    """Return the job's optimizer.

    Raises
    ------
    JobError
        If torch does not have the name or an option, or a server cannot run it.
    """
    settings = job.optimizer
    torch_optimizers.check_name(settings)
    parameters = list(inspect.signature(ELEMENTWISE[settings.name]).parameters.values())[2:]
    defaults = {each.name: each.default for each in parameters if each.name not in torch_optimizers.IMPLEMENTATION}
    torch_optimizers.check_options(settings, defaults)
    for key, value in settings.options.items():
        if (must := _unlike(value, defaults[key])) is not None:
            raise JobError(f"optimizer.{key} = {shown(value)}: must be {must}")
    spec = OptimizerSpec.of_job(job)
    try:
        _try(spec)
    except (ValueError, TypeError, IndexError, RuntimeError, ArithmeticError) as error:
        raise JobError(f"optimizer = {shown(settings.options)}: torch says: {str(error).splitlines()[0]}") from None
    return spec


def _unlike(value: Any, default: Any) -> str | None:
    """Return what an option must be if its value is of another kind than its default, else None."""
    if isinstance(default, bool):
        return None if isinstance(value, bool) else "true or false"
    if isinstance(default, int | float):
        return None if is_number(value) and math.isfinite(value) else f"a finite number, such as {default:g}"
    if isinstance(default, tuple):
        alike = isinstance(value, list | tuple) and len(value) == len(default) and all(map(is_number, value))
        return None if alike else f"a list of {len(default)} numbers, such as {shown(default)}"
    return None


def _try(spec: OptimizerSpec) -> None:
    """Make two updates of one number: torch checks some options only when they are first used."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    optimizer = spec.build(parameter)
    optimizer.step()
    optimizer.step()


def check(job: Job) -> Workload:
    """Build the job's workload and check job and workload against each other.

    Raises
    ------
    JobError
        If they do not fit.
    """
    optimizer_spec(job)
    workload = build(job)
    name = f"workload.name = {shown(job.workload.name)}"
    halves = check_model(job, workload.model, name)
    assert not isinstance(job.workload, Script), "such a job has no workload"
    if workload.train is not None:
        batch_size, samples = job.workload.batch_size, len(workload.train)  # type: ignore[arg-type]
        try:
            whole_batches(batch_size, samples)
        except ValueError as error:
            raise JobError(f"workload.{error}") from None
        if halves is not None:
            assert workload.loss is not None
            some = fetch(workload.train, np.arange(min(samples, CUT_SAMPLES)))
            with _of_the_cut(job):
                check_cut(workload.model, halves, workload.loss, some)
    if workload.evaluate is None:
        refuse_unevaluated(job, f"{name} must be one that can be evaluated")
    return workload


def check_device(model: torch.nn.Module, name: str) -> None:
    """Raise JobError unless the model, called `name` in the message, is on the CPU or on one GPU."""
    devices = {str(tensor.device) for tensor in (*model.parameters(), *model.buffers())}
    if len(devices) > 1 or {device.partition(":")[0] for device in devices} - {"cpu", "cuda"}:
        raise JobError(f"{name}: must be on the CPU or on one GPU as a whole, not on {', '.join(sorted(devices))}")


def check_model(
    job: Job,
    model: torch.nn.Module,
    name: str,
    *,
    parameters: Sequence[torch.nn.Parameter] | None = None,
) -> ModelSplit | None:
    """Check that the model can be trained in flat shards, one per server, and that its buffers can be sent.

    Parameters
    ----------
    job
        The job.
    model
        The model of the workload or script.
    name
        Name of the model's source in messages.
    parameters
        Parameters of a script's optimizers; None for a workload, of which all trainable ones are trained.

    Returns
    -------
    ModelSplit or None
        The two halves under layer separation, otherwise None.

    Raises
    ------
    JobError
        If the model does not fit the job.
    """
    for tensor_name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise JobError(f"{name}: {tensor_name} must have its shape: call the model once before connect")
    try:
        trained = trainable(model) if parameters is None else parameters
        size = sum(parameter.numel() for parameter in trained)
        compressor.of_job(job, trained, flat_dtype(trained))  # raises if its gradients cannot be compressed
    except ValueError as error:
        raise JobError(f"{name}: {error}") from None
    halves = None
    if job.paradigm.separates_layers and not isinstance(job.workload, Timing):
        with _of_the_cut(job) as submodule:
            halves = cut(model, submodule)
    check_device(model, name)
    if job.cluster.servers > size:
        raise JobError(f"cluster.servers = {job.cluster.servers}: must be at most the model's {size} parameters")
    for buffer_name, buffer in model.named_buffers():
        if buffer.layout != torch.strided or buffer.is_quantized:
            raise JobError(f"{name}: the buffer {buffer_name} must be a dense tensor")
    _refuse_aliases(name, model, trained)
    if job.cluster.workers > 1 and (job.paradigm.one_model or not job.paradigm.steps_on_workers):
        _refuse_renormalisation(job, name, model, trained)
    for key, value in model.state_dict().items():
        if isinstance(value, torch.Tensor) and value.dtype in (torch.complex32, torch.complex128):
            raise JobError(f"{name}: {key} must not be {value.dtype}, which weights.safetensors cannot hold")
    if job.paradigm.separates_layers and job.evaluation.buffers == "mean" and any(True for _ in model.buffers()):
        raise JobError(
            f'evaluation.buffers = "mean": must be another with paradigm.name = "{job.paradigm.name}", where no worker '
            "trains the whole model"
        )
    return halves


def _refuse_aliases(name: str, model: torch.nn.Module, trained: Sequence[torch.nn.Parameter]) -> None:
    """Raise JobError if a trained parameter has the memory of another tensor of the model: it will get its own."""
    names: dict[int, str] = {}
    its_own = {id(p) for p in trained}
    tensors = sorted((*model.named_parameters(), *model.named_buffers()), key=lambda item: id(item[1]) not in its_own)
    for key, tensor in tensors:
        place = tensor.data_ptr() if tensor.numel() else 0
        if place in names:
            raise JobError(f"{name}: {key} must not share memory with {names[place]}: let both be one parameter")
        if place and id(tensor) in its_own:
            names[place] = key


def _refuse_renormalisation(job: Job, name: str, model: torch.nn.Module, trained: Sequence[torch.nn.Parameter]) -> None:
    """Raise JobError if a forward pass changes trained weights: each worker's would change the rows that it uses."""
    its_own = {id(p) for p in trained}
    for key, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.max_norm is not None:
            if id(module.weight) in its_own:
                raise JobError(
                    f"{name}: {key} must have no max_norm with paradigm.name = {shown(job.paradigm.name)}: its forward "
                    "pass changes weights on one worker alone"
                )


@contextmanager
def _of_the_cut(job: Job) -> Iterator[str]:
    """Give the name of the cut, and report a ValueError as an error of the key paradigm.cut."""
    name = stanza_options(job).cut
    try:
        yield name
    except ValueError as error:
        raise JobError(f"paradigm.cut = {shown(name)}: {error}") from None
