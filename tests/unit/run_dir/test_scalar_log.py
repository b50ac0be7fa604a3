"""Scalars of a run in three logs, and logs that fail or hang."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from hpcsync.config.errors import JobError
from hpcsync.export import loggers, scalars
from hpcsync.export.scalars import Reports
from hpcsync.run_dir import scalar_log
from hpcsync.run_dir.scalar_log import ScalarLog
from tests.unit.jobs import make_job
from tests.unit.run_dir.fake_logs import Fake
from tests.unit.trace import recorder


@pytest.mark.parametrize(("name", "end"), [("wandb", 0), ("mlflow", "FINISHED"), ("tensorboard", "closed")])
def test_each_log_gets_all_points_and_the_end(
    name: str, end: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, trace = Fake(), recorder.record("dssp")
    getattr(fake, name)(monkeypatch)
    loggers.load(name)
    log = ScalarLog(name, tmp_path, make_job())
    for table, rows in trace.tables.items():
        log.add(table, rows)
    log.close("finished")
    log.close("failed")  # once is enough
    expected = [point for table, rows in trace.tables.items() for point in Reports(range(3)).points(table, rows)]
    given = [(key, value, update) for scalars, update, _ in fake.points for key, value in scalars.items()]
    assert given == [(key, value, point.update) for point in expected for key, value in point.scalars.items()]
    assert len(given) > 20 and fake.ended == [end] and fake.threads == {"log"}
    assert fake.axes == [("*", "update")] * (name == "wandb")
    last_s = fake.points[-1][2] + (expected[0].now_s if name == "tensorboard" else 0.0)
    assert last_s == pytest.approx(expected[-1].now_s, abs=1e-3)


@pytest.mark.parametrize(("name", "end"), [("wandb", 1), ("mlflow", "FAILED")])
def test_a_run_that_fails_says_so_to_its_log(
    name: str, end: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Fake()
    getattr(fake, name)(monkeypatch)
    ScalarLog(name, tmp_path, make_job()).close("failed")
    assert fake.ended == [end]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_resumed_run_is_continued(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake()
    getattr(fake, name)(monkeypatch)
    for folder in (tmp_path / "a", tmp_path / "a", tmp_path / "b"):
        folder.mkdir(exist_ok=True)
        ScalarLog(name, folder, make_job()).close("finished")
    assert fake.begun == [None, "run 1", None]  # the third run is another one


@pytest.mark.parametrize(
    ("error", "said"), [(ValueError("no disk\nat all"), "no disk"), (RuntimeError(), "RuntimeError")]
)
def test_a_log_that_fails_is_one_line(
    error: Exception,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object) -> None:
        raise error

    fake, trace = Fake(), recorder.record("asp")
    fake.wandb(monkeypatch)
    monkeypatch.setattr(fake, "take", fail)
    monkeypatch.setattr(scalar_log, "WAITING", 3)
    log = ScalarLog("wandb", tmp_path, make_job())
    for _ in range(5):
        log.add("pushes", trace.tables["pushes"])  # neither raises nor waits, although the queue is full
    log._thread.join(100)
    log.add("pushes", trace.tables["pushes"])
    begun_s = time.monotonic()
    log.close("finished")
    assert log._points.full() and time.monotonic() < begun_s + 30, "nothing takes what is left"
    assert capsys.readouterr().err == f"hpcsync: log wandb: the log ends here, the run continues: {said}\n"


def test_a_log_that_is_behind_at_the_end_is_ended_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, trace, writes, free = Fake(), recorder.record("asp"), threading.Event(), threading.Event()
    fake.wandb(monkeypatch)
    monkeypatch.setattr(fake, "take", lambda *_: writes.set() or free.wait(100))
    monkeypatch.setattr(scalar_log, "WAITING", 2)
    monkeypatch.setattr(scalar_log, "LAST_S", {"finished": 5.0})
    monkeypatch.setattr(scalar_log, "HURRIED_S", 0.0)
    log = ScalarLog("wandb", tmp_path, make_job())
    log.add("pushes", trace.tables["pushes"])
    assert writes.wait(100)
    log.add("pushes", trace.tables["pushes"])
    assert log._points.full()
    threading.Timer(0.1, free.set).start()
    log.close("finished")
    assert fake.ended == [0]


@pytest.mark.parametrize(("status", "last_s", "hurried_s"), [("finished", 0.01, 60.0), ("failed", 60.0, 0.01)])
def test_a_log_that_hangs_does_not_hold_up_the_end(
    status: str, last_s: float, hurried_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, trace, free = Fake(), recorder.record("asp"), threading.Event()
    fake.mlflow(monkeypatch)
    monkeypatch.setattr(scalar_log, "WAITING", 1)
    monkeypatch.setattr(sys.modules["mlflow"], "start_run", lambda **_: free.wait(60))
    monkeypatch.setattr(scalar_log, "LAST_S", {"finished": last_s})
    monkeypatch.setattr(scalar_log, "HURRIED_S", hurried_s)
    log = ScalarLog("mlflow", tmp_path, make_job())
    log.add("pushes", trace.tables["pushes"])
    assert log._points.full()
    begun_s = time.monotonic()
    log.close(status)
    assert time.monotonic() < begun_s + 30
    assert log._thread.is_alive() and fake.ended == []
    log._points.get(timeout=100)
    free.set()
    log._thread.join(100)


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    loggers.check(None)
    with pytest.raises(JobError, match="--log visdom: must be one of tensorboard, wandb, mlflow"):
        loggers.check("visdom")
    monkeypatch.setattr(loggers, "find_spec", lambda _: None)
    with pytest.raises(
        JobError, match=r"--log wandb: needs wandb, which is not installed: pip install 'hpcsync\[wandb\]'"
    ):
        loggers.load("wandb")
    monkeypatch.setattr(loggers, "find_spec", lambda _: True)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(JobError, match="--log mlflow: mlflow cannot be imported: "):
        loggers.load("mlflow")


def test_tensorboard_itself(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trace = recorder.record("dssp")
    log = ScalarLog("tensorboard", tmp_path, make_job())
    log.add("pushes", trace.tables["pushes"])
    log.add("evaluations", trace.tables["evaluations"])
    log.close("finished")
    found = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    losses = found.Scalars("evaluation/loss")
    assert [event.step for event in losses] == trace.tables["evaluations"]["version"].tolist()
    np.testing.assert_allclose([event.value for event in losses], trace.tables["evaluations"]["loss"], rtol=1e-6)
    assert len(found.Scalars("train/staleness")) == scalars.BINS
