"""Job file: one TOML file describes an experiment completely.

`load` reads a job file and returns a `Job`, which is immutable and has every default filled in. `Job.to_toml` writes
it, and `Job.from_toml` restores an equal job. Every error is a `JobError` of one line that names the key, the value and
what is allowed. This module imports neither torch nor MPI: `core.job_validation` checks what depends on the model.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import tomli_w
from pydantic import Field, ValidationError, model_validator

from hpcsync.config import compression as compression_options
from hpcsync.config import torch_optimizers
from hpcsync.config.base import Amount, Count, Positive, Table, matching
from hpcsync.config.batches import Batches
from hpcsync.config.checkpoint import Checkpoint
from hpcsync.config.cluster import Cluster
from hpcsync.config.compression import CompressionOptions, DenseOptions, takes_ratio
from hpcsync.config.errors import JobError, in_one_line, shown
from hpcsync.config.optimizer import Optimizer
from hpcsync.config.overrides import (
    KINDS,
    MOST_LEVELS,
    Override,
    at,
    default_servers,
    excluded,
    override,
    pop,
    set_workers,
)
from hpcsync.config.paradigms import ParadigmTable, kind_of, options_suit
from hpcsync.config.predicted import Prediction
from hpcsync.config.workloads import Cifar, Linear, Script, Timing, WorkloadOptions
from hpcsync.planning.layer_groups import Groups

MOST_CHARACTERS = 1_000_000  # of a job file

# ---- stopping rule and evaluation ----


class Stop(Table):
    """Stopping rule: the first limit or target that is reached ends the run.

    Only the run of a training script may have none; it ends when the workers have left. With on_nan = "stop" the run
    fails when a loss or a gradient is not finite.
    """

    samples: Count | None = None
    updates: Count | None = None
    seconds: Positive | None = None
    target_accuracy: Annotated[float, Field(gt=0, le=1)] | None = None
    target_loss: Annotated[float, Field(allow_inf_nan=False)] | None = None
    on_nan: Literal["warn", "stop"] = "warn"

    @property
    def conditions(self) -> dict[str, float]:
        """Limits and targets that are given, by key."""
        return {key: value for key, value in self if key != "on_nan" and value is not None}

    def reached(self, *, samples: int = 0, updates: int = 0, seconds: float = 0.0) -> bool:
        """Return True if a limit is reached."""
        return (
            (self.samples is not None and samples >= self.samples)
            or (self.updates is not None and updates >= self.updates)
            or (self.seconds is not None and seconds >= self.seconds)
        )

    def share(self, *, samples: int = 0, updates: int = 0, seconds: float = 0.0) -> float:
        """Return the share of the training that is done, from 0 to 1; NaN if only a target ends the run."""
        shares = [
            done / limit
            for done, limit in ((samples, self.samples), (updates, self.updates), (seconds, self.seconds))
            if limit is not None
        ]
        return min(max(shares), 1.0) if shares else math.nan

    @property
    def targets(self) -> dict[str, float]:
        """Targets that are given, by key."""
        return {key: value for key in ("target_accuracy", "target_loss") if (value := getattr(self, key)) is not None}

    @property
    def target(self) -> str | None:
        """The targets in words, of which either ends the run; None without one."""
        return " or ".join(f"{key.removeprefix('target_')} {value:g}" for key, value in self.targets.items()) or None

    def satisfied(self, loss: float, accuracy: float) -> bool:
        """Return True if an evaluation with this result reaches a target."""
        return (self.target_accuracy is not None and accuracy >= self.target_accuracy) or (
            self.target_loss is not None and loss <= self.target_loss
        )


class EvaluationOptions(Table):
    """Evaluations of the weights.

    `every_samples` is the number of samples between two of them; 0: evaluate only at the end. `buffers` chooses the
    model's buffers, such as running statistics, for evaluations and for the final model. `seconds` is the duration of
    an evaluation in a simulation, which goes on meanwhile; by default it takes no time.
    """

    every_samples: Annotated[int, Field(ge=0)] = 5000
    buffers: Literal["worker", "mean", "recompute"] = "worker"
    seconds: Amount | None = None


# ---- the whole job ----

A_NAME = "letters, digits and . _ + -, first a letter or digit (it names the folder of a run), such as digits-dssp"


class Job(Table):
    """Experiment: workload, optimizer, paradigm, cluster and stopping rule."""

    name: Annotated[str, matching(r"[A-Za-z0-9][A-Za-z0-9._+-]*", A_NAME)] = Field(description=A_NAME)
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0  # range of HDF5
    workload: WorkloadOptions = Field(description="a table")
    optimizer: Optimizer = Field(description="a table")
    stop: Stop = Field(description="a table")
    evaluation: EvaluationOptions = EvaluationOptions()
    checkpoint: Checkpoint = Checkpoint()
    paradigm: ParadigmTable = Field(description="a table")
    batches: Batches = Batches(policy="equal")
    compression: CompressionOptions = DenseOptions(name="none")
    cluster: Cluster = Cluster()
    predicted: Prediction | None = None

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_its_paradigm(cls, table: dict[str, Any]) -> dict[str, Any]:
        paradigm, cluster, found = table.get("paradigm"), table.get("cluster", {}), dict(table)
        if isinstance(cluster, dict):
            found["cluster"] = {"servers": default_servers(paradigm), **cluster}
        kind, optimizer = kind_of(paradigm), table.get("optimizer")
        if kind is not None and isinstance(optimizer, dict):
            found["optimizer"] = {"async_lr_scale": kind.lr_scale, **optimizer}
        if "compression" in table:
            found["compression"] = compression_options.with_defaults(table["compression"], paradigm)
        return found

    @model_validator(mode="after")
    def _servers_if_needed(self) -> Self:
        servers, paradigm = self.cluster.servers, self.paradigm.name
        if self.has_servers and servers == 0:
            raise JobError(f'cluster.servers = 0: must be at least 1 with paradigm.name = "{paradigm}"')
        if not self.has_servers and servers != 0:
            raise JobError(
                f'cluster.servers = {servers}: must be 0, or left out, with paradigm.name = "{paradigm}", where all '
                "ranks train"
            )
        return self

    @model_validator(mode="after")
    def _scripts_have_their_own_optimizers(self) -> Self:
        for key in ("clip_norm", "groups"):
            if getattr(self.optimizer, key) is not None and not isinstance(self.workload, Script):
                raise JobError(f"optimizer.{key}: must be left out: only a training script has it (`hpcsync.connect`)")
        lr, may_be_0 = self.optimizer.lr, isinstance(self.workload, Script)  # a script may set its rates in the loop
        if lr < 0 or (lr == 0 and not may_be_0):
            raise JobError(f"optimizer.lr = {lr:g}: must be {'at least' if may_be_0 else 'greater than'} 0")
        return self

    @model_validator(mode="after")
    def _servers_let_join(self) -> Self:
        for i, event in enumerate(self.cluster.events):
            if event.change == "join" and not self.has_servers:
                raise JobError(
                    f'cluster.events[{i}].change = "join": must be another with paradigm.name = '
                    f'"{self.paradigm.name}": a worker that joins needs servers to read the weights from'
                )
        return self

    @model_validator(mode="after")
    def _trains_between_checkpoints(self) -> Self:
        checkpoint_s, every_s = self.cluster.checkpoint_s, self.checkpoint.seconds
        if checkpoint_s is not None and 0 < every_s <= checkpoint_s:
            raise JobError(
                f"cluster.checkpoint_s = {checkpoint_s:g}: must be less than checkpoint.seconds = {every_s:g}, which "
                "is from one checkpoint to the next"
            )
        return self

    @model_validator(mode="after")
    def _steps_on_workers_are_whole(self) -> Self:
        if self.paradigm.steps_on_workers and self.optimizer.async_lr_scale != 1.0:
            raise JobError(
                f"optimizer.async_lr_scale = {shown(self.optimizer.async_lr_scale)}: must be 1.0 with paradigm.name = "
                f'"{self.paradigm.name}": the optimizer runs on the workers, where no update is one of several'
            )
        return self

    @model_validator(mode="after")
    def _tables_suit_each_other(self) -> Self:
        with options_suit():
            self.paradigm.check(self)
        momenta = [group.get("momentum", 0) for group in self.optimizer.groups or [self.optimizer.options]]
        compression_options.check(self.compression, self.paradigm, next(filter(bool, momenta), 0))
        return self

    @model_validator(mode="after")
    def _batches_can_be_allocated(self) -> Self:
        if self.batches.policy != "equal" and not self.paradigm.allocates:
            allocated = 'batches are allocated by servers, or by all workers together under "allreduce"'
            why = "its workers push changes of their weights" if self.commits else allocated
            raise JobError(
                f'batches.policy = {shown(self.batches.policy)}: must be "equal" with paradigm.name = '
                f'"{self.paradigm.name}": {why}'
            )
        self.batches.check(self.batch_total, self.cluster.workers)
        return self

    @model_validator(mode="after")
    def _others_can_continue(self) -> Self:
        paradigm = self.paradigm
        if self.cluster.on_death == "continue" and not self.has_servers and paradigm.lead_bound < math.inf:
            must_be = '"end"' if isinstance(self.workload, Script) else '"end" or "restart"'
            raise JobError(
                f'cluster.on_death = "continue": must be {must_be} with {paradigm.stated_form}, '
                "whose exchanges need all workers"
            )
        return self

    @model_validator(mode="after")
    def _some_are_enough(self) -> Self:
        if self.paradigm.needs_all and self.cluster.workers_min not in (None, self.cluster.workers):
            raise JobError(
                f"cluster.workers_min = {self.cluster.workers_min}: must be cluster.workers = {self.cluster.workers} "
                f"with {self.paradigm.stated_form}, whose exchanges need all workers"
            )
        return self

    def refuse_ranks(self, n_ranks: int, *, resumes: bool) -> None:
        """Raise JobError if the run cannot start, or resume, with this number of ranks.

        With servers, workers for which there are no ranks count as having left, and join when the run resumes with more
        ranks. Without servers every run begins with all workers.
        """
        cluster, least = self.cluster, self.cluster.workers
        if not self.paradigm.needs_all and (resumes or self.has_servers):
            least = cluster.workers_min or (1 if resumes else least)
        if not least <= n_ranks - cluster.servers <= cluster.workers:
            takes = f"{cluster.servers + least} to {cluster.ranks}" if least < cluster.workers else f"{cluster.ranks}"
            minimum = "" if cluster.workers_min is None else f", cluster.workers_min = {cluster.workers_min}"
            raise JobError(
                f"cluster.workers = {cluster.workers}{minimum}: with cluster.servers = {cluster.servers} this takes "
                f"{takes} ranks, but there are {n_ranks}"
            )

    @property
    def groups(self) -> Groups:
        """Groups of workers under layer separation, once the number of fully-connected workers is chosen."""
        groups = self.paradigm.groups(self.cluster.workers)
        assert groups is not None
        return groups

    @property
    def takers(self) -> range:
        """Workers that take batches: all, or under layer separation the convolution workers."""
        return self.groups.convolution if self.paradigm.separates_layers else range(self.cluster.workers)

    @property
    def with_loss(self) -> range:
        """Workers that compute losses: all, or under layer separation those with the last layers; none in "timing"."""
        if isinstance(self.workload, Timing):
            return range(0)
        return self.groups.fc if self.paradigm.separates_layers else self.takers

    @property
    def batch_total(self) -> int | None:
        """Samples of one iteration of all workers; None for a script that does not set it."""
        if self.batches.total is not None or isinstance(self.workload, Script):
            return self.batches.total
        return self.workload.batch_size * self.cluster.workers

    @property
    def has_servers(self) -> bool:
        """True if servers hold the weights; otherwise all ranks are workers."""
        return self.paradigm.has_servers

    @property
    def commits(self) -> bool:
        """True if workers push the change of their weights since they read those of the servers."""
        return self.paradigm.contribution == "change"

    @property
    def compresses(self) -> bool:
        """True if pushes are compressed."""
        return not isinstance(self.compression, DenseOptions)

    @property
    def paradigm_options(self) -> dict[str, Any]:
        """Options of the paradigm for `paradigms.create`."""
        ratios = () if takes_ratio(self.compression) else self.paradigm.ratios
        return {**self.paradigm.arguments(self), **dict.fromkeys(ratios)}

    @property
    def local_steps(self) -> int:
        """Iterations per push, unless the grant sets another number."""
        return self.paradigm.exchange_every if self.has_servers else 1

    def n_pieces_of(self, worker: int) -> int:
        """Return the number of pieces in which this worker's loop computes a batch.

        Between them it checks whether it has been cancelled. It is 1 for a convolution worker, whose model divides the
        batch itself.
        """
        return self.paradigm.pieces(worker, self.cluster.workers)

    @model_validator(mode="after")
    def _ends(self) -> Self:
        if not isinstance(self.workload, Script) and not self.stop.conditions:
            conditions = [key for key in Stop.model_fields if key != "on_nan"]
            raise JobError(f"stop: empty; must have at least one of {', '.join(conditions)}")
        return self

    @model_validator(mode="after")
    def _targets_are_looked_for(self) -> Self:
        if self.stop.targets and self.evaluation.every_samples == 0:
            first, *_ = self.stop.targets
            raise JobError(f"evaluation.every_samples = 0: must be at least 1, to find stop.{first} during the run")
        return self

    @model_validator(mode="after")
    def _evaluations_are_made(self) -> Self:
        if not self.paradigm.uses_evaluations:
            return self
        if isinstance(self.workload, Timing):
            refuse_unevaluated(self, 'workload.name = "timing" must be one that can be evaluated')
        if self.evaluation.every_samples == 0 and not self.paradigm.requests_evaluations:
            raise JobError('evaluation.every_samples = 0: must be at least 1 with paradigm.loss = "evaluation"')
        return self

    @classmethod
    def from_table(cls, table: dict[str, Any]) -> Self:
        """Return the job that a table describes. Raises JobError for the first error in it."""
        try:
            return cls.model_validate(table)
        except ValidationError as error:
            raise JobError(in_one_line(error, table, KINDS)) from None

    @classmethod
    def from_toml(cls, text: str) -> Self:
        """Return the job that a text describes. No other file is read, so the job of a trace can be read anywhere."""
        return cls.from_table(_parse(text, "job"))

    def to_toml(self) -> str:
        """Return the job in TOML with every default filled in; `from_toml` restores an equal job."""
        return tomli_w.dumps(self.model_dump(exclude_none=True))


# ---- input ----


def load(path: str | Path, overrides: Sequence[str] = (), ranks: int | None = None) -> Job:
    """Read a job file.

    Parameters
    ----------
    path : path
        Job file.
    overrides : sequence of str
        ``KEY=VALUE`` overrides; see `override`.
    ranks : int, optional
        Number of ranks; it sets cluster.workers to the ranks that are not servers, unless the job has a
        cluster.workers_min, with which there may be fewer ranks than cluster.workers says.

    Returns
    -------
    Job
        Job with paths resolved against the folder of the file.

    Raises
    ------
    JobError
        If the file cannot be read, or for the first error in the job, such as a setting that it would ignore.
    """
    table = _table(Path(path), overrides, ranks)
    job = _of_file(path, table)
    refuse_unused(job, table)
    if isinstance(job.workload, Linear) and job.stop.target_accuracy is not None:
        raise JobError(
            f'stop.target_accuracy = {job.stop.target_accuracy}: must be omitted with workload.name = "linear", which '
            "has no accuracy; stop.target_loss is a target for its loss"
        )
    return job


def load_begun(path: str | Path, overrides: Sequence[str] = (), ranks: int | None = None) -> Job:
    """Read the job file of a run that has begun, as `load`; it may have settings that are ignored."""
    return _of_file(path, _table(Path(path), overrides, ranks))


def _table(path: Path, overrides: Sequence[str], ranks: int | None) -> dict[str, Any]:
    table = _parse(_read(path), str(path))
    if {Override.of(text).key[0] for text in overrides} - {"seed", "predicted"}:
        table.pop("predicted", None)  # that of another job
    override(table, overrides)
    _check_values(table, "--set")
    if ranks is not None:
        set_workers(table, ranks)
    return table


def _of_file(path: str | Path, table: dict[str, Any]) -> Job:
    job = Job.from_table(table)
    if isinstance(job.workload, Script):
        raise JobError(f'workload.name = "script": must be one of {", ".join(KINDS["workload"])}')
    torch_optimizers.check(job.optimizer)
    folder = Path(path).parent
    workload = job.workload.found(folder) if isinstance(job.workload, Cifar) else job.workload
    return job.model_copy(update={"workload": workload, "cluster": job.cluster.found(folder)})


def refuse_unused(job: Job, table: Mapping[str, Any]) -> None:
    """Raise JobError for a setting in this table of a job that the job ignores, unless it is the default."""
    without = deepcopy(dict(table))
    left_out = [each for each in [*excluded(without)] if pop(without, each.key) is not None]
    if not left_out:
        return
    given, default = job.model_dump(), Job.from_table(without).model_dump()
    for key, cause, why in left_out:
        if (value := at(given, key)) != at(default, key):
            beside = f"{'.'.join(cause)} = {shown(at(given, cause))}"
            raise JobError(f"{'.'.join(key)} = {shown(value)}: must be omitted with {beside}, {why}")


def of_any_seed(job: Job) -> dict[str, Any]:
    """Return the table of a job with what runs of one job with other seeds share.

    It has neither a seed nor a prediction, and a table of times that is named after the seed, such as times-5.csv of
    `hpcsync advise`, is named after any.
    """
    table = tomllib.loads(job.to_toml())
    table.pop("seed", None)
    table.pop("predicted", None)
    compute = table["cluster"].get("compute", {})
    if "table" in compute:
        path = Path(compute["table"])
        if path.stem.endswith(f"-{job.seed}"):
            compute["table"] = str(path.with_name(f"{path.stem.removesuffix(str(job.seed))}SEED{path.suffix}"))
    return table


def used(job: Job) -> dict[str, Any]:
    """Return the table of a job without the settings that it ignores, with which a run may have begun."""
    table = tomllib.loads(job.to_toml())
    for each in [*excluded(table)]:
        pop(table, each.key)
    return table


def refuse_unevaluated(job: Job, reason: str) -> None:
    """Raise JobError if the job has a key that needs evaluations, with the reason why there are none."""
    if targets := [f"stop.{key} = {target}" for key, target in job.stop.targets.items()]:
        raise JobError(f"{targets[0]}: {reason}")
    if job.paradigm.uses_evaluations:
        raise JobError(f'paradigm.loss = "evaluation": {reason}')


def refuse_simulated(job: Job) -> None:
    """Raise JobError for a job that only a simulation can run."""
    if (trace := job.cluster.times_from) is not None:
        raise JobError(
            f"cluster.times_from = {shown(trace)}: must not be given to run: real ranks take their own times; "
            "hpcsync simulate takes it"
        )
    for i, event in enumerate(job.cluster.events):
        if event.change == "die":
            raise JobError(
                f'cluster.events[{i}].change = "die": must not be given to run, which ends no process; hpcsync '
                "simulate takes it"
            )
    with options_suit():
        job.paradigm.check_real(job)


def _parse(text: str, source: str) -> dict[str, Any]:
    if len(text) > MOST_CHARACTERS:
        raise JobError(f"{source}: must have at most {MOST_CHARACTERS:,} characters, it has {len(text):,}")
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        hint = "; hpcsync launch starts a script" * source.endswith(".py")
        raise JobError(f"{source}: must be TOML: {str(error).splitlines()[0]}{hint}") from None
    except RecursionError:
        raise JobError(f"{source}: must be nested at most {MOST_LEVELS} levels deep") from None
    except ValueError:  # Python reads no number of more than 4,300 digits
        raise JobError(f"{source}: must have whole numbers of at most 64 bits") from None
    _check_values(table, source)
    return table


def _check_values(table: dict[str, Any], source: str) -> None:
    """Raise JobError for values nested too deep, whole numbers of more than 64 bits, and the character U+0000."""
    values: list[tuple[tuple[str, ...], Any]] = [((), table)]
    while values:
        path, value = values.pop()
        if len(path) > MOST_LEVELS:
            raise JobError(f"{source}: {'.'.join(path[:2])}...: must be nested at most {MOST_LEVELS} levels deep")
        if isinstance(value, dict):
            values += [((*path, key), inner) for key, inner in value.items()]
        elif isinstance(value, list):
            values += [((*path, "[]"), inner) for inner in value]
            continue
        key = ".".join(path).replace(".[]", "[]")
        if type(value) is int and not -(2**63) <= value < 2**63:
            raise JobError(f"{key} = {shown(value)}: must be a whole number of at most 64 bits")
        if isinstance(value, str) and "\0" in value:  # in no name of a file
            raise JobError(f"{key} = {shown(value)}: must not have the character U+0000")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(f"{path}: {getattr(error, 'strerror', None) or 'must be text in UTF-8'}") from None


def remarks(path: str | Path, overrides: Sequence[str]) -> list[str]:
    """Return the lines of `override` for the job in this file: which keys the overrides drop."""
    return override(_parse(_read(Path(path)), str(path)), overrides)
