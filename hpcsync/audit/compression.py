"""Checks of transferred bytes and compression time that need no model shapes."""

from __future__ import annotations

import numpy as np

from hpcsync.audit.check import Check, check_all, check_rows, describe_columns
from hpcsync.audit.server_recount import Recount
from hpcsync.core.assignments import create_assignments
from hpcsync.trace.schema import Rows

VARYING = ("top-k", "random-k", "dgc")  # codecs whose number of sent elements varies
SAME_TIME_S = 1e-6
COUNT_BYTES = 8  # header of such a codec's payload to one server


def check_payloads(recount: Recount) -> list[Check]:
    """Return the checks of this module."""
    return [transfers_take_their_parts(recount), bytes_follow_from_compression(recount)]


def transfers_take_their_parts(recount: Recount) -> Check:
    """Check that reading is part of the transfer time and that encoding takes none without compression."""
    pushes = recount.pushes
    in_part = (pushes["pull_s"] >= 0) & (pushes["pull_s"] <= pushes["comm_s"] + SAME_TIME_S)
    encoded = (pushes["encode_s"] >= 0) & (recount.job.compresses | (pushes["encode_s"] == 0))
    return check_rows(
        "transfer time includes reading and excludes encoding",
        ~(in_part & encoded),
        describe_columns("/pushes", pushes, "comm_s", "pull_s", "encode_s"),
    )


def bytes_follow_from_compression(recount: Recount) -> Check:
    """Check the bytes of each push.

    Without compression, or with a codec whose output size does not depend on the values, all whole pushes have equal
    bytes. With other codecs no push exceeds a dense one or is below the bytes of reading alone.
    """
    pushes, compression = recount.pushes, recount.job.compression
    name, whole = "wire_bytes match the compression", pushes["share"] == 1.0
    n_bytes, describe = pushes["wire_bytes"], describe_columns("/pushes", pushes, "share", "wire_bytes")
    if compression.name not in VARYING:
        expected = n_bytes[whole][:1].sum() if whole.any() else 0
        read = expected // 2 if not recount.job.compresses else n_bytes[~whole][:1].sum()
        return check_rows(name, n_bytes != np.where(whole, expected, read if read else n_bytes), describe)
    dense = whole & (_ratios(recount) == 1.0)
    if not dense.any():
        return check_rows(name, n_bytes <= 0, describe)
    most, counts = int(n_bytes[dense][0]), COUNT_BYTES * recount.job.cluster.servers
    read = (most - counts) // 2
    return check_all(
        name,
        (dense & (n_bytes != most), describe),
        (whole & ((n_bytes > most) | (n_bytes < read + counts)), describe),
        (~whole & (n_bytes != read), describe),
    )


def _ratios(recount: Recount) -> Rows:
    """Return the share of elements that each push was granted to send, shape (n_pushes,).

    NaN where the compression decides.
    """
    first = [assignment.ratio for assignment in create_assignments(recount.job).first]
    granted = np.append(recount.grants["ratio"], np.nan)[recount.push_permit]
    return np.where(recount.push_permit < 0, np.array(first)[recount.pushes["worker"]], granted)
