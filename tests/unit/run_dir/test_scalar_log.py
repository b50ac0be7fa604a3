"""Scalars of a run: points of its rows, three logs, and logs that fail or hang."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from hpcsync.config.errors import JobError
from hpcsync.export import loggers, scalars
from hpcsync.export.scalars import Point, Reports
from hpcsync.run_dir import scalar_log
from hpcsync.run_dir.scalar_log import ScalarLog
from hpcsync.trace.schema import TABLES, Outcome
from tests.unit.jobs import make_job
from tests.unit.run_dir.fake_logs import Fake
from tests.unit.trace import peer_recorder, recorder


def all_points(trace: Any, flushes: int = 3) -> list[tuple[str, Point]]:
    """Return the points of a trace that is flushed a few times, with their table."""
    reports = Reports()
    edges_s = np.linspace(0, trace.tables["updates"]["now_s"].max(), flushes + 1)[1:-1]
    found = []
    for part in range(flushes):
        for name, rows in trace.tables.items():
            if "now_s" in (rows.dtype.names or ()):
                found += [
                    (name, point) for point in reports.points(name, rows[np.digitize(rows["now_s"], edges_s) == part])
                ]
    return found


def named(name: str, points: list[tuple[str, Point]]) -> list[float]:
    return [point.scalars[name] for _, point in points if name in point.scalars]


@pytest.mark.parametrize(("recorded", "kind"), [(recorder, "dssp"), (recorder, "bsp"), (peer_recorder, "local-sgd")])
def test_points_follow_time_and_updates(recorded: ModuleType, kind: str) -> None:
    trace = recorded.record(kind)
    table = "pushes" if recorded is recorder else "exchanges"
    points = all_points(trace)
    reports = [point for name, point in points if name == table]
    assert len(reports) > 20
    assert [p.now_s for p in reports] == sorted(p.now_s for p in reports)
    assert [p.update for p in reports] == sorted(p.update for p in reports)
    updates = trace.tables["updates"]
    assert 1 < reports[-1].update == updates["version"].max()
    if table == "exchanges":  # known in time
        for point in reports:
            assert point.update == updates["version"][updates["now_s"] <= point.now_s].max(initial=0)


def test_means_are_weighted_by_samples() -> None:
    rows = np.zeros(4, TABLES["pushes"])
    rows["now_s"], rows["batch_size"], rows["loss"] = [1, 2, 3, 4], [1, 3, 4, 8], [4.0, 0.0, np.nan, 1.0]
    rows["staleness"], rows["version_read"] = [0, 2, 9, 4], [0, 0, 0, 1]
    rows["outcome"][2] = Outcome.DROPPED
    one, rest = Reports(), Reports()
    (whole,) = one.points("pushes", rows[:1])
    assert whole == Point({"train/samples_per_s": 1.0, "train/loss": 4.0, "train/staleness": 0.0}, 1, 1.0)
    point = rest._of_part(rows, has_servers=True)
    assert point.scalars == {"train/samples_per_s": 4.0, "train/loss": 1.0, "train/staleness": 2.0}
    assert (point.update, point.now_s) == (9, 4.0)


def test_evaluations_are_points_without_what_is_not_known() -> None:
    rows = np.array([(1.5, 7, 64, 0.5, np.nan, np.nan)], TABLES["evaluations"])
    assert [*Reports().points("evaluations", rows)] == [Point({"evaluation/loss": 0.5}, 7, 1.5)]
    assert [*Reports().points("pushes", rows[:0])] == []


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
    expected = [point for table, rows in trace.tables.items() for point in Reports().points(table, rows)]
    given = [(key, value, update) for scalars, update, _ in fake.points for key, value in scalars.items()]
    assert given == [(key, value, point.update) for point in expected for key, value in point.scalars.items()]
    assert len(given) > 20 and fake.ended == [end] and fake.threads == {"log"}
    last_s = fake.points[-1][2] + (expected[0].now_s if name == "tensorboard" else 0.0)
    assert last_s == pytest.approx(expected[-1].now_s, abs=1e-3)


def test_a_run_that_fails_says_so_to_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake()
    fake.wandb(monkeypatch)
    ScalarLog("wandb", tmp_path, make_job()).close("failed")
    assert fake.ended == [1]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_resumed_run_is_continued(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake()
    getattr(fake, name)(monkeypatch)
    for folder in (tmp_path / "a", tmp_path / "a", tmp_path / "b"):
        folder.mkdir(exist_ok=True)
        ScalarLog(name, folder, make_job()).close("finished")
    assert fake.begun == [None, "run 1", None]  # the third run is another one


def test_a_log_that_fails_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake, trace = Fake(), recorder.record("asp")
    fake.wandb(monkeypatch)
    monkeypatch.setattr(fake, "take", lambda *_: 1 / 0)
    monkeypatch.setattr(scalar_log, "WAITING", 3)
    log = ScalarLog("wandb", tmp_path, make_job())
    for _ in range(5):
        log.add("pushes", trace.tables["pushes"])  # neither raises nor waits, although the queue is full
    log.close("finished")
    log._thread.join(10)
    assert capsys.readouterr().err == ("hpcsync: log wandb: the log ends here, the run continues: division by zero\n")


def test_a_log_that_hangs_does_not_hold_up_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, free = Fake(), threading.Event()
    fake.mlflow(monkeypatch)
    monkeypatch.setattr(sys.modules["mlflow"], "start_run", lambda **_: free.wait(60))
    monkeypatch.setattr(scalar_log, "LAST_S", {"finished": 0.01})
    log = ScalarLog("mlflow", tmp_path, make_job())
    log.close("finished")
    assert log._thread.is_alive() and fake.ended == []
    free.set()
    log._thread.join(10)


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
