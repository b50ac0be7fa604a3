"""Checks of transferred bytes and compression time."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np

from hpcsync.audit.check import SAME_TIME_S, Check, check_all, check_rows, describe_columns
from hpcsync.audit.server_recount import Recount
from hpcsync.compression import Codec, TensorLayout, create
from hpcsync.compression.dgc import DGC
from hpcsync.config.compression import DenseOptions
from hpcsync.core.assignments import create_assignments
from hpcsync.trace.schema import Rows

VARYING = ("top-k", "random-k", "dgc")  # codecs whose number of sent elements varies
SIZES = {"tensors", "element_bytes"}  # root attributes of a trace with such a codec, from format version 9 on
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
    bytes, more than none. With other codecs no push has more bytes than the elements that its ratio allows, if the
    trace has the sizes of tensors, or else, in a trace of an earlier format, than a dense one; and none has fewer than
    those of reading alone.
    """
    pushes, compression, attributes = recount.pushes, recount.job.compression, recount.trace.attributes
    name, whole = "wire_bytes match the compression", pushes["share"] == 1.0
    n_bytes, describe = pushes["wire_bytes"], describe_columns("/pushes", pushes, "share", "wire_bytes")
    if compression.name not in VARYING:
        expected = n_bytes[whole][:1].sum() if whole.any() else 0
        read = expected // 2 if not recount.job.compresses else n_bytes[~whole][:1].sum()
        due = np.where(whole, expected, read if read else n_bytes)
        return check_rows(name, (n_bytes != due) | (whole & (n_bytes <= 0)), describe)
    if (sparse := _sparse_bytes(recount)) is not None:
        read, most = sparse
        least = read + COUNT_BYTES * recount.job.cluster.servers
        return check_all(
            name,
            (whole & ((n_bytes > most) | (n_bytes < least)), describe),
            (~whole & (n_bytes != read), describe),
        )
    if attributes["format_version"] >= 9 or SIZES & attributes.keys():
        wrong = f"no sizes of tensors follow from the attributes {', '.join(sorted(SIZES))}"
        return Check(name, False, len(pushes), wrong)
    dense = _ratios(recount) == 1.0  # granted by ASHL only, where every push is whole
    if not dense.any():
        return check_rows(name, n_bytes <= 0, describe)
    most, counts = int(n_bytes[dense][0]), COUNT_BYTES * recount.job.cluster.servers
    read = (most - counts) // 2
    return check_all(
        name,
        (dense & (n_bytes != most), describe),
        ((n_bytes > most) | (n_bytes < read + counts), describe),
    )


def _sparse_bytes(recount: Recount) -> tuple[int, Rows] | None:
    """Return the bytes of a read, and for each push the most bytes of a whole one and its read, shape (n_pushes,).

    None if the trace lacks the sizes of tensors.
    """
    codec = _codec(recount)
    if codec is None:
        return None
    size, itemsize, servers = codec.layout.size, codec.dtype.itemsize, recount.job.cluster.servers
    padding = servers * (itemsize - 4)  # positions have 4 bytes, and each payload is made of whole elements
    ratios, of_ratio = np.unique(_sent_ratios(recount, codec), return_inverse=True)
    elements = [codec.nominal_bytes(0, size, ratio) - COUNT_BYTES + padding for ratio in ratios]
    most = size * itemsize + COUNT_BYTES * servers + np.minimum(elements, size * itemsize)
    return size * itemsize, most[of_ratio]


def _sent_ratios(recount: Recount, codec: Codec) -> Rows:
    """Return the share of elements that each push may send, shape (n_pushes,); NaN: the codec's."""
    granted, pushes = _ratios(recount), recount.pushes
    if not isinstance(codec, DGC) or not codec.warmup:
        return granted
    if len(recount.trace.tables["starts"]) > 1:  # the warm-up of a worker that was absent at a checkpoint begins anew
        return np.where(np.isnan(granted), max(codec.ratio, *codec.warmup_ratios), granted)
    sent: Counter[int] = Counter()
    chosen = np.empty(len(pushes))
    for i, (worker, whole) in enumerate(zip(pushes["worker"].tolist(), pushes["share"] == 1.0, strict=True)):
        chosen[i] = codec.ratio_of(sent[worker])
        sent[worker] += bool(whole)
    return np.where(np.isnan(granted), chosen, granted)


def _codec(recount: Recount) -> Codec | None:
    """Return the codec for tensors of the sizes in the trace; None if it has none, or none that can be."""
    attributes, compression = recount.trace.attributes, recount.job.compression
    assert not isinstance(compression, DenseOptions)
    try:
        rows: Any = json.loads(attributes["tensors"])
        shapes = [(int(size),) if small else (int(size), 1) for size, small, number in rows for _ in range(number)]
        dtype = np.dtype(f"f{attributes['element_bytes']}")
        return create(compression.name, TensorLayout(shapes), dtype, **compression.options)
    except (KeyError, TypeError, ValueError):
        return None


def _ratios(recount: Recount) -> Rows:
    """Return the share of elements that each push was granted to send, shape (n_pushes,).

    NaN where the compression decides.
    """
    first = [assignment.ratio for assignment in create_assignments(recount.job).first]
    granted = np.append(recount.grants["ratio"], np.nan)[recount.push_permit]
    return np.where(recount.push_permit < 0, np.array(first)[recount.pushes["worker"]], granted)
