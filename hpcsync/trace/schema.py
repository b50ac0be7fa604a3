"""The tables of a trace: one NumPy record type each. Names that are quantities end in their unit.

Seconds are float64 since the start of the run, on the clock of the deciding server. `seq` is one counter over pushes,
grants, decisions and membership changes, from 1 on, so that their order is total.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np

FORMAT = "hpcsync-trace"
FORMAT_VERSION = 5


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


ENUMS: dict[str, type[IntEnum]] = {"outcome": Outcome, "change": Change, "phase": Phase}  # by column

STATUSES = ("running", "finished", "failed", "interrupted")

# One row per push; `seq` is the order in which the deciding server handled them. In the file a row appears once the
# push's fate is known, so those of a barrier come together; `reading.load` sorts them. `version_read` is the version
# that the gradient was computed from, `staleness` the number of updates between that version and the update that
# applied it (or, for a dropped push, between that version and the drop). `begin_s` and `end_s` bound the worker's own
# computation; `compute_s` is that computation with its padding, `wait_s` the wait for the grant that let it begin,
# `comm_s` the transfers of weights before it and of the gradient after it, `wire_bytes` the bytes of both.
#
# With elastic averaging, and where workers commit, a push is of several iterations on the worker, its `local_steps`,
# and `iteration` counts pushes all the same: `batch_size` is the samples of all of them and `loss` their mean.
# `version_read` is what the worker moved towards before them (the centre), or went on from. With elastic averaging
# iterations after a worker's last push are in no row.
#
# `share` is 1, or of an iteration that was cancelled the share of its samples that was computed: `compute_s` and `loss`
# are of these. `predicted_fixed_s` and `predicted_sample_s` are what the worker predicts for its next iterations: so
# many seconds, and so many for each sample; NaN where nobody asks. `pull_s` is the part of `comm_s` that is before the
# computation, `encode_s` the compression after it, which is in no other column. `weight` is what the contribution was
# multiplied by in its update, 0 for a dropped one.
PUSHES = np.dtype(
    [
        ("seq", "<i8"),
        ("now_s", "<f8"),
        ("worker", "<i4"),
        ("iteration", "<i8"),
        ("version_read", "<i8"),
        ("staleness", "<i8"),
        ("begin_s", "<f8"),
        ("end_s", "<f8"),
        ("compute_s", "<f8"),
        ("wait_s", "<f8"),
        ("comm_s", "<f8"),
        ("batch_size", "<i4"),
        ("local_steps", "<i4"),
        ("loss", "<f8"),
        ("wire_bytes", "<i8"),
        ("share", "<f8"),
        ("predicted_fixed_s", "<f8"),
        ("predicted_sample_s", "<f8"),
        ("pull_s", "<f8"),
        ("encode_s", "<f8"),
        ("weight", "<f8"),
        ("outcome", "<i1"),
    ]
)

# One row per grant. `iteration` is the one that the worker may now start, `version` the one that it will read,
# `gap_iters` how far the worker is ahead of the slowest that takes part, `held_s` the time since its push or return.
# A grant of zero local steps (and batch size zero) ends the worker's part in the run. `first_sample` is where in the
# run's endless sequence of samples those of the iteration begin, -1 where that follows from worker and iteration
# (`learning.data`). `local_steps` -1: as many as fit into `commit_s` seconds, from the end of reading the weights to
# the end of the last step; `batch_size` is then that of each. (0 of one who has not pushed before: its own.)
# `ratio` is the share of its contribution that the worker sends, NaN where the compression says that.
GRANTS = np.dtype(
    [
        ("seq", "<i8"),
        ("now_s", "<f8"),
        ("worker", "<i4"),
        ("iteration", "<i8"),
        ("version", "<i8"),
        ("gap_iters", "<i8"),
        ("credits", "<i8"),
        ("held_s", "<f8"),
        ("first_sample", "<i8"),
        ("batch_size", "<i4"),
        ("local_steps", "<i4"),
        ("commit_s", "<f8"),
        ("ratio", "<f8"),
    ]
)

# One row per update of the model. `version` is the version that the update made (the first is 1), `samples` the samples
# that all updates up to this one were computed from: the sum of their pushes' `batch_size`. `lr` is the learning rate;
# with elastic averaging it is alpha, the share of its distance from a worker by which the centre moves.
UPDATES = np.dtype(
    [("version", "<i8"), ("now_s", "<f8"), ("n_contributions", "<i4"), ("lr", "<f8"), ("samples", "<i8")]
)

# One row per choice of an adaptive controller. What it chose from follows as float64 columns: the paradigm's
# `decision_fields`, and those of the allocation of batch sizes, if there is one; NaN in the columns of the other.
DECISIONS = np.dtype([("seq", "<i8"), ("now_s", "<f8"), ("controller", "S16"), ("worker", "<i4"), ("chosen", "<f8")])

# One row per iteration of a worker that has weights of its own and no server, and the exchange with others that ended
# it: `peer` is the other one, or EVERYBODY, or NOBODY in an iteration without an exchange. `compute_s` is the
# computation between `begin_s` and `end_s` with its padding (where layers are separated, a part of the time between
# them: there a worker also waits), `wait_s` the wait for others, `comm_s` the transfers, `wire_bytes` what they moved.
# `n_received` models (or gradients) of others came into the worker's; `weight` is its push-sum weight afterwards. A row
# with batch size 0 is no iteration: what had come for a worker that had ended.
ALL_PEERS, NO_PEER = -1, -2
EXCHANGES = np.dtype(
    [
        ("now_s", "<f8"),
        ("worker", "<i4"),
        ("iteration", "<i8"),
        ("peer", "<i4"),
        ("wire_bytes", "<i8"),
        ("compute_s", "<f8"),
        ("wait_s", "<f8"),
        ("comm_s", "<f8"),
        ("loss", "<f8"),
        ("batch_size", "<i4"),
        ("begin_s", "<f8"),
        ("end_s", "<f8"),
        ("n_received", "<i4"),
        ("weight", "<f8"),
    ]
)

# `consensus_distance`: of the replicas from their mean, which is what was evaluated: the root of their mean squared
# distance. NaN where weights are on servers.
EVALUATIONS = np.dtype(
    [
        ("now_s", "<f8"),
        ("version", "<i8"),
        ("samples", "<i8"),
        ("loss", "<f8"),
        ("accuracy", "<f8"),
        ("consensus_distance", "<f8"),
    ]
)

# One row per change of who takes part. All do at first. LEFT: the worker leaves, at the end of its data or of the run,
# or because the job says so; one that is to join late does so instead of its first push. DIED: its process has. JOINED:
# it takes part again, and counts as no less far than the slowest that does; its iterations go on where they were, so
# that the grant that answers its return may be of one that it was granted before.
MEMBERSHIP = np.dtype([("seq", "<i8"), ("now_s", "<f8"), ("worker", "<i4"), ("change", "<i1")])

# One row per start of the run: its number, from 0, and where it goes on, `now_s` and `seq` of the last row before it.
# `created` is when, in UTC; `job_id` the batch system's.
STARTS = np.dtype([("start", "<i4"), ("now_s", "<f8"), ("seq", "<i8"), ("created", "S25"), ("job_id", "S64")])

# One row per report of a stall, an iteration that has lasted `lasted_s`, longer than the `deadline_s` that its worker's
# own iterations lead one to expect; there is another when it has lasted twice as long. `phase` is what the worker was
# doing, `n_waiting` how many others were held.
STALLS = np.dtype(
    [
        ("now_s", "<f8"),
        ("worker", "<i4"),
        ("iteration", "<i8"),
        ("phase", "<i1"),
        ("lasted_s", "<f8"),
        ("deadline_s", "<f8"),
        ("n_waiting", "<i4"),
    ]
)

# Of every start of the run.
CLOCKS = np.dtype([("start", "<i4"), ("rank", "<i4"), ("host", "S64"), ("offset_s", "<f8"), ("uncertainty_s", "<f8")])

TABLES = {
    "pushes": PUSHES,
    "grants": GRANTS,
    "updates": UPDATES,
    "decisions": DECISIONS,
    "exchanges": EXCHANGES,
    "evaluations": EVALUATIONS,
    "membership": MEMBERSHIP,
    "starts": STARTS,
    "stalls": STALLS,
    "clocks": CLOCKS,
}


def decisions_dtype(decision_fields: Sequence[str]) -> np.dtype:
    """The record type of `/decisions` for a paradigm: the common columns, then one float64 per field."""
    return np.dtype(DECISIONS.descr + [(name, "<f8") for name in decision_fields])
