"""Draw random jobs from the schema of the job file, train each in virtual time and on ranks, and examine what is left.

    python -m tests.random_jobs --jobs 100 --seed 1

A job begins as a small one. Random keys get random values, and a value that is refused, which must happen with a
`JobError`, is left out again. The job is simulated twice, which must give the same trace and the same weights, and once
with the times of the first simulation. It is then trained on ranks that are threads, once more from its first
checkpoint, and where that is allowed from there with a worker less and with all of them again. What is deterministic
has the same weights on ranks, after a resume and in virtual time. Every trace must pass its audit, that of a simulation
also `--recompute`, and the commands that read runs must read it.
What fails is listed, with the job file that shows it in the folder `--keep`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import shutil
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from typer.testing import CliRunner

from hpcsync.api.ranks import agree
from hpcsync.cli.app import app
from hpcsync.cli.rank_main import train
from hpcsync.config.errors import JobError
from hpcsync.config.job import Job, load, refuse_simulated
from hpcsync.core.job_validation import check
from hpcsync.core.stanza_resolution import resolved
from hpcsync.mpi.transport import thread_ranks
from hpcsync.run_dir import layout
from hpcsync.simulator.simulate import prepare
from hpcsync.system import garbage
from hpcsync.trace.reader import load as load_trace
from tests.compare_checkouts import WEIGHTS, arrays_of, difference

Table = dict[str, Any]

LIMIT_S = 60.0  # of a run on ranks
CHANGES = 14  # most keys that are changed
EVENTFUL = 0.3  # share of the changes of [cluster] that add an event
BASE = {
    "name": "random",
    "stop": {"updates": 12, "seconds": 8},
    "optimizer": {"name": "sgd", "lr": 0.02},
    "checkpoint": {"updates": 5, "keep": 9},
    "evaluation": {"every_samples": 50},
}
WORKLOADS: list[Table] = [
    {"name": "linear", "batch_size": 4, "features": 5, "samples": 60},
    {"name": "linear", "batch_size": 3, "features": 7, "samples": 50},
    {"name": "linear", "batch_size": 4, "features": 3, "samples": 5},  # less than a batch for each worker
    {"name": "timing", "batch_size": 4, "parameters": 1000, "classifier": 400, "activations": 30},
    {"name": "images", "batch_size": 4, "samples": 50, "size": 8, "width": 1, "hidden": 3},
]
OPTIMIZERS: list[Table] = [
    {"name": "sgd", "momentum": 0.9},
    {"name": "sgd", "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    {"name": "adam"},
    {"name": "adamw"},
    {"name": "rmsprop"},
]
NUMBERS = (0.001, 0.01, 0.05, 0.1, 0.3, 0.5, 0.9, 1.0, 1.5, 2.0, 5.0)
TIMES = (0.0, 0.001, 0.002, 0.005, 0.01)
COUNTS = (1, 1, 2, 2, 3, 4, 5, 7, 12)
WITHOUT = {  # files, GPUs, what only grows, and what `BASE` and the lists above say
    *("name", "workload", "paradigm.name", "optimizer.name", "optimizer.lr", "optimizer.groups", "predicted"),
    *("cluster.workers", "cluster.device", "cluster.window", "cluster.placement"),
    *("cluster.times_from", "cluster.workers_min", "compression.bucket", "checkpoint.keep", "checkpoint.seconds"),
    "stop.on_nan",
}
# Tables of which keys are changed; `paradigm` and `cluster`, with most keys, three times as often.
SECTIONS = ("optimizer", "stop", "evaluation", "batches", "compression", *("paradigm", "cluster") * 3)
IN_STEP = ("bsp", "allreduce", "local-sgd", "stanza")
READING = (["explain"], ["cite"], ["figure", "timeline"])  # a run


# ---- jobs ----


class Jobs:
    """Random jobs.

    Parameters
    ----------
    seed
        The same seed draws the same jobs.
    """

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.schema = Job.model_json_schema()
        self.paradigms = self.schema["properties"]["paradigm"]["discriminator"]["mapping"]
        self.refused = 0

    def draw(self) -> str:
        """Return a job file that is not refused."""
        dice, found = self.dice, None
        while found is None:  # what a paradigm must have is drawn until it is allowed
            paradigm, workers = dice.choice(sorted(self.paradigms)), dice.choice((1, 2, 2, 3, 3, 4, 5))
            options = self._table(self._resolved({"$ref": self.paradigms[paradigm]}), "paradigm", workers, 0.0)
            table: Table = {
                **BASE,
                "seed": dice.randrange(1000),
                "workload": dice.choice(WORKLOADS),
                "paradigm": {**options, "name": paradigm},
                "cluster": {"workers": workers, "compute": {"model": "constant", "seconds": dice.choice(TIMES[1:])}},
            }
            found = self._accepted(table)
        for _ in range(dice.randrange(CHANGES)):
            changed = self._changed(table, found)
            if (job := self._accepted(changed)) is not None:
                table, found = changed, job
        return tomli_w.dumps(_without_none(table))

    def _changed(self, table: Table, job: Job) -> Table:
        """Return the table of this job with one more key, or another value of one."""
        dice, workers, section = self.dice, job.cluster.workers, self.dice.choice(SECTIONS)
        if section == "optimizer" and dice.random() < 0.5:
            return {**table, section: {**dice.choice(OPTIMIZERS), "lr": dice.choice((0.001, 0.01, 0.05))}}
        schema = self._resolved(self.schema["properties"][section])
        if section == "paradigm":
            schema = self._resolved({"$ref": self.paradigms[table["paradigm"]["name"]]})
        elif "oneOf" in schema:
            return {**table, section: self._value(schema, section, workers)}
        keys = sorted(key for key in schema["properties"] if f"{section}.{key}" not in WITHOUT)
        if not keys:  # a paradigm without options
            return table
        key = dice.choice(keys)
        value = self._value(schema["properties"][key], f"{section}.{key}", workers)
        required = {name: self._value(schema["properties"][name], name, workers) for name in schema.get("required", ())}
        if section == "cluster" and dice.random() < EVENTFUL:
            key, value = "events", [self._value({"$ref": "#/$defs/ClusterEvent"}, "cluster.events", workers)]
            value += table[section].get(key, [])
        if key == "servers":
            value = dice.choice((1, 2)) if job.has_servers else 0
        return {**table, section: {**required, **table.get(section, {}), key: value}}

    def _accepted(self, table: Table) -> Job | None:
        """Return the job, or None if it is refused, for a run or for a simulation."""
        try:
            with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
                file.write(tomli_w.dumps(_without_none(table)))
                file.flush()
                job = load(file.name)
            workload = check(job)
            prepare(resolved(job, workload), workload)
        except JobError:
            self.refused += 1
            return None
        return job

    def _resolved(self, schema: Table) -> Table:
        """Return what a reference in the schema stands for."""
        return self.schema["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema

    def _table(self, schema: Table, path: str, workers: int, share: float) -> Table:
        """Return what must be in a table, and this share of what may be."""
        required = schema.get("required", ())
        return {
            key: self._value(of, f"{path}.{key}", workers)
            for key, of in sorted(schema["properties"].items())
            if key in required or (f"{path}.{key}" not in WITHOUT and self.dice.random() < share)
        }

    def _value(self, schema: Table, path: str, workers: int) -> Any:
        """Return a random value of this schema. A list has a value for each worker, or is short."""
        schema, dice = self._resolved(schema), self.dice
        for alternatives in ("anyOf", "oneOf"):
            if alternatives in schema:
                return self._value(dice.choice(schema[alternatives]), path, workers)
        if "const" in schema or "enum" in schema:
            return dice.choice(schema.get("enum", [schema.get("const")]))
        if path.endswith(".worker"):
            return dice.randrange(workers)
        match schema.get("type"):
            case "object":
                drawn = self._table(schema, path, workers, 0.5) if "properties" in schema else {}
                if "at_s" in drawn:  # an event has one of the two
                    drawn.pop("at_iteration", None)
                return drawn
            case "array":
                n = dice.choice((workers, dice.randrange(1, 4)))
                return [self._value(schema.get("items", {"type": "number"}), path, workers) for _ in range(n)]
            case "boolean":
                return dice.random() < 0.5
            case "integer":
                return max(schema.get("minimum", 1), dice.choice(COUNTS)) - (dice.random() < 0.1)
            case "number":
                return dice.choice(TIMES if path.endswith("seconds") else NUMBERS)
            case "string":
                return "classifier"  # a cut
        return None


def _without_none(value: Any) -> Any:
    """TOML has no None."""
    if isinstance(value, dict):
        return {key: _without_none(of) for key, of in value.items() if of is not None}
    return [_without_none(of) for of in value if of is not None] if isinstance(value, list) else value


# ---- what is examined ----


class Wrong(Exception):
    """Something that must not happen."""


class Refused(Exception):
    """A command refused what it was given, in one line."""


def command(*arguments: str | Path) -> None:
    """Run a command of hpcsync in this process.

    Raises
    ------
    Refused
        If it ends with status 2 and one line.
    Wrong
        If it fails otherwise.
    """
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exit_code == 2 and result.stderr.startswith("hpcsync: ") and result.stderr.count("\n") == 1:
        raise Refused(result.stderr)
    if result.exit_code != 0:
        raised = "".join(traceback.format_exception(result.exception)) if result.exception else ""
        raise Wrong(f"hpcsync {' '.join(map(str, arguments))}: exit status {result.exit_code}\n{result.output}{raised}")


def simulated(job: Job, file: Path, folder: Path) -> None:
    """Simulate a job twice and with its own times, audit what the trace says, and read it with the commands."""
    command("show", file)
    one, two = folder / "one", folder / "two"
    for run in (one, two):
        command("simulate", file, "--out", run)
    if different := difference(arrays_of(one), arrays_of(two)):
        raise Wrong(f"simulated twice: {different}")
    command("audit", one, "--recompute")
    with contextlib.suppress(Refused):
        command("simulate", file, "--times-from", one, "--out", folder / "again")
        command("audit", folder / "again")
        if wrong := unlike(one, folder / "again"):
            raise Wrong(f"with its own times: {wrong}")
    for arguments in READING:
        with contextlib.suppress(Refused):  # not every figure is of every paradigm
            command(*arguments, one, *(["--out", folder / "figure"] if arguments[0] == "figure" else []))
    command("report", one, two, "--out", folder / "report.html")


def on_ranks(job: Job, file: Path, folder: Path) -> None:
    """Train a job on ranks that are threads, resume it from its first checkpoint, and audit both.

    Nothing is done with a job that only a simulation can run. Threads do not die.
    """
    job = job.model_copy(update={"cluster": job.cluster.model_copy(update={"on_death": "end"})})
    try:
        refuse_simulated(job)
    except JobError:
        return
    run, began, ranks = folder / "ranks", folder / "began", job.cluster.ranks
    thread_ranks.run(ranks, lambda comm: train(comm, job, run), limit_s=LIMIT_S)
    command("audit", run)
    command("simulate", file, "--out", folder / "virtual")
    if wrong := unlike(folder / "virtual", run):
        raise Wrong(f"simulated and on ranks: {wrong}")
    checkpoints = sorted(run.glob("checkpoints/[0-9]*"), key=lambda path: int(path.name))
    if not checkpoints:
        return
    shutil.copytree(run, began)
    _interrupt(began, checkpoints[0].name)
    fewer = folder / "fewer"
    shutil.copytree(began, fewer)
    _resumed(job, began, ranks)
    if wrong := unlike(run, began):
        raise Wrong(f"resumed: {wrong}")
    command("explain", began)
    with contextlib.suppress(JobError):
        job.refuse_ranks(ranks - 1, resumes=True)
        _resumed(job, fewer, ranks - 1)
        if job.has_servers:
            _interrupt(fewer, checkpoints[0].name)
            _resumed(job, fewer, ranks)


def _interrupt(run: Path, checkpoint: str) -> None:
    """Leave of a run what an interruption after this checkpoint leaves."""
    for path in run.glob("checkpoints/[0-9]*"):
        if path.name != checkpoint:
            shutil.rmtree(path)
    for name in (layout.SUMMARY, layout.WEIGHTS):
        (run / name).unlink(missing_ok=True)


def _resumed(job: Job, run: Path, n_ranks: int) -> None:
    def resume(comm: Any) -> Any:
        return train(comm, job, run, agree(comm, lambda: layout.resuming(run, True)))

    thread_ranks.run(n_ranks, resume, limit_s=LIMIT_S)
    command("audit", run)


def unlike(one: Path, other: Path) -> str | None:
    """Return how the weights of two runs of a job differ that must not; None if they do not, or may."""
    traces = [load_trace(run) for run in (one, other)]
    if not all(is_exact(trace.job) for trace in traces):
        return None
    lengths = [[len(trace.tables[table]) for table in ("pushes", "exchanges", "updates")] for trace in traces]
    if lengths[0] != lengths[1]:  # the time limit came after another iteration
        return None
    weights = [{name: x for name, x in arrays_of(run).items() if name.startswith(WEIGHTS)} for run in (one, other)]
    return difference(*weights)


def is_exact(job: Job) -> bool:
    """Return True if the weights of a run do not depend on how long its iterations take."""
    of_times = job.batches.policy != "equal" or job.stop.target is not None or job.paradigm.open_keys
    gone = any(event.change in ("leave", "join") and event.at_s is not None for event in job.cluster.events)
    in_step = job.paradigm.name in IN_STEP or getattr(job.paradigm, "synchronous", False)
    return in_step and not of_times and not gone


def examine(text: str, engines: Sequence[Callable[[Job, Path, Path], None]]) -> str | None:
    """Return what is wrong with the runs of a job, given as its file's text, or None."""
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "job.toml"
        file.write_text(text, encoding="utf-8")
        job = load(file)
        for engine in engines:
            said = io.StringIO()
            try:
                with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                    engine(job, file, Path(temporary))
            except Exception:
                return f"{engine.__name__}:\n{said.getvalue()}\n{traceback.format_exc()}"
    return None


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="number of the only job that is run")
    parser.add_argument("--engine", choices=("simulated", "ranks"), help="only this one")
    parser.add_argument("--keep", type=Path, default=Path("random-jobs"), help="folder for the job files that fail")
    asked = parser.parse_args(arguments)
    engines = {"simulated": [simulated], "ranks": [on_ranks], None: [simulated, on_ranks]}[asked.engine]
    garbage.freeze = lambda: None  # one process is not at an end after a run
    jobs, failed = Jobs(asked.seed), 0
    for n in range(asked.jobs):
        text = jobs.draw()
        if asked.only is not None and n != asked.only:
            continue
        begin_s = time.monotonic()
        wrong = examine(text, engines)
        name = tomllib.loads(text)["paradigm"]["name"]
        print(f"{n:4} {name} {time.monotonic() - begin_s:.1f} s", wrong or "ok", flush=True)
        if wrong:
            failed += 1
            asked.keep.mkdir(parents=True, exist_ok=True)
            (asked.keep / f"{asked.seed}-{n}.toml").write_text(text, encoding="utf-8")
    print(f"{asked.jobs} jobs: {failed} failed; {jobs.refused} changes were refused")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
