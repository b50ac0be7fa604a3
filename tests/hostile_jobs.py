"""Mutate job files, and count how `load` and `show` end: with an answer, or refused in one line.

`python -m tests.hostile_jobs --trials 100000 --seed 1` mutates the files in jobs/, as text and as tables, some with
overrides, and lists what ended otherwise. Accepted jobs are shown, which builds their models and data.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import io
import random
import resource
import signal
import sys
import tempfile
import tomllib
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from hpcsync.cli.show import rows
from hpcsync.config.errors import JobError
from hpcsync.config.job import Job, load

LIMIT_S = 10  # of CPU time, so that a loaded machine does not count
LIMIT_BYTES = 16 << 30
MOST_CHARACTERS = 2000  # of a message
WELL = {"shown", "refused"}
PIECES = (
    *("", "[", "]", "{", "}", '"', "=", ".", "\n", "-", "[[", "= []", "''", "[1,2]", "true", "2026-01-01"),
    *("1e400", "nan", "inf", "0x7fffffffffffffff", "9" * 40, "9" * 5000, "1" + "0" * 400),
    *("\x1b", "é", "\x00", "[" * 3000, "{a=" * 2000, ".".join("a" * 3000), "cluster.workers=9223372036854775807"),
)
VALUES: tuple[Any, ...] = (
    *(0, 1, -1, 2, 7, 1000, 10**6, 2**31, 2**62, 2**63 - 1, 0.0, 0.5, 1.0, -0.5, 1e-300, 1e300),
    *(float("nan"), float("inf"), True, False, "", "auto", "bsp", "none", "os:system"),
    *("x" * 3000, "\x1b[31m", "\0", "../.."),
    *(
        [],
        [0.0],
        [1.0, 2.0],
        [1, "a"],
        [[1]],
        [1.0] * 2000,
        {},
        {"name": "asp"},
        {"name": "multistep"},
        {"a": {"b": 1}},
    ),
)


def places(table: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the paths of all keys."""
    for key, value in table.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from places(value, (*path, key))


def as_text(rng: random.Random, text: str) -> str:
    """Return the text with some pieces put in place of others."""
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        at = rng.randrange(len(text))
        text = text[:at] + rng.choice(PIECES) + text[at + rng.choice([0, 1, 2, 10]) :]
    return text


def as_table(rng: random.Random, text: str, others: Sequence[str]) -> str:
    """Return the job with some values replaced, removed, renamed, or taken from another job."""
    job, other = tomllib.loads(text), tomllib.loads(rng.choice(others))
    for _ in range(rng.choice([1, 1, 2, 3])):
        *above, key = rng.choice(list(places(job)) or [("name",)])
        table = job
        for name in above:
            table = table[name]
        how = rng.randrange(6)
        if how == 0:
            table.pop(key, None)
        elif how == 1:
            table[rng.choice(["a", "lr", "seconds", key.upper()])] = table.get(key, 1)
        elif how == 2:
            job.update({name: copy.deepcopy(other[name]) for name in [rng.choice(list(other))]})
        else:
            table[key] = copy.deepcopy(rng.choice(VALUES))
    return tomli_w.dumps(job)


def overrides(rng: random.Random) -> list[str]:
    """Return an override, or none."""
    if rng.random() > 0.2:
        return []
    keys = ("seed", "cluster.workers", "paradigm", "paradigm.k", "stop.samples", "cluster.compute.seconds")
    return [f"{rng.choice([*keys, '.'.join('a' * rng.choice([1, 3, 40]))])}={rng.choice(PIECES)}"]


def outcome(path: Path, given: Sequence[str]) -> str:
    """Return how loading and showing a job file ends: "shown", "refused", or what must not happen, in capitals."""
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    signal.alarm(10 * LIMIT_S)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            job = load(path, given)
            rows(job)
        if Job.from_toml(job.to_toml()) != job and "nan" not in job.to_toml():
            return "ANOTHER JOB is read from what is shown"
        return "shown"
    except JobError as error:
        line = str(error)
        return "refused" if len(line.splitlines()) == 1 and len(line) < MOST_CHARACTERS else f"MESSAGE: {line[:200]!r}"
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        name = where.filename.rpartition("/")[2]
        return f"{type(error).__name__.upper()} in {name}:{where.lineno}: {str(error)[:200]!r}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)


def ends(trials: int, seed: int, keep: Path | None = None) -> collections.Counter[str]:
    """Return how many of these trials ended how; files that ended otherwise are kept in the folder."""
    rng, counts = random.Random(seed), collections.Counter[str]()
    sources = [file.read_text() for file in sorted(Path("jobs").glob("*.toml"))]
    before = {signum: signal.signal(signum, _late) for signum in (signal.SIGALRM, signal.SIGPROF)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.toml"
        for trial in range(trials):
            text = rng.choice(sources)
            path.write_text(as_text(rng, text) if rng.random() < 0.4 else as_table(rng, text, sources))
            ended = outcome(path, overrides(rng))
            counts[ended] += 1
            if keep and ended not in WELL:
                keep.mkdir(parents=True, exist_ok=True)
                (keep / f"{seed}-{trial}.toml").write_bytes(path.read_bytes())
    for signum, handler in before.items():
        signal.signal(signum, handler)
    return counts


def _late(signum: int, frame: object) -> None:
    raise TimeoutError(f"{LIMIT_S} s of CPU time" if signum == signal.SIGPROF else f"{10 * LIMIT_S} s")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="folder for the files that ended otherwise")
    given = parser.parse_args(arguments)
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    counts = ends(given.trials, given.seed, given.keep)
    for ended, n in counts.most_common():
        print(f"{n:7,}  {ended}")
    return int(not set(counts) <= WELL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
