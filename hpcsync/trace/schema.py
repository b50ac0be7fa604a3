"""Tables of a trace and their columns: name, storage type, unit and description.

`SCHEMA` declares every column once. `TABLES`, the NumPy record types, follow from it, and so does what a trace says of
itself: `TraceWriter` stores each declaration as HDF5 attributes of its dataset. All of them are plain strings:

- ``description``: the table;
- ``COLUMN.description``: the column, e.g. ``held_s.description``;
- ``COLUMN.unit``: its unit, e.g. ``held_s.unit``.

``h5dump -A trace.h5``, HDFView and ``h5py.File("trace.h5")["grants"].attrs`` list them in alphabetical order, so that
the two attributes of a column stand side by side.

Units are written as in `UNITS`. Names of quantities end in their unit. Times are float64 seconds since the start of
the run on the clock of the deciding server (rank 0 without servers). `seq` is one counter over pushes, grants,
decisions and membership changes, from 1, so that their order is total.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpcsync.paradigms.records import Column, Grant, Problem, PushInfo, StepInfo, columns

if TYPE_CHECKING:
    Rows = Any  # of ndarrays of unknown type mypy tries all overloads of every operator, which takes minutes
else:
    Rows = np.ndarray  # rows of a table, or of one of its columns

FORMAT = "hpcsync-trace"
FORMAT_VERSION = 9
READABLE_VERSIONS = (7, 8, 9)
ADDED = {"released_by": 8, "gradient_sq": 9, "mean_gradient_sq": 9}  # columns, and the first version that has them
ATTRIBUTES: dict[str, type] = {  # root attributes on which readers rely
    "format_version": int,
    "status": str,
    "paradigm": str,
    "job": str,
    "n_servers": int,
    "n_workers": int,
    "tracing_overhead_s": float,
    "engine": str,
    "seed": int,
}
OPTIONAL = ("engine", "seed")  # of these attributes


class Outcome(IntEnum):
    """The fate of a push."""

    APPLIED = 0
    DROPPED = 1


class Change(IntEnum):
    """A change of membership."""

    LEFT = 0
    JOINED = 1
    DIED = 2


class Phase(IntEnum):
    """The activity of a worker."""

    UNKNOWN = 0
    WAITING = 1
    READING = 2
    COMPUTING = 3
    PUSHING = 4


class Release(IntEnum):
    """A reason of a grant, in place of the `seq` of the event that released the worker."""

    UNKNOWN = 0
    OWN = -1
    END = -2


ENUMS: dict[str, type[IntEnum]] = {  # by column
    "outcome": Outcome,
    "change": Change,
    "phase": Phase,
    "problem": Problem,
}

CHECKSUM = ".crc32"  # suffix of a table's name in the attribute `flushed_rows`

STATUSES = ("running", "finished", "failed", "interrupted")

ELAPSED = "elapsed"  # controller of rows of /decisions for times that a paradigm set; `chosen` is the time
EVALUATED = "evaluated"  # the same for evaluations that a paradigm uses; `chosen` is the loss
EVENTS = (ELAPSED, EVALUATED)  # rows of /decisions that are events of the paradigm, not choices

UNITS = {
    "": "none: identifiers, positions, codes and text",
    "1": "dimensionless number",
    "s": "seconds",
    "s/sample": "seconds per sample",
    "1/s": "per second",
    "B": "bytes",
    "samples": "training samples",
    "iterations": "iterations of a worker",
    "updates": "updates of the model, which are also versions",
    "contributions": "contributions to an update",
    "workers": "workers",
    "models": "models (or gradients) of other workers",
}


class TableSchema(NamedTuple):
    """A table of the trace, with what each row stands for."""

    description: str
    columns: tuple[Column, ...]

    @property
    def dtype(self) -> np.dtype:
        """The record type of its rows."""
        return np.dtype([(column.name, column.dtype) for column in self.columns])


_SEQ = Column("seq", "<i8", "", "Position among all pushes, grants, decisions and membership changes, from 1.")
_WORKER = columns(Grant)[0]

SCHEMA: dict[str, TableSchema] = {
    "pushes": TableSchema(
        "One row per push of a worker to the servers. A row is written once the outcome of its push is known, so the "
        "pushes of a barrier come together; hpcsync.load_trace sorts them by seq. Under EASGD, ASHL, ADSP and "
        "asynchronous DiLoCo a push covers several iterations on the worker (local_steps). Under EASGD, iterations "
        "after a worker's last push are in no row.",
        (
            Column("seq", "<i8", "", f"{_SEQ.description[:-1]}: the order in which the deciding server handles them."),
            *columns(PushInfo)[:4],
            Column(
                "staleness",
                "<i8",
                "updates",
                "Updates between version_read and the update that applied the push, or the moment it was dropped.",
            ),
            *columns(PushInfo)[4:],
            Column("weight", "<f8", "1", "Factor of the contribution in its update; 0 for a dropped push."),
            Column("outcome", "<i1", "", "Outcome of the push."),
        ),
    ),
    "grants": TableSchema(
        "One row per grant. A grant of zero local steps (and batch size zero) ends the worker's part in the run.",
        (
            _SEQ,
            Column("now_s", "<f8", "s", "Time of the grant."),
            *columns(Grant),
            Column(
                "released_by",
                "<i8",
                "",
                "seq of the event that released the worker: a push, a change of membership, or a time that elapsed (a "
                "row of /decisions). -1: the worker's own push or join, to which the grant is the answer at once; -2: "
                "the end of the run; 0: not recorded, in a trace of format version 7.",
            ),
        ),
    ),
    "updates": TableSchema(
        "One row per update of the model.",
        (
            Column("version", "<i8", "", "Version that the update made, from 1."),
            Column("now_s", "<f8", "s", "Time of the update."),
            Column("n_contributions", "<i4", "contributions", "Contributions to the update."),
            Column(
                "lr",
                "<f8",
                "1",
                "Learning rate; under EASGD alpha, the share of its distance from a worker by which the centre moves.",
            ),
            Column(
                "samples",
                "<i8",
                "samples",
                "Samples of all updates up to this one: the sum of their pushes' batch_size.",
            ),
            Column(
                "gradient_sq",
                "<f8",
                "1",
                "Squared norm of the gradient of the update, the weighted mean of its contributions as the servers use "
                "them (decoded, and corrected for delay), before clipping; without servers of the gradient of the "
                "step. NaN as in /pushes, and, with several servers, for an update of which not all of them had "
                "stated their part before its row was written to the file.",
            ),
        ),
    ),
    "decisions": TableSchema(
        "One row per choice of an adaptive controller. Its inputs follow as float64 columns: those of the paradigm, "
        "then those of the allocation of batch sizes; NaN in the columns of the other.",
        (
            _SEQ,
            Column("now_s", "<f8", "s", "Time of the decision."),
            Column("controller", "S16", "", "Name of the controller, which says what `chosen` is."),
            Column("worker", "<i4", "", "Worker that the choice is for, or whose event brought it about."),
            Column("chosen", "<f8", "", "Value chosen, in the unit of its controller."),
        ),
    ),
    "exchanges": TableSchema(
        "One row per iteration of a worker with weights of its own (no servers), and the exchange that ended it. A row "
        "with batch size 0 is no iteration: it records models that arrived for a worker that had ended.",
        (
            Column("now_s", "<f8", "s", "Time at which the step info is handled."),
            *columns(StepInfo),
        ),
    ),
    "rates": TableSchema(
        "One row per change of the learning rate of a parameter group, where the optimizers of a script have several "
        "groups together. A group's first row after a start of the run has its rate at that time.",
        (
            Column("now_s", "<f8", "s", "Time at which the change is handled."),
            _WORKER,
            Column("iteration", "<i8", "", "Iteration (push) of the worker from which on the rate holds, from 1."),
            Column("group", "<i4", "", "Parameter group, from 0 through the groups of all optimizers."),
            Column("lr", "<f8", "1", "Learning rate of the group."),
        ),
    ),
    "evaluations": TableSchema(
        "One row per evaluation on held-out data.",
        (
            Column("now_s", "<f8", "s", "Time at which the evaluated weights existed."),
            Column("version", "<i8", "", "Version of the evaluated weights."),
            Column("samples", "<i8", "samples", "Samples of all updates up to that version."),
            Column("loss", "<f8", "1", "Mean loss."),
            Column("accuracy", "<f8", "1", "Share of correct predictions; NaN where the workload has none."),
            Column(
                "consensus_distance",
                "<f8",
                "1",
                "Root mean squared distance of the workers' replicas from their mean, which was evaluated; NaN with "
                "servers.",
            ),
        ),
    ),
    "membership": TableSchema(
        "One row per change of membership; all workers are active at first. left: the worker leaves at the end of its "
        "data or of the run, or by an event of the job; a worker that joins late leaves instead of its first push. "
        "died: its process died. joined: it is active again and counts as far as the slowest active worker, if it is "
        "not farther; its iterations continue where they were, so the grant that answers its return may repeat one "
        "from before.",
        (
            _SEQ,
            Column("now_s", "<f8", "s", "Time of the change."),
            _WORKER,
            Column("change", "<i1", "", "Change of membership."),
        ),
    ),
    "starts": TableSchema(
        "One row per start of the run: the first, and each time it resumes from a checkpoint.",
        (
            Column("start", "<i4", "", "Number of the start, from 0."),
            Column("now_s", "<f8", "s", "Time at which the run starts or resumes."),
            Column("seq", "<i8", "", "Last seq before this start."),
            Column("created", "S25", "", "Date and time of the start, UTC; empty in a simulation."),
            Column("job_id", "S64", "", "Job identifier of the batch system; empty without one."),
        ),
    ),
    "stalls": TableSchema(
        "One row per report of a stall: an iteration that lasts longer than its worker's own iterations lead to "
        "expect. It is reported again when it has lasted twice as long.",
        (
            Column("now_s", "<f8", "s", "Time of the report."),
            _WORKER,
            Column("iteration", "<i8", "", "Iteration of the worker, from 1."),
            Column("phase", "<i1", "", "Activity of the worker."),
            Column("lasted_s", "<f8", "s", "Duration of the iteration so far."),
            Column("deadline_s", "<f8", "s", "Longest duration expected from the worker's own iterations."),
            Column("n_waiting", "<i4", "workers", "Other workers that were blocked."),
        ),
    ),
    "clocks": TableSchema(
        "One row per rank and start of the run: its host, and how its clock was synchronised with that of rank 0.",
        (
            Column("start", "<i4", "", "Number of the start, as in /starts."),
            Column("rank", "<i4", "", "Rank, servers first."),
            Column("host", "S64", "", "Host name; virtual in a simulation."),
            Column("offset_s", "<f8", "s", "Clock of rank 0 minus clock of this rank."),
            Column("uncertainty_s", "<f8", "s", "Error bound of offset_s: half of the fastest round trip."),
        ),
    ),
}

TABLES: dict[str, np.dtype] = {name: table.dtype for name, table in SCHEMA.items()}


def checksum(rows: np.ndarray, before: int = 0) -> int:
    """Return the CRC-32 of rows, continued from that of the rows before them."""
    return zlib.crc32(np.ascontiguousarray(rows).view(np.uint8).data, before)


def complete(rows: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return rows of an older format with the columns of `dtype` that they lack; these are NaN, whole numbers 0."""
    there = rows.dtype.names or ()
    missing = [name for name in dtype.names or () if name not in there]
    if not missing:
        return rows
    whole = np.zeros(
        len(rows), [(name, (dtype if name in missing else rows.dtype)[name]) for name in dtype.names or ()]
    )
    for name in there:
        whole[name] = rows[name]
    for name in missing:
        if whole[name].dtype.kind == "f":
            whole[name] = math.nan
    return whole


def decisions_dtype(decision_fields: Iterable[str]) -> np.dtype:
    """Return the record type of /decisions: the common columns, then one float64 per decision field."""
    return np.dtype(TABLES["decisions"].descr + [(name, "<f8") for name in decision_fields])


def decisions_table(decision_fields: Mapping[str, tuple[str, str]]) -> TableSchema:
    """Return /decisions with the inputs of a job's controllers.

    Parameters
    ----------
    decision_fields
        Name to (unit, description), as from `hpcsync.core.assignments.decision_fields`.
    """
    inputs = (Column(name, "<f8", unit, description) for name, (unit, description) in decision_fields.items())
    description, columns = SCHEMA["decisions"]
    return TableSchema(description, (*columns, *inputs))


def hdf5_attributes(table: TableSchema) -> dict[str, str]:
    """Return the attributes of a table's dataset, by name.

    Raises
    ------
    ValueError
        If the table or one of its columns has no description, or a unit is not in `UNITS`.
    """
    if not table.description:
        raise ValueError(f"table {[column.name for column in table.columns]}: description is missing")
    attributes = {"description": table.description}
    for name, _, unit, description in table.columns:
        if not description:
            raise ValueError(f"column {name}: description is missing")
        if unit not in UNITS:
            raise ValueError(f"column {name}: unit is {unit!r}; must be one of {', '.join(map(repr, UNITS))}")
        attributes |= {f"{name}.description": description, f"{name}.unit": unit}
    return attributes
