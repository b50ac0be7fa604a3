"""Tables of the job file's keys, generated from its schema: key, default, allowed values, description.

Key, default and allowed values come from the pydantic models of `hpcsync.config`. Descriptions and defaults in words
are in `KEYS` and `DEFAULTS`, those of a paradigm's options in its declaration.
A key without a description, or a description without a key, fails the build.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import fields
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import paradigms
from annotated_types import Ge, Gt, Le, Lt, MinLen, MultipleOf
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from hpcsync.config.job import Job
from hpcsync.paradigms import OPTIONS
from hpcsync.paradigms.options import ParadigmOptions

MISSING = "required"

# ---- the words: by table, kind of the table (if there are several) and key ----

SECTIONS = {
    "": "The top of the file.",
    "workload": "Model and data. `name` selects the workload. [Write a workload](../how-to/workload.md) adds your own.",
    "optimizer": "The optimizer. It runs on the servers; without servers, and under `easgd`, `ashl`, `adsp` and "
    "`async-diloco`, it runs on every worker. Every other key is an option of the `torch.optim` class, such as "
    "`momentum`.",
    "optimizer.schedule": "The learning rate over time. It is optional.",
    "stop": "Conditions that end the run. The first one that holds ends it. At least one is required, except in a "
    "training script.",
    "evaluation": "Evaluation during the run. It runs in a thread of server 0 and delays no worker, except in a "
    "search of `adsp` by evaluations; without servers it runs in a thread of rank 0, which also trains.",
    "predicted": "Prediction of [`hpcsync advise`](../how-to/advise.md) for the job that it writes. The summary and "
    "the report compare the run with it; nothing else uses it. `--set` drops it, unless it only changes the seed.",
    "checkpoint": "Checkpoints. [Resume and checkpoints](../how-to/resume.md) describes their use.",
    "paradigm": "The synchronisation paradigm. `name` selects it. [Paradigms](../paradigms/index.md) has a page for "
    "each one.",
    "batches": "Batch sizes that follow the workers' speeds. It is optional; see "
    "[Batch allocation](../paradigms/batch-allocation.md).",
    "compression": "Compression of pushes. It is optional; see [Compress pushes](../how-to/compress.md).",
    "cluster": "Ranks, devices and the transport between them.",
    "cluster.compute": "The time of an iteration. Real ranks pad each iteration to the drawn time; a simulation "
    "takes that time. "
    "It is optional on real ranks.",
    "cluster.network": "Links of a simulated cluster. Real ranks use the network they run on.",
    "cluster.events": "Changes of a worker's device during the run, one `[[cluster.events]]` table each. A change "
    "applies to real "
    "ranks and simulations alike, except `die`, which real ranks refuse.",
}

KINDS = {
    "workload": {
        "digits": "Handwritten digits of scikit-learn (8 x 8 pixels) and a small convolutional network.",
        "images": "Drawn stripes, classified by their direction, and a small VGG.",
        "cifar10, cifar100": "CIFAR-10 or CIFAR-100 and a small VGG. Nothing is downloaded.",
        "linear": "Least squares in float64 with a known optimum.",
        "text": "A small transformer that predicts the next character of the source of Python's standard library; "
        "about every "
        "tenth file is held out. The text depends on the version of Python, which the trace records.",
        "timing": "No arithmetic: a vector of float32 numbers is transferred, for schedules and measurements.",
        '"package.module:function"': "Your own workload: the function returns a `hpcsync.Workload`.",
    },
    "optimizer.schedule": {
        "multistep": "The learning rate is multiplied by `gamma` at every milestone.",
        "cosine": "The learning rate falls to zero along half a cosine.",
    },
    "cluster.compute": {
        "constant": "Every iteration takes the same time.",
        "lognormal": "Log-normal times.",
        "exponential": "Exponential times.",
        "table": "Times from a CSV file.",
    },
    "compression": {
        "none": "Pushes are dense.",
        "top-k": "The elements of largest magnitude of each tensor.",
        "random-k": "Random elements of each tensor.",
        "dgc": "Top-k of gradients that are accumulated with a momentum (Lin et al., 2018).",
        "qsgd": "Random rounding to levels of each bucket's norm, unbiased (Alistarh et al., 2017).",
        "one-bit": "One bit per element, and the means of both signs (Seide et al., 2014).",
        "sign": "One bit per element, and the mean magnitude (Karimireddy et al., 2019).",
        "powersgd": "Two factors of low rank for each matrix (Vogels et al., 2019).",
        "fp16": "Half precision.",
        "bf16": "Half precision with the range of float32.",
    },
}

KEYS = {
    "name": "Name of the run and of its folder.",
    "seed": "Seed of the initial weights, the data order, drawn times, peers and random codecs.",
    "workload.batch_size": "Samples of a worker's iteration (under `stanza`, of a convolution worker's).",
    "workload.images.samples": "Training images; 500 more are held out.",
    "workload.images.size": "Height and width of an image in pixels.",
    "workload.width": "Channels of the first convolution.",
    "workload.hidden": "Width of the fully-connected layers.",
    "workload.dropout": "Dropout in the fully-connected layers.",
    "workload.cifar10, cifar100.folder": "Folder, relative to the job file, that contains the Python version of the "
    "archive "
    "(`cifar-10-python.tar.gz` or `cifar-100-python.tar.gz`), unpacked or not.",
    "workload.linear.features": "Features of a sample.",
    "workload.linear.samples": "Training samples.",
    "workload.linear.noise": "Standard deviation of the noise.",
    "workload.text.batch_size": "Sequences of a worker's iteration.",
    "workload.text.context": "Characters of a sequence.",
    "workload.text.layers": "Layers of the transformer.",
    "workload.text.width": "Width of the transformer; a multiple of `heads`.",
    "workload.text.heads": "Attention heads.",
    "workload.timing.parameters": "Numbers in the vector.",
    "workload.timing.classifier": "For `stanza` in a simulation: how many of them are above the cut; less than "
    "`parameters`.",
    "workload.timing.activations": "For `stanza` in a simulation: numbers of a sample that cross the cut.",
    'workload."package.module:function".options': "Keyword arguments of the function.",
    "optimizer.name": "Lower-case name of the class.",
    "optimizer.lr": "Learning rate.",
    "optimizer.lr_clock": "Unit that a schedule counts. Asynchronous paradigms make one update per gradient, so a "
    "schedule in updates decays P times sooner than under BSP. Where the optimizer runs on the workers, a worker's "
    "updates are its own steps, and its samples count P times.",
    "optimizer.async_lr_scale": 'With `"1/workers"` an update of n of P gradients is scaled by n/P, so that a pass '
    "over the data takes "
    "the same total step as under BSP. Must be 1.0 where the optimizer runs on the workers.",
    "optimizer.schedule": "A table, see below.",
    "optimizer.clip_norm": "Largest norm of the gradient that the optimizer gets. Only the run of a training script "
    "has it (`clip_norm` of `connect`).",
    "optimizer.groups": "Options of each parameter group, and its number of parameters, if a training script has "
    "several. Written by `connect`.",
    "optimizer.schedule.multistep.milestones": "Samples or updates (`lr_clock`) at which the rate changes.",
    "optimizer.schedule.multistep.gamma": "Factor at each milestone.",
    "optimizer.schedule.warmup": "Samples or updates over which the rate rises to `lr`.",
    "optimizer.schedule.cosine.total": "Samples or updates after which the rate is 0; more than `warmup`.",
    "stop.samples": "Samples that updates were computed from.",
    "stop.updates": "Updates of the model; without servers, steps of all workers.",
    "stop.seconds": "Seconds of training.",
    "stop.target_accuracy": "Accuracy of an evaluation, or more.",
    "stop.target_loss": "Loss of an evaluation, or less.",
    "stop.on_nan": "Reaction to a loss or a gradient that is not finite: a line is printed once, or the run ends as "
    "failed.",
    "evaluation.every_samples": "Samples between two evaluations; 0: only at the end.",
    "evaluation.seconds": "Simulation only: duration of an evaluation. Training does not wait for it, except in a "
    "search of `adsp` by evaluations.",
    "evaluation.buffers": "Buffers, such as BatchNorm's running statistics, with which the model is evaluated and with "
    "which it ends: those of the first active worker, the mean over the active workers, or the first worker's with "
    "BatchNorm's statistics recomputed from 32 batches of the training data. "
    "See [Models with BatchNorm](../how-to/workload.md#models-with-batchnorm).",
    "predicted.seconds": "Mean time to the target.",
    "predicted.low_s": "With `high_s`: the interval in which a run should lie with a probability of 80 %.",
    "predicted.high_s": "See `low_s`.",
    "predicted.samples_per_s": "Samples trained a second.",
    "checkpoint.seconds": "Seconds between two checkpoints; 0: only by `updates` and signals.",
    "checkpoint.updates": "Updates between two checkpoints, if that is sooner.",
    "checkpoint.keep": "Number of checkpoints that are kept, the newest ones.",
    "batches.policy": "Equal batches, batches proportional to predicted speeds, or equal predicted times with fixed "
    "costs.",
    "batches.predictor": "Prediction of the speeds.",
    "batches.total": "Samples of all workers' next iterations together; constant during the run.",
    "batches.minimum": "Smallest batch of a worker.",
    "batches.maximum": "Largest batch of a worker.",
    "batches.interval": "Iterations of all workers between two allocations.",
    "batches.gain": "Batches are changed only if the slowest worker's iteration is predicted to become shorter by more "
    "than this share.",
    "compression.gbytes_per_s": "Simulation only: speed of compression in GB/s.",
    "compression.error_feedback": "Elements that a push leaves out are added to the next push.",
    "compression.ratio": "Share of a tensor's elements that is sent. Not under `ashl`, which has `ratio_coarse` and "
    "`ratio_fine`.",
    "compression.dgc.ratio": "Share of a tensor's elements that is sent.",
    "compression.dgc.momentum": "Momentum of the accumulation.",
    "compression.dgc.nesterov": "Use Nesterov's momentum.",
    "compression.dgc.clip": "Largest norm of a gradient.",
    "compression.dgc.warmup": "Pushes with larger ratios at the beginning.",
    "compression.dgc.warmup_ratios": "These ratios, each for as many pushes; at most `warmup` of them.",
    "compression.qsgd.levels": "Levels of the rounding. Up to 127 an element takes one byte, above it two.",
    "compression.qsgd.bucket": "Elements that share a norm.",
    "compression.powersgd.rank": "Rank of the factors.",
    "cluster.servers": "Servers, each with a shard of the weights. Their number does not change a bit of the result.",
    "cluster.workers": "Workers.",
    "cluster.device": 'Device of the ranks. `"auto"`: a GPU where torch and CuPy find one.',
    "cluster.window": "Transport of tensors between ranks: `host` for the CPU; `mpi`, `ipc` or `staged` for GPUs; "
    '`"auto"` measures which is fastest ([GPUs](../how-to/gpus.md)).',
    "cluster.placement": '`"packed"`: the first ranks are the servers. `"spread"`: each server is on a node of its '
    "own, if possible.",
    "cluster.colocated": "Server i is on the node of worker i, and shares its link; the launcher must start two ranks "
    "on a node.",
    "cluster.on_death": '`"continue"`: the other ranks continue when a worker\'s process dies. `"restart"`: '
    "`hpcsync run` restarts the remaining ranks from the last checkpoint ([A process "
    "dies](../how-to/on-death.md)).",
    "cluster.workers_min": "Fewest workers with which the run may start or resume ([Resume and "
    "checkpoints](../how-to/resume.md#fewer-workers-and-more)).",
    "cluster.times_from": "Simulation only: trace, or folder of a run, whose times are used.",
    "cluster.compute": "A table, see below.",
    "cluster.network": "A table, see below.",
    "cluster.update_gbytes_per_s": "Simulation only: throughput of updates in GB/s, of the contributions that a server "
    "adds to its weights and of the weights to which a worker without servers adds its step.",
    "cluster.checkpoint_s": "Simulation only: seconds of a checkpoint, during which no worker computes "
    "([Simulate a cluster](../how-to/simulate.md#checkpoints-and-deaths)). Real ranks ignore it.",
    "cluster.events": "A list of tables, see below.",
    "cluster.compute.constant.seconds": "Seconds of an iteration of the job's batch size.",
    "cluster.compute.lognormal.seconds": "Median seconds of an iteration of the job's batch size.",
    "cluster.compute.lognormal.jitter": "Standard deviation of the logarithm.",
    "cluster.compute.exponential.seconds": "Mean seconds of an iteration of the job's batch size.",
    "cluster.compute.table.table": "The file, relative to the job file; worker and iteration count from 0.",
    "cluster.compute.fixed_share": "Share of the time that does not depend on the batch size.",
    "cluster.compute.backward_share": "Share of the time, at its end, in which the backward pass computes the "
    "gradient, from its end to its beginning; all-reduce sums buckets of `paradigm.bucket_mb` meanwhile.",
    "cluster.network.bandwidth_gbit": "Bandwidth of each worker's link, up and down each, in Gbit/s.",
    "cluster.network.server_bandwidth_gbit": "Bandwidth of each server's link.",
    "cluster.network.latency_us": "Latency of a message in microseconds.",
    "cluster.events.worker": "The worker.",
    "cluster.events.at_s": "Seconds since the start of the run. Exactly one of `at_s` and `at_iteration` is given.",
    "cluster.events.at_iteration": "Iteration of this worker, from 1, at whose beginning the change happens.",
    "cluster.events.change": "`slow`: iterations take `factor` times as long, until the next change. `recover`: a "
    "factor of 1. `leave`: the "
    "worker leaves before its next iteration. `join`: it takes part (again); with `at_s` only. `die`: its process "
    "dies, and all ranks restart from the last checkpoint; simulation only, with `at_s` and "
    '`cluster.on_death = "restart"` only.',
    "cluster.events.factor": "Factor of `slow`; required there, absent otherwise.",
    "cluster.events.restart_s": "Seconds from `die` until all ranks train again; required there, absent otherwise.",
}

DEFAULTS = {  # in words, where the schema has none, or one that it computes
    "optimizer.async_lr_scale": '1.0; `"1/workers"` with `sync-switch`',
    "batches.total": "`workload.batch_size` x workers",
    "compression.gbytes_per_s": "compression takes no time",
    "compression.top-k.error_feedback": "`true`; `false` with `ashl`",
    "compression.random-k.error_feedback": "`true`; `false` with `ashl`",
    "compression.dgc.warmup_ratios": "five ratios that fall by the same factor",
    "cluster.servers": "1; 0 without servers",
    "evaluation.seconds": "evaluations take no time",
    "cluster.update_gbytes_per_s": "updates take no time",
    "cluster.checkpoint_s": "no checkpoints; if ranks die, they take no time",
    "cluster.workers_min": "`workers` to start, 1 to resume",
    "cluster.network.server_bandwidth_gbit": "the largest of `bandwidth_gbit`",
}

ALLOWED = {  # in words, where the schema checks with a function
    "optimizer.async_lr_scale": '1.0 or `"1/workers"`',
    "optimizer.groups": "a list of tables",
    "batches.maximum": "a whole number of at least 1, or a list of them, one per worker",
    "compression.dgc.warmup_ratios": "a list of numbers greater than 0 and at most 1",
    "cluster.network.bandwidth_gbit": "a number from 1e-09 to 1e+15, or a list of them, one per worker",
    "cluster.events": "tables",
    'workload."package.module:function".options': "a table",
}


# ---- the tables ----


def pages() -> dict[str, str]:
    """Return the Markdown of the job file's reference, by the name of the generated file."""
    used: set[str] = set()
    text = "\n".join(_sections(Job, "", used))
    unknown = (KEYS.keys() | DEFAULTS.keys() | ALLOWED.keys()) - used
    if unknown:
        raise ValueError(f"docs/_ext/job_file.py describes keys that the job file does not have: {sorted(unknown)}")
    return {"job-file.md": text}


def _sections(model: type[BaseModel], path: str, used: set[str]) -> Iterator[str]:
    """A section for the keys of this table, then one for each table below it."""
    title = f"`[{path}]`" if path else "Top level"
    title = f"`[[{path}]]`" if path == "cluster.events" else title
    yield f"({_label(path)})=\n## {title}\n\n{SECTIONS[path]}\n"
    below: list[tuple[str, Any]] = []
    rows = []
    for key, field in model.model_fields.items():
        where = f"{path}.{key}" if path else key
        if _tables(field.annotation):
            below.append((where, field))
            if path:
                rows.append(_row(where, [], key, field, used))
        else:
            rows.append(_row(where, [], key, field, used))
    yield _table(rows)
    for where, field in below:
        tables = _tables(field.annotation)
        if len(tables) == 1:
            yield from _sections(tables[0], where, used)
        else:
            yield from _kinds(tables, where, used)


def _kinds(tables: list[type[BaseModel]], path: str, used: set[str]) -> Iterator[str]:
    """A section for a table that is one of several kinds."""
    yield f"({_label(path)})=\n## `[{path}]`\n\n{SECTIONS[path]}\n"
    tag = "model" if path == "cluster.compute" else "name"
    for model in dict.fromkeys(tables):
        kind = _kind(model, tag)
        if kind is None:
            continue
        about = KINDS.get(path, {}).get(kind)
        if about is None:
            about = f"See [{kind}](../paradigms/{OPTIONS[kind].page or kind}.md)."
        yield f"### `{tag} = {_quoted(kind)}`\n\n{about}\n"
        rows = [
            _option_row(OPTIONS[kind], key, field)
            if path == "paradigm"
            else _row(f"{path}.{kind}.{key}", [f"{path}.{key}"], key, field, used)
            for key, field in model.model_fields.items()
            if key != tag
        ]
        yield _table(rows) if rows else "No further keys.\n"


def _quoted(kind: str) -> str:
    return kind if kind.startswith('"') else " or ".join(f'"{name}"' for name in kind.split(", "))


def _kind(model: type[BaseModel], tag: str) -> str | None:
    """The kind's name; None for the table of training scripts, which no file has."""
    names = get_args(model.model_fields[tag].annotation)
    if names == ("script",):
        return None
    return ", ".join(names) if names else '"package.module:function"'


def _tables(annotation: Any) -> list[type[BaseModel]]:
    """The tables that a value of this type may be."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) is Literal:
        return []
    return [table for part in get_args(annotation) for table in _tables(part)]


def _row(where: str, general: list[str], key: str, field: FieldInfo, used: set[str]) -> str:
    def word(words: dict[str, str]) -> str | None:
        found = next((name for name in (where, *general) if name in words), None)
        if found is not None:
            used.add(found)
        return None if found is None else words[found]

    about = word(KEYS)
    if about is None:
        raise ValueError(f"docs/_ext/job_file.py: KEYS has no description of {where}")
    default = MISSING if field.is_required() else word(DEFAULTS) or _default(field)
    allowed = word(ALLOWED) or _allowed(field)
    return f"| `{key}` | {default} | {allowed} | {about} |"


def _option_row(options: type[ParadigmOptions], key: str, field: FieldInfo) -> str:
    """The row of an option of a paradigm, described where the option is declared."""
    about = paradigms.described(options).get(key)
    if about is None:
        raise ValueError(f"{options.__module__}: the docstring of {options.__name__} does not describe {key}")
    words = next(each.metadata.get("words") for each in fields(options) if each.name == key)
    default = MISSING if field.is_required() else words or _default(field)
    return f"| `{key}` | {default} | {_allowed(field)} | {about} |"


def _table(rows: list[str]) -> str:
    return (
        "\n".join(["{.entries}", "| key | default | allowed | description |", "|---|---|---|---|", *rows]) + "\n"
        if rows
        else ""
    )


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None or field.default is PydanticUndefined:
        raise ValueError(f"docs/_ext/job_file.py: DEFAULTS has no words for {field!r}")
    value = field.default
    if value is None or value == () or value == {}:
        return "none"
    if isinstance(value, BaseModel):
        return "see below"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str):
        return f'`"{value}"`'
    return f"{value:g}" if isinstance(value, float) and value < 1e6 else f"{value}"


def _allowed(field: FieldInfo) -> str:
    if _tables(field.annotation):
        return "a table"
    if field.description:
        return field.description.replace("|", "\\|")
    return " or ".join(dict.fromkeys(_values(field.annotation, list(field.metadata))))


def _values(annotation: Any, constraints: list[Any]) -> Iterator[str]:
    """What is allowed, in words."""
    origin = get_origin(annotation)
    if origin is Annotated:
        kind, *more = get_args(annotation)
        extra = [c for m in more for c in (m.metadata if isinstance(m, FieldInfo) else [m])]
        yield from _values(kind, [*constraints, *extra])
    elif origin in (Union, types.UnionType):
        for part in get_args(annotation):
            if part is not type(None):
                yield from _values(part, constraints)
    elif origin is Literal:
        yield ", ".join(f'`"{value}"`' for value in get_args(annotation))
    elif annotation is bool:
        yield "`true`, `false`"
    elif annotation in (int, float):
        yield "a whole number" + _limits(constraints) if annotation is int else "a number" + _limits(constraints)
    elif annotation is str:
        yield "a string"
    else:
        raise ValueError(f"docs/_ext/job_file.py: no words for {annotation!r}; ALLOWED can have them")


def _limits(constraints: list[Any]) -> str:
    said = []
    for c in constraints:
        match c:
            case Ge(ge=low):
                said.append(f"of at least {_number(low)}")
            case Gt(gt=low):
                said.append(f"greater than {_number(low)}")
            case Le(le=high) if high < 2**62:
                said.append(f"at most {_number(high)}")
            case Lt(lt=high):
                said.append(f"less than {_number(high)}")
            case MultipleOf(multiple_of=n):
                said.append(f"a multiple of {n}")
            case Le() | MinLen():
                pass
    return " " + " and ".join(said) if said else ""


def _number(limit: float) -> str:
    return f"{limit:,}" if isinstance(limit, int) else f"{limit:g}"


def _label(path: str) -> str:
    return "job-" + (path.replace(".", "-") or "top")
