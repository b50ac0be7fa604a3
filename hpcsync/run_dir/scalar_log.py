"""Scalars of a run, written to TensorBoard, W&B or MLflow as its trace is flushed.

`points` makes them of rows of the trace. A thread of its own, which may wait for a disk or a network, gives them to the
one function that each of `LOGS` returns; training neither waits for it nor ends with it.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hpcsync.config.errors import JobError
from hpcsync.config.job import Job
from hpcsync.trace.schema import Outcome

BINS = 20  # of the pushes of a flush, each of which is a point
WAITING = 10_000  # points that may wait; later ones are lost
LAST_S = {"finished": 60.0}  # time for the last points by status of the run; else `HURRIED_S`
HURRIED_S = 2.0  # a run that fails ends its ranks soon


class Point(NamedTuple):
    """Scalars by name, the update (version) that they belong to, and their time in the run, in seconds."""

    scalars: dict[str, float]
    update: int
    now_s: float


Write = Callable[[Point], None]
Close = Callable[[str], None]  # takes the status of the run


def tensorboard(folder: Path, job: Job) -> tuple[Write, Close]:
    """Log to the folder `tensorboard` of the run."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"))
    writer.add_text("job", f"```toml\n{job.to_toml()}\n```")
    began: list[float] = []  # seconds since the epoch at the time 0 of the run

    def write(point: Point) -> None:
        began[:] = began or [time.time() - point.now_s]
        for name, value in point.scalars.items():
            writer.add_scalar(name, value, point.update, walltime=began[0] + point.now_s)

    return write, lambda _: writer.close()


def wandb(folder: Path, job: Job) -> tuple[Write, Close]:
    """Log to Weights & Biases, with the settings of its environment variables."""
    import wandb

    before = _id_of(folder, "wandb")
    run = wandb.init(
        project=f"hpcsync-{job.name}",
        name=folder.name,
        dir=folder.absolute(),
        config=tomllib.loads(job.to_toml()),
        id=before,
        resume="allow" if before else None,
    )
    _remember(folder, "wandb", run.id)
    run.define_metric("*", step_metric="update")
    return (
        lambda point: run.log({**point.scalars, "update": point.update, "time_s": point.now_s}),
        lambda status: run.finish(exit_code=int(status != "finished")),
    )


def mlflow(folder: Path, job: Job) -> tuple[Write, Close]:
    """Log to MLflow, with the settings of its environment variables."""
    import mlflow

    mlflow.set_experiment(f"hpcsync-{job.name}")
    run = mlflow.start_run(run_id=_id_of(folder, "mlflow"), run_name=folder.name)
    _remember(folder, "mlflow", run.info.run_id)
    mlflow.log_text(job.to_toml(), "job.toml")
    return (
        lambda point: mlflow.log_metrics({**point.scalars, "time_s": point.now_s}, step=point.update),
        lambda status: mlflow.end_run("FINISHED" if status == "finished" else "FAILED"),
    )


def _id_of(folder: Path, log: str) -> str | None:
    """Return the identifier under which a log knows this run, if it was logged before it was resumed."""
    file = folder / f"{log}.id"
    return file.read_text(encoding="utf-8") if file.exists() else None


def _remember(folder: Path, log: str, identifier: str) -> None:
    (folder / f"{log}.id").write_text(identifier, encoding="utf-8")


LOGS = {log.__name__: log for log in (tensorboard, wandb, mlflow)}  # by the name of their package and extra
MODULES = {"tensorboard": "torch.utils.tensorboard"}  # else the package itself


def check(name: str | None, option: str = "--log") -> None:
    """Raise JobError unless there is a log of this name whose package is installed; `option` is for messages."""
    if name is not None and name not in LOGS:
        raise JobError(f"{option} {name}: must be one of {', '.join(LOGS)}")
    if name is not None and find_spec(name) is None:
        raise JobError(f"{option} {name}: needs {name}, which is not installed: pip install 'hpcsync[{name}]'")


def load(name: str | None, option: str = "--log") -> None:
    """Import the package of a log, which takes seconds, before the run begins. Raise JobError if that fails."""
    check(name, option)
    if name is not None:
        try:
            import_module(MODULES.get(name, name))
        except ImportError as error:
            raise JobError(f"{option} {name}: {name} cannot be imported: {error}") from None


class ScalarLog:
    """Log of the scalars of one run. Its observer costs the thread that flushes a millisecond.

    Parameters
    ----------
    name
        A key of `LOGS`.
    folder
        Folder of the run.
    job
        The job.
    """

    def __init__(self, name: str, folder: Path, job: Job) -> None:
        self._name = name
        self._reports = Reports()
        self._points: queue.Queue[Point | None] = queue.Queue(WAITING)
        self._status = "failed"
        self._thread = threading.Thread(target=self._write_all, args=(folder, job), name="log", daemon=True)
        self._thread.start()

    def add(self, table: str, rows: np.ndarray) -> None:
        """Take the rows of a flush."""
        with contextlib.suppress(queue.Full):
            for point in self._reports.points(table, rows):
                self._points.put_nowait(point)

    def close(self, status: str) -> None:
        """Write what is left, for at most a minute. A second call does nothing."""
        if self._thread.is_alive():
            self._status = status
            with contextlib.suppress(queue.Full):
                self._points.put_nowait(None)
            self._thread.join(LAST_S.get(status, HURRIED_S))

    def _write_all(self, folder: Path, job: Job) -> None:
        try:
            write, close = LOGS[self._name](folder, job)
            while (point := self._points.get()) is not None:
                write(point)
            close(self._status)
        except Exception as error:  # of a foreign package: of any type
            line = (str(error).splitlines() or [type(error).__name__])[0]
            print(f"hpcsync: log {self._name}: the log ends here, the run continues: {line}", file=sys.stderr)


class Reports:
    """Points of the rows of a run, which come table by table at each flush."""

    def __init__(self) -> None:
        self._since_s = 0.0  # time of the last report
        self._updates_s, self._versions = np.zeros(1), np.zeros(1, np.int64)

    def points(self, table: str, rows: np.ndarray) -> Iterator[Point]:
        """Yield the points of these rows: one for each evaluation, and for each of `BINS` parts of the reports."""
        if table == "updates":
            self._updates_s = np.append(self._updates_s[-1:], rows["now_s"])
            self._versions = np.append(self._versions[-1:], rows["version"])
        elif table == "evaluations":
            for row in rows:
                scalars = {f"evaluation/{name}": float(row[name]) for name in ("loss", "accuracy")}
                yield Point(_known(scalars), int(row["version"]), float(row["now_s"]))
        elif table in ("pushes", "exchanges") and len(rows):
            for part in np.array_split(rows, min(BINS, len(rows))):
                yield self._of_part(part, has_servers=table == "pushes")

    def _of_part(self, rows: np.ndarray, *, has_servers: bool) -> Point:
        now_s = max(self._since_s, float(rows["now_s"].max()))
        samples, took_s = rows["batch_size"], now_s - self._since_s
        self._since_s = now_s
        has_loss = ~np.isnan(rows["loss"]) & (samples > 0)
        scalars = {"train/samples_per_s": samples.sum() / took_s if took_s > 0 else np.nan}
        if has_loss.any():
            scalars["train/loss"] = np.average(rows["loss"][has_loss], weights=samples[has_loss])
        if not has_servers:
            at = int(np.searchsorted(self._updates_s, now_s, side="right")) - 1
            return Point(_known(scalars), int(self._versions[max(0, at)]), now_s)
        applied = rows["outcome"] == Outcome.APPLIED
        if applied.any():
            scalars["train/staleness"] = rows["staleness"][applied].mean()
        return Point(_known(scalars), int((rows["version_read"] + rows["staleness"] + applied).max()), now_s)


def _known(scalars: dict[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in scalars.items() if not np.isnan(value)}
