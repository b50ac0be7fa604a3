"""TensorBoard, W&B and MLflow: what writes a point of a run there, and what ends it."""

from __future__ import annotations

import time
import tomllib
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from hpcsync.config.errors import JobError
from hpcsync.config.job import Job
from hpcsync.export.scalars import Point
from hpcsync.system.atomic_files import whole

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
    with whole(folder / f"{log}.id") as file:
        file.write_text(identifier, encoding="utf-8")


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
