"""Records that are event or action, message and row of the trace at once, each declared here and nowhere else.

A field is annotated with its storage type, unit and description. The columns of the trace (`hpcsync.trace.schema`) and
the messages of real ranks (`hpcsync.mpi.transport.messages`) follow from that declaration (`columns`), in the order of
the fields.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from enum import IntEnum
from functools import cache
from typing import Annotated, NamedTuple, get_type_hints

UNTIL = -1  # Grant.local_steps: as many steps as fit into commit_s
OF_THE_JOB = -2  # Grant.local_steps: as many as the job file says
ALL_PEERS, NO_PEER = -1, -2  # StepInfo.peer


class Problem(IntEnum):
    """What is wrong with a step."""

    NONE = 0
    SKIPPED = 1  # the script left it out because a gradient was not finite (GradScaler)
    LOSS_NOT_FINITE = 2
    GRADIENT_NOT_FINITE = 3  # of a step without a recorded loss
    NO_GRADIENT = 4  # none has been computed since the last step
    MODEL_CHANGED = 5  # the model's parameters were moved, cast, replaced or added to since `connect`
    WEIGHTS_CHANGED = 6  # by the script, since they were read from the servers, whose weights replace them

    @classmethod
    def of_losses(cls, *losses: float) -> Problem:
        """Return whether all of these losses are finite: NONE or LOSS_NOT_FINITE."""
        return cls.NONE if all(map(math.isfinite, losses)) else cls.LOSS_NOT_FINITE


UNUSED = frozenset(Problem) - {Problem.NONE, Problem.LOSS_NOT_FINITE, Problem.GRADIENT_NOT_FINITE}  # does not count


class Stored(NamedTuple):
    """How a field is stored: NumPy type string, unit (a key of `hpcsync.trace.schema.UNITS`) and description."""

    dtype: str
    unit: str
    description: str


class Column(NamedTuple):
    """A column of a table.

    Parameters
    ----------
    name, dtype
        Name, and NumPy type string of the values.
    unit
        A key of `hpcsync.trace.schema.UNITS`.
    description
        Noun phrase that ends in a period.
    """

    name: str
    dtype: str
    unit: str
    description: str


@cache
def columns(record: type) -> tuple[Column, ...]:
    """Return the columns that a record's fields declare, in their order."""
    hints = get_type_hints(record, include_extras=True)
    return tuple(Column(name, *hint.__metadata__[0]) for name, hint in hints.items())


_CODES = {"i1": "b", "i4": "i", "i8": "q", "f8": "d"}


def layout(types: Iterable[str]) -> struct.Struct:
    """Return the layout of fields of these NumPy type strings, without padding: that of an array's row.

    It packs and unpacks a row in a fifth of the time that a structured array takes.
    """
    kinds = [kind.lstrip("<|") for kind in types]
    return struct.Struct("<" + "".join(_CODES.get(kind) or f"{kind[1:]}s" for kind in kinds))


Worker = Annotated[int, Stored("<i4", "", "Worker, from 0.")]
LoadTime = Annotated[
    float, Stored("<f8", "s", "Time the worker waited for its batches between begin_s and end_s; in no other column.")
]
OwnRate = Annotated[
    float,
    Stored(
        "<f8",
        "1",
        "Learning rate of the first parameter group of the script's optimizer in this step; NaN without a script.",
    ),
]
StepProblem = Annotated[int, Stored("<i1", "", "What was wrong with the step, if anything.")]
GradientSquare = Annotated[
    float,
    Stored(
        "<f8",
        "1",
        "Squared norm of the worker's own mean gradient of its batch, before compression and clipping; infinite if the "
        "gradient is not finite, NaN where none was computed here: without arithmetic, under layer separation, for a "
        "cancelled iteration, or where a push is not a gradient but the weights or their change (EASGD, ASHL, ADSP, "
        "asynchronous DiLoCo).",
    ),
]


class PushInfo(NamedTuple):
    """A push: the information that a worker sends with a contribution in its slots.

    It is the event that a paradigm handles and, with its outcome, a row of /pushes. All times are on the clock of the
    deciding server, which sets `now_s` when it handles the push. Times are NaN where they are not known.
    """

    now_s: Annotated[float, Stored("<f8", "s", "Time at which the deciding server handles the push info.")]
    worker: Worker
    iteration: Annotated[int, Stored("<i8", "", "Number of the push among those of its worker, from 1.")] = 0
    version_read: Annotated[
        int,
        Stored(
            "<i8",
            "",
            "Version of the weights from which the gradient was computed; under EASGD the version of the centre "
            "towards which the worker moved, under ASHL, ADSP and asynchronous DiLoCo the one from which its local "
            "steps began.",
        ),
    ] = 0
    begin_s: Annotated[
        float, Stored("<f8", "s", "Time at which the worker's iteration began: it asked for its batch.")
    ] = math.nan
    end_s: Annotated[float, Stored("<f8", "s", "Time at which the worker's computation ended.")] = math.nan
    compute_s: Annotated[
        float,
        Stored("<f8", "s", "Duration of the computation, without load_s, including padding to the job's times."),
    ] = math.nan
    wait_s: Annotated[float, Stored("<f8", "s", "Time the worker waited for the grant of this iteration.")] = math.nan
    comm_s: Annotated[
        float,
        Stored("<f8", "s", "Duration of the transfers: weights before the computation, contribution after it."),
    ] = math.nan
    batch_size: Annotated[int, Stored("<i4", "samples", "Samples of the push, over all of its local steps.")] = 0
    local_steps: Annotated[int, Stored("<i4", "iterations", "Iterations that the push covers.")] = 1
    loss: Annotated[float, Stored("<f8", "1", "Mean training loss of the samples; NaN without arithmetic.")] = math.nan
    wire_bytes: Annotated[int, Stored("<i8", "B", "Bytes of the transfers in comm_s.")] = 0
    share: Annotated[
        float,
        Stored(
            "<f8",
            "1",
            "Share of the samples that was computed: 1, or less for a cancelled iteration; compute_s and loss "
            "cover this share.",
        ),
    ] = 1.0
    predicted_fixed_s: Annotated[
        float,
        Stored(
            "<f8",
            "s",
            "Part of the predicted time of the worker's next iterations that is independent of the batch size; "
            "NaN with equal batches.",
        ),
    ] = math.nan
    predicted_sample_s: Annotated[
        float,
        Stored(
            "<f8",
            "s/sample",
            "Predicted time per sample of the worker's next iterations; NaN with equal batches.",
        ),
    ] = math.nan
    pull_s: Annotated[float, Stored("<f8", "s", "Part of comm_s before the computation.")] = math.nan
    encode_s: Annotated[
        float, Stored("<f8", "s", "Duration of the compression after the computation; in no other column.")
    ] = 0.0
    load_s: LoadTime = 0.0
    lr: OwnRate = math.nan
    problem: StepProblem = 0
    gradient_sq: GradientSquare = math.nan

    @staticmethod
    def later_fields() -> tuple[str, ...]:
        """Return the fields that old checkpoints do not have."""
        return ("gradient_sq",)

    @property
    def iteration_s(self) -> float:
        """Seconds of loading and computing the whole iteration, extrapolated if it was cancelled."""
        return self.load_s + self.compute_s / self.share

    @property
    def push_s(self) -> float:
        """Seconds of putting the contribution."""
        return self.comm_s - self.pull_s


class Grant(NamedTuple):
    """A worker may read the weights and start an iteration.

    A paradigm decides it; the coordinator adds the version and the samples. It travels to the worker and is a row of
    /grants. After push t the grant is for iteration t + 1; a worker that joins starts again with the iteration that it
    had not pushed. With zero local steps it ends the worker's part in the run.
    """

    worker: Worker
    iteration: Annotated[int, Stored("<i8", "", "Iteration (push) that the worker may now start, from 1.")]
    version: Annotated[int, Stored("<i8", "", "Version of the weights that the worker will read.")] = 0
    gap_iters: Annotated[int, Stored("<i8", "iterations", "Lead of the worker over the slowest active worker.")] = 0
    credits: Annotated[
        int,
        Stored("<i8", "iterations", "Extra iterations that the worker may still start unblocked (DSSP)."),
    ] = 0
    held_s: Annotated[
        float, Stored("<f8", "s", "Time blocked: from the worker's push, or its return, to this grant.")
    ] = 0.0
    first_sample: Annotated[
        int,
        Stored(
            "<i8",
            "",
            "Position of the iteration's first sample in the run's endless sequence of samples; -1 where it "
            "follows from worker and iteration (hpcsync.training.sampler).",
        ),
    ] = -1
    batch_size: Annotated[
        int,
        Stored(
            "<i4",
            "samples",
            "Samples of the push; with local_steps -1 those of each local step (0 before the worker's first push: "
            "its own batch size).",
        ),
    ] = 0
    local_steps: Annotated[
        int, Stored("<i4", "iterations", "Local steps to make; -1: as many as fit into commit_s.")
    ] = OF_THE_JOB
    commit_s: Annotated[
        float,
        Stored(
            "<f8",
            "s",
            "Time from the end of reading the weights to the end of the last local step, if local_steps is -1.",
        ),
    ] = math.inf
    ratio: Annotated[
        float,
        Stored("<f8", "1", "Share of the contribution's elements to send; NaN where the job's compression sets it."),
    ] = math.nan

    def stop(self) -> Grant:
        """Return the grant that ends the worker's part in the run, in place of this one."""
        return Grant(*self[:4], 0, self.held_s, local_steps=0)

    @property
    def size(self) -> float:
        """Work units of the same worker; the time of the iteration is proportional to them."""
        return self.commit_s if self.local_steps == UNTIL else float(self.batch_size or self.local_steps)

    @property
    def step_samples(self) -> int:
        """Samples of each local step; 0 if the worker knows them."""
        return self.batch_size // max(1, self.local_steps)

    def is_done(self, n_steps: int, since_read_s: float) -> bool:
        """Return True if the local step that has just ended is the last before a push.

        Parameters
        ----------
        n_steps
            Local steps made since the grant.
        since_read_s
            Seconds since the weights were read.
        """
        return since_read_s >= self.commit_s if self.local_steps == UNTIL else n_steps == self.local_steps


class StepInfo(NamedTuple):
    """Information that a worker without servers sends after an iteration and the exchange that ended it.

    With the time at which it is handled it is a row of /exchanges. Times are in seconds since the start of the run, on
    worker 0's clock.
    """

    worker: Worker
    iteration: Annotated[int, Stored("<i8", "", "Iteration of the worker, from 1.")]
    peer: Annotated[int, Stored("<i4", "", "Worker exchanged with; -1: all workers, -2: none in this iteration.")] = (
        NO_PEER
    )
    wire_bytes: Annotated[int, Stored("<i8", "B", "Bytes of the transfers in comm_s.")] = 0
    compute_s: Annotated[
        float,
        Stored(
            "<f8",
            "s",
            "Duration of the computation between begin_s and end_s, without load_s, including padding to the job's "
            "times; with layer separation a part of that interval, in which the worker also waits.",
        ),
    ] = 0.0
    wait_s: Annotated[float, Stored("<f8", "s", "Time the worker waited for others.")] = 0.0
    comm_s: Annotated[float, Stored("<f8", "s", "Duration of the transfers.")] = 0.0
    loss: Annotated[float, Stored("<f8", "1", "Mean training loss of the samples; NaN without arithmetic.")] = math.nan
    batch_size: Annotated[int, Stored("<i4", "samples", "Samples of the iteration.")] = 0
    begin_s: Annotated[
        float, Stored("<f8", "s", "Time at which the worker's iteration began: it asked for its batch.")
    ] = math.nan
    end_s: Annotated[float, Stored("<f8", "s", "Time at which the worker's computation ended.")] = math.nan
    n_received: Annotated[
        int, Stored("<i4", "models", "Models (or gradients) of others merged into the worker's own.")
    ] = 0
    weight: Annotated[
        float,
        Stored(
            "<f8",
            "1",
            "Push-sum weight of the worker afterwards; under AD-PSGD the count of steps that its weights contain.",
        ),
    ] = 1.0
    load_s: LoadTime = 0.0
    lr: OwnRate = math.nan
    problem: StepProblem = 0
    gradient_sq: GradientSquare = math.nan
    mean_gradient_sq: Annotated[
        float,
        Stored(
            "<f8",
            "1",
            "Squared norm of the mean gradient of all workers, along which all step (all-reduce), as decoded if it was "
            "compressed; NaN where workers step along their own, and under layer separation.",
        ),
    ] = math.nan

    @staticmethod
    def later_fields() -> tuple[str, ...]:
        """Return the fields that old checkpoints do not have."""
        return ("gradient_sq", "mean_gradient_sq")

    @property
    def iteration_s(self) -> float:
        """Seconds of loading and computing."""
        return self.load_s + self.compute_s
