"""Damage traces in many ways, and count how `audit`, `summarize` and `explain` end: answered, or refused in one line.

`python -m tests.damage --trials 1000 --seed 1 TRACE...` damages copies of these traces and lists what ended otherwise.
Each trial has a process of its own with a time limit, since damaged files can crash or hang the HDF5 library.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import h5py
import numpy as np

from hpcsync.audit.trace_audit import audit
from hpcsync.report.explanation import explain
from hpcsync.report.summary import summarize
from hpcsync.trace.reader import TraceError, opened

LIMIT_S = 20
VALUES = (None, "x", -1, 2**62, float("nan"), [0, 1, 2], "[[", b"\xff\xfe", "")
KINDS = ("S3", "<f4", "<i8", "<u1", "V7", "?")


def _some(rng: random.Random, file: h5py.File) -> str:
    return rng.choice(sorted(file))


def another_object(rng: random.Random, file: h5py.File) -> None:
    table = _some(rng, file)
    rows = file[table][:]
    del file[table]
    if rng.random() < 0.3:
        file.create_group(table)
    else:
        file[table] = rng.choice([rows.reshape(1, -1), np.arange(5.0), 3])


def without_a_column(rng: random.Random, file: h5py.File) -> None:
    table = _some(rng, file)
    rows = file[table][:]
    kept = list(rows.dtype.names)
    kept.remove(rng.choice(kept))
    new = np.zeros(len(rows), [(name, rows.dtype[name]) for name in kept])
    for name in kept:
        new[name] = rows[name]
    del file[table]
    file[table] = new


def another_type(rng: random.Random, file: h5py.File) -> None:
    table = _some(rng, file)
    rows = file[table][:]
    changed, kind = rng.choice(rows.dtype.names), rng.choice(KINDS)
    new = np.zeros(len(rows), [(name, kind if name == changed else rows.dtype[name]) for name in rows.dtype.names])
    del file[table]
    file[table] = new


def flushed_rows(rng: random.Random, file: h5py.File) -> None:
    counts = file.attrs["flushed_rows"].copy()
    name = rng.choice(counts.dtype.names)
    counts[name] = rng.choice([0, 10**6, int(counts[name]) + 5])
    file.attrs["flushed_rows"] = rng.choice([counts, counts, 3, "x", np.zeros(3), np.zeros(2, [("pushes", "<i8")])])


def attribute(rng: random.Random, file: h5py.File) -> None:
    name, value = rng.choice(sorted(file.attrs)), rng.choice(VALUES)
    if value is None:
        del file.attrs[name]
    else:
        file.attrs[name] = value


def job(rng: random.Random, file: h5py.File) -> None:
    text = file.attrs["job"]
    at = rng.randrange(len(text))
    file.attrs["job"] = text[:at] + rng.choice(["", "\x01", "[", "9" * 30, '"']) + text[at + rng.randrange(4) :]


def value(rng: random.Random, file: h5py.File) -> None:
    table = _some(rng, file)
    if rows := len(file[table]):
        some = file[table][:]
        column = rng.choice(some.dtype.names)
        raw = some[column].view(f"V{some.dtype[column].itemsize}")
        raw[rng.randrange(rows)] = np.frombuffer(rng.randbytes(raw.dtype.itemsize), raw.dtype)[0]
        file[table][:] = some


def bits(rng: random.Random, data: bytearray) -> bytes:
    for _ in range(rng.choice([1, 10, 100, 1000])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def cut(rng: random.Random, data: bytearray) -> bytes:
    return bytes(data[: rng.randrange(len(data))])


OF_FILES: tuple[Callable[[random.Random, h5py.File], None], ...] = (
    another_object,
    without_a_column,
    another_type,
    flushed_rows,
    attribute,
    job,
    value,
)
OF_BYTES = (bits, cut)


def damage(rng: random.Random, path: Path) -> str:
    """Damage the file; return how."""
    how = rng.choice([*OF_FILES, *OF_BYTES])
    if how in OF_BYTES:
        path.write_bytes(how(rng, bytearray(path.read_bytes())))
    else:
        with h5py.File(path, "r+") as file:
            how(rng, file)
    return how.__name__


def _audit(path: Path) -> str:
    return "passed" if all(check.passed for check in audit(path)) else "failed"


def _summarize(path: Path) -> str:
    with opened(path) as trace:
        summarize(trace)
    return "summarized"


def _explain(path: Path) -> str:
    with opened(path) as trace:
        trace.verify()
        explain(trace)
    return "explained"


def outcome(act: Callable[[Path], str], path: Path) -> str:
    """Return how an act ends: its answer, "refused", or what must not happen, in capitals."""
    try:
        with np.errstate(all="ignore"):
            return act(path)
    except TraceError as error:
        return "refused" if len(str(error).splitlines()) == 1 else "SEVERAL LINES"
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__.upper()} in {where.filename.rpartition('/')[2]}:{where.lineno}: {error}".split(
            "\n"
        )[0]


def trial(rng: random.Random, source: Path, folder: Path) -> Iterator[tuple[str, str, str]]:
    """Damage a copy; yield how, the act and its outcome."""
    path = folder / "damaged.h5"
    shutil.copy(source, path)
    how = damage(rng, path)
    acts = (_audit, _summarize, _explain)
    for act, answer in zip(acts, _apart([lambda act=act: outcome(act, path) for act in acts]), strict=True):
        yield how, act.__name__[1:], answer


def _apart(calls: Sequence[Callable[[], str]]) -> list[str]:
    """Return what these calls, one after the other, return in a process of their own."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        with contextlib.redirect_stderr(io.StringIO()):
            for call in calls:
                signal.alarm(LIMIT_S)
                os.write(write, call().replace("\n", " ").encode()[:4000] + b"\n")
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        answers = pipe.read().decode(errors="replace").splitlines()
    signum = os.waitpid(pid, 0)[1]
    return [*answers, *[f"ENDED by signal {signum}"] * (len(calls) - len(answers))]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("traces", nargs="+", type=Path)
    given = parser.parse_args(arguments)
    rng, counts = random.Random(given.seed), collections.Counter[tuple[str, str, str]]()
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(given.trials):
            counts.update(trial(rng, rng.choice(given.traces), Path(folder)))
    for (how, act, result), n in sorted(counts.items()):
        print(f"{n:6} {how:18} {act:10} {result}")
    return int(any(result[0].isupper() for _, _, result in counts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
