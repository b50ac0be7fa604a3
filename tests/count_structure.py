"""Figures of the structure of a checkout: how many files, records and ladders a change has to know.

    python tests/count_structure.py [CHECKOUT ...]

prints, for each checkout (by default this one):

- files and lines of hpcsync that a push and its grant execute on two ranks, worker and server, from the end of a
  gradient's computation to the begin of the next one;
- the records that hold a push (fields `loss` and `local_steps`, or a field of such a record) and those that hold a
  grant (field `commit_s`, or a field of such a record): classes, tables of the trace, and messages that are declared
  rather than derived from a class;
- lines of the workers' and peers' halves of both engines (Stanza's left out), of what they share, and of what all
  sessions of ranks share;
- `isinstance` and `case` on the options of a paradigm outside of `hpcsync/paradigms`.

A checkout may be any commit since the folders have their present names; it needs no environment of its own.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
ENGINES = """
    mpi/server/worker.py mpi/server/session.py mpi/server/local_steps.py
    mpi/peer/session.py mpi/peer/exchange.py mpi/peer/gossip.py mpi/peer/pairs.py mpi/peer/factory.py
    simulator/run.py simulator/server_run.py simulator/server_numerics.py
    simulator/peer_run.py simulator/sync_peers.py simulator/gossip.py simulator/pairs.py simulator/peer_numerics.py
    simulator/factory.py
""".split()
SHARED = """
    core/worker_machine.py core/peer_machine.py paradigms/peer_method.py
    training/contributions.py training/local_update.py
""".split()
JOB = """
name = "count"
stop = {updates = 40}
evaluation = {every_samples = 0}
workload = {name = "digits", batch_size = 32}
optimizer = {name = "sgd", lr = 0.1}
paradigm = {name = "dssp", staleness_min = 1, staleness_max = 3}
cluster = {workers = 1}
"""


def n_lines(root: Path, names: list[str]) -> int:
    """Return the lines of those of these files that exist, without the sessions of servers."""
    total = 0
    for text in ((root / name).read_text() for name in names if (root / name).exists()):
        classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
        servers = [node for node in classes if node.name in ("FollowerSession", "LeaderSession")]
        total += len(text.splitlines()) - sum(node.end_lineno - node.lineno + 1 for node in servers if node.end_lineno)
    return total


# ---- options of paradigms ----


def option_checks(package: Path) -> int:
    """Return how often code outside of paradigms/ asks for the class of a paradigm's options."""
    kinds = set(_option_classes(package))
    found = 0
    for path in sorted(package.rglob("*.py")):
        if (package / "paradigms") in path.parents:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
                found += bool(kinds & {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)})
            elif isinstance(node, ast.MatchClass):
                found += getattr(node.cls, "id", "") in kinds
    return found


def _option_classes(package: Path) -> Iterator[str]:
    for path in [package / "config/paradigms.py", package / "config/stanza.py", *(package / "paradigms").glob("*.py")]:
        if path.exists():
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and node.name.endswith("Options") and node.name != "ParadigmOptions":
                    yield node.name


# ---- records ----


def records() -> dict[str, list[str]]:
    """Return the records of the hpcsync that can be imported, by what they hold."""
    import numpy as np

    import hpcsync
    from hpcsync.trace.schema import TABLES

    fields: dict[str, set[str]] = {f"/{name}": set(dtype.names) for name, dtype in TABLES.items()}
    parts: dict[str, set[str]] = {}
    for info in pkgutil.walk_packages(hpcsync.__path__, "hpcsync."):
        if "__main__" in info.name or info.name.startswith(("hpcsync.audit", "hpcsync.report", "hpcsync.bench")):
            continue
        module = importlib.import_module(info.name)
        for name, value in vars(module).items():
            if isinstance(value, np.dtype) and value.names and name.isupper():
                fields[name] = set(value.names)
            elif isinstance(value, type) and value.__module__ == info.name:
                hints = getattr(value, "__annotations__", {})
                if hasattr(value, "_fields") or hasattr(value, "__dataclass_fields__"):
                    fields[name] = set(hints)
                    parts[name] = {
                        word for hint in hints.values() for word in _words(getattr(hint, "__forward_arg__", str(hint)))
                    }
    return {
        "push": _holding(fields, parts, {"loss", "local_steps"}),
        "grant": _holding(fields, parts, {"commit_s"}),
    }


def _words(hint: Any) -> set[str]:
    return set(re.findall(r"\w+", getattr(hint, "__forward_arg__", str(hint))))


def _holding(fields: dict[str, set[str]], parts: dict[str, set[str]], wanted: set[str]) -> list[str]:
    held = {name for name, names in fields.items() if wanted <= names}
    return sorted(held | {name for name, words in parts.items() if words & held})


# ---- the way of a push ----


class Lines:
    """Lines of a package that are executed within the calls of some functions."""

    def __init__(self, package: Path) -> None:
        self.package = str(package) + os.sep
        self.seen: set[tuple[str, int]] = set()

    def within(self, owner: Any, name: str) -> None:
        """Note the lines executed in calls of this method."""
        function = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            sys.settrace(self._called)
            try:
                return function(*args, **kwargs)
            finally:
                sys.settrace(None)

        setattr(owner, name, noted)

    def _called(self, frame: Any, event: str, arg: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(self.package) else None

    def _line(self, frame: Any, event: str, arg: Any) -> Any:
        self.seen.add((frame.f_code.co_filename[len(self.package) :], frame.f_lineno))
        return self._line


def trace_a_run(out: Path) -> None:
    """Train on this rank; write the lines that its pushes execute into a file."""
    from mpi4py import MPI

    from hpcsync.cli.rank_main import train
    from hpcsync.config.job import Job
    from hpcsync.mpi.server.leader import Leader

    try:
        from hpcsync.mpi.server.worker import WorkerSession
    except ImportError:  # of checkouts in which all sessions were in one file
        from hpcsync.mpi.server.session import WorkerSession

    lines = Lines(Path(sys.modules["hpcsync"].__file__ or "").parent)
    lines.within(WorkerSession, "step")
    lines.within(Leader, "_handle")
    rank = MPI.COMM_WORLD.rank
    train(MPI.COMM_WORLD, Job.from_toml(JOB), out)
    (out / f"lines-{rank}.json").write_text(json.dumps(sorted(lines.seen)))


def way_of_a_push(checkout: Path) -> tuple[int, int]:
    """Return the files and lines that a push and its grant execute on the worker and on the server."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        out.mkdir()
        script = [sys.executable, str(Path(__file__).resolve()), "--trace", str(out)]
        _run(checkout, [sys.executable, "-m", "hpcsync", "launch", "-n", "2", "--timeout", "120", "--", *script])
        seen = {tuple(line) for path in out.glob("lines-*.json") for line in json.loads(path.read_text())}
    return len({name for name, _ in seen}), len(seen)


def _run(checkout: Path, command: list[str]) -> str:
    env = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=checkout, timeout=200)
    if done.returncode:
        raise SystemExit(f"{command}: {done.stdout}{done.stderr}")
    return done.stdout


def count(checkout: Path) -> dict[str, Any]:
    """Return the figures of a checkout."""
    package = checkout / "hpcsync"
    held = json.loads(_run(checkout, [sys.executable, str(Path(__file__).resolve()), "--records"]))
    files, lines = way_of_a_push(checkout)
    return {
        "files on the way of a push and its grant": files,
        "lines of them that are executed": lines,
        "records of a push": f"{len(held['push'])}: {', '.join(held['push'])}",
        "records of a grant": f"{len(held['grant'])}: {', '.join(held['grant'])}",
        "lines of both engines' worker and peer halves": n_lines(package, ENGINES),
        "lines that both engines share": n_lines(package, SHARED),
        "lines that all sessions of ranks share": n_lines(package, ["mpi/session_base.py"]),
        "checks for a paradigm's options outside of paradigms/": option_checks(package),
    }


def main(arguments: list[str]) -> None:
    """Print the figures of these checkouts, or carry out one part."""
    if arguments[:1] == ["--records"]:
        print(json.dumps(records()))
    elif arguments[:1] == ["--trace"]:
        trace_a_run(Path(arguments[1]))
    else:
        for checkout in map(Path, arguments or [str(HERE)]):
            print(checkout)
            for name, figure in count(checkout.resolve()).items():
                print(f"  {name}: {figure}")


if __name__ == "__main__":
    main(sys.argv[1:])
