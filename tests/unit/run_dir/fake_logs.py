"""Stand-ins for the packages of `hpcsync run --log`."""

from __future__ import annotations

import importlib.util
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest


class Fake:
    """Stand-in for the three packages, which records what it is given."""

    def __init__(self) -> None:
        self.points: list[tuple[dict[str, float], int, float]] = []
        self.ended: list[object] = []
        self.threads: set[str] = set()
        self.begun: list[str | None] = []  # the run that is to be continued, of each begin
        self.axes: list[tuple[str, str]] = []  # of W&B: metrics, and the one over which they are drawn

    def take(self, scalars: dict[str, float], update: int, now_s: float) -> None:
        self.threads.add(threading.current_thread().name)
        self.points.append((scalars, update, now_s))

    def _begin(self, before: str | None) -> str:
        self.begun.append(before)
        return before or f"run {len(self.begun)}"

    def wandb(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def log(values: dict[str, float]) -> None:
            self.take({k: v for k, v in values.items() if "/" in k}, int(values["update"]), values["time_s"])

        def init(id: str | None, resume: str | None, **_: object) -> SimpleNamespace:
            assert resume == ("allow" if id else None)
            return SimpleNamespace(
                id=self._begin(id),
                log=log,
                define_metric=lambda name, step_metric: self.axes.append((name, step_metric)),
                finish=lambda exit_code: self.ended.append(exit_code),
            )

        self._install(monkeypatch, "wandb", init=init)

    def mlflow(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def log(values: dict[str, float], step: int) -> None:
            self.take({k: v for k, v in values.items() if "/" in k}, step, values["time_s"])

        def start_run(run_id: str | None, run_name: str) -> SimpleNamespace:
            return SimpleNamespace(info=SimpleNamespace(run_id=self._begin(run_id)))

        nothing = lambda *_, **__: None  # noqa: E731
        functions = {"set_experiment": nothing, "start_run": start_run, "log_text": nothing}
        self._install(monkeypatch, "mlflow", log_metrics=log, end_run=self.ended.append, **functions)

    def tensorboard(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fake = self

        class SummaryWriter:
            def __init__(self, folder: str) -> None:
                self.first_s: list[float] = []

            def add_text(self, *_: str) -> None:
                pass

            def add_scalar(self, name: str, value: float, update: int, walltime: float) -> None:
                self.first_s = self.first_s or [walltime]
                fake.take({name: value}, update, walltime - self.first_s[0])

            def close(self) -> None:
                fake.ended.append("closed")

        self._install(monkeypatch, "tensorboard")
        self._install(monkeypatch, "torch.utils.tensorboard", SummaryWriter=SummaryWriter)

    @staticmethod
    def _install(monkeypatch: pytest.MonkeyPatch, name: str, **functions: object) -> None:
        module = ModuleType(name)
        module.__spec__ = importlib.util.spec_from_loader(name, None)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)
