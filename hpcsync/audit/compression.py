"""How many bytes pushes are of, and what their compression takes: what can be said without the model's shapes."""

from __future__ import annotations

import numpy as np

from hpcsync.audit.check import Check, check_all, check_rows, teller
from hpcsync.audit.server_recount import Recount
from hpcsync.core.assignments import create_assignments

VARYING = ("top-k", "random-k", "dgc")  # codecs that send fewer elements where there are fewer, or choose how many
SAME_TIME_S = 1e-6
COUNT_BYTES = 8  # before the elements that a server is sent by one of these


def check_payloads(recount: Recount) -> list[Check]:
    """The checks of this module."""
    return [transfers_take_their_parts(recount), bytes_follow_from_compression(recount)]


def transfers_take_their_parts(recount: Recount) -> Check:
    """Reading is a part of the transfers. Compressing takes no time where there is none."""
    pushes = recount.pushes
    in_part = (pushes["pull_s"] >= 0) & (pushes["pull_s"] <= pushes["comm_s"] + SAME_TIME_S)
    encoded = (pushes["encode_s"] >= 0) & (recount.job.compresses | (pushes["encode_s"] == 0))
    return check_rows(
        "reading is part of a transfer, compressing of none",
        ~(in_part & encoded),
        teller("/pushes", pushes, "comm_s", "pull_s", "encode_s"),
    )


def bytes_follow_from_compression(recount: Recount) -> Check:
    """All pushes are of the same bytes where nothing is compressed, or by what does not look at the values: as many
    as are read, or fewer. Where it does, none is of more than a whole one, and of less than reading alone."""
    pushes, compression = recount.pushes, recount.job.compression
    name, whole = "bytes are those that reading and compression give", pushes["share"] == 1.0
    n_bytes, tell = pushes["wire_bytes"], teller("/pushes", pushes, "share", "wire_bytes")
    if compression.name not in VARYING:
        expected = n_bytes[whole][:1].sum() if whole.any() else 0
        read = expected // 2 if not recount.job.compresses else n_bytes[~whole][:1].sum()
        return check_rows(name, n_bytes != np.where(whole, expected, read if read else n_bytes), tell)
    dense = whole & (_ratios(recount) == 1.0)
    if not dense.any():
        return check_rows(name, n_bytes <= 0, tell)
    most, counts = int(n_bytes[dense][0]), COUNT_BYTES * recount.job.cluster.servers
    read = (most - counts) // 2
    return check_all(
        name,
        (dense & (n_bytes != most), tell),
        (whole & ((n_bytes > most) | (n_bytes < read + counts)), tell),
        (~whole & (n_bytes != read), tell),
    )


def _ratios(recount: Recount) -> np.ndarray:
    """The share of its elements that each push was granted to send; NaN where nobody said. Shape (n_pushes,)."""
    first = [assignment.ratio for assignment in create_assignments(recount.job).first]
    granted = np.append(recount.grants["ratio"], np.nan)[recount.push_permit]
    return np.where(recount.push_permit < 0, np.array(first)[recount.pushes["worker"]], granted)
