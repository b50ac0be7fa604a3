"""Cost of a traced event: an append while the server works, and its share of a flush while no message waits."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np

from hpcsync.bench.figures import Figure, in_turn
from hpcsync.paradigms.records import layout
from hpcsync.trace.schema import TABLES
from hpcsync.trace.writer import TraceWriter

PUSHES = TABLES["pushes"]
ROWS = 4000  # below what the writer holds in memory, so that an append never flushes


def measure(rows: int = ROWS, repetitions: int = 15) -> list[Figure]:
    """Measure rows of /pushes, the widest table."""
    with tempfile.TemporaryDirectory() as folder, TraceWriter(Path(folder) / "trace.h5", {}) as trace:
        with open(Path(folder) / "plain", "wb") as plain:
            append_us, flush_us, pack_us, write_us = in_turn(
                repetitions,
                lambda: _append_us(trace, rows),
                lambda: _us(trace.flush, rows),
                lambda: _pack_us(rows),
                lambda: _us(partial(_write, plain, bytes(rows * PUSHES.itemsize)), rows),
            )
    return [
        Figure("append a row to /pushes", "us", append_us, "struct.pack_into of the same row", pack_us),
        Figure(f"flush, per row of {rows:,}", "us", flush_us, "the same bytes into a plain file", write_us),
    ]


def _row() -> tuple[object, ...]:
    return tuple(np.ones((), PUSHES).item())


def _append_us(trace: TraceWriter, rows: int) -> float:
    append, row = trace.append, _row()
    begin_s = time.perf_counter()
    for _ in range(rows):
        append("pushes", row)
    return 1e6 * (time.perf_counter() - begin_s) / rows


def _pack_us(rows: int) -> float:
    packer = layout(PUSHES[name].str for name in PUSHES.names or ())
    buffer, row = bytearray(rows * packer.size), _row()
    begin_s = time.perf_counter()
    for i in range(rows):
        packer.pack_into(buffer, i * packer.size, *row)
    return 1e6 * (time.perf_counter() - begin_s) / rows


def _us(call: Callable[[], None], rows: int) -> float:
    begin_s = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - begin_s) / rows


def _write(file: BinaryIO, values: bytes) -> None:
    file.write(values)
    file.flush()
