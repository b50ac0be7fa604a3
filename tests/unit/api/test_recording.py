"""The trace that `hpcsync.record` writes: rows in closed form from the durations of two processes."""

import math

import numpy as np
import pytest

from hpcsync.api.recording import Recorder, Step, _job, write
from hpcsync.audit.trace_audit import audit
from hpcsync.config.errors import JobError
from hpcsync.report.waiting import waits
from hpcsync.simulator.what_if import study
from hpcsync.trace.reader import load

N = 20
# Worker 1 computes for twice as long; the sum takes 0.1 s after it is ready.
FAST = [Step(0.1, 0.4, 0.6, 5.0 + 1.1 * i, 8, 4000, 0.5) for i in range(N)]
SLOW = [Step(0.0, 1.0, 0.1, 9.0 + 1.1 * i, 8, 4000, 0.5) for i in range(N)]  # another clock


def written(tmp_path, *steps):
    job = _job("loop", "sgd", 0.5, len(steps))
    return load(write(job, [np.array(each) for each in steps], ["a", "b"], tmp_path / "run"))


def test_waiting_is_what_exceeds_the_shortest_sum(tmp_path):
    trace = written(tmp_path, FAST, SLOW)
    rows = trace.tables["exchanges"]
    for worker, times in ((0, (0.1, 0.4, 0.5, 0.1)), (1, (0.0, 1.0, 0.0, 0.1))):
        own = rows[rows["worker"] == worker]
        assert len(own) == N
        for name, seconds in zip(("load_s", "compute_s", "wait_s", "comm_s"), times, strict=True):
            np.testing.assert_allclose(own[name], seconds, atol=1e-12)
    np.testing.assert_allclose(trace.tables["updates"]["now_s"], 1.1 * np.arange(1, N + 1))
    assert trace.tables["updates"]["samples"][-1] == 2 * 8 * N
    np.testing.assert_allclose(waits(trace).between_s.toarray(), [[0, 0.5 * N], [0, 0]], atol=1e-9)


def test_the_trace_passes_its_audit(tmp_path):
    trace = written(tmp_path, FAST, SLOW)
    assert [check.name for check in audit(trace) if not check.passed] == []
    assert trace.attributes["engine"] == "ddp"
    assert (tmp_path / "run" / "summary.json").exists()


def test_the_what_if_of_a_recorded_loop(tmp_path):
    found = study(written(tmp_path, FAST, SLOW), [{"name": "asp"}])
    assert found.replayed_s == pytest.approx(1.1 * N)
    assert found.of_worker(1) == pytest.approx(1.1 / 0.85, rel=0.01)  # the median of 0.5 and 1 s is 0.75 s
    (asp_s,) = found.others_s.values()  # every 0.6 and 1.1 s a batch
    assert asp_s == pytest.approx(2 * N / (1 / 0.6 + 1 / 1.1), rel=0.03)


def test_steps_that_not_all_made_are_left_out_and_counted(tmp_path, capsys):
    trace = written(tmp_path, FAST, SLOW[:-3])
    assert len(trace.tables["updates"]) == N - 3
    assert "3 steps that not all workers made are left out" in capsys.readouterr().err


def test_nothing_recorded_is_an_error(tmp_path):
    with pytest.raises(JobError, match="no step was made"):
        write(_job("loop", "sgd", math.nan, 1), [np.zeros((0, 7))], ["a"], tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_folder_with_a_run_is_refused(tmp_path):
    written(tmp_path, FAST, SLOW)
    with pytest.raises(JobError, match="must not hold"):
        written(tmp_path, FAST, SLOW)


def test_a_loop_without_the_module_is_said(tmp_path, capsys):
    with Recorder(tmp_path / "run", "loop") as recorder:
        assert list(recorder.loading([1, 2])) == [1, 2]
    assert "no DistributedDataParallel module was called" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
