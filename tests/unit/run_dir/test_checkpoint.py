"""Checkpoints on disk: complete or absent, whenever the writing process is killed."""

import itertools
import os
import random
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from hpcsync.config.errors import JobError, shown
from hpcsync.core.coordinator import NoRecorder, coordinate
from hpcsync.run_dir import checkpoint, checkpoint_files, layout
from hpcsync.run_dir.checkpoint import RUN, Checkpoints
from hpcsync.state import plain
from hpcsync.system.atomic_files import NotWritten
from hpcsync.trace.reader import load
from hpcsync.trace.writer import TraceWriter
from tests.unit.jobs import make_job, refusal
from tests.unit.run_states import run_state

KILLS = 40
ATTRIBUTES = {
    "job": "",
    "paradigm": "bsp",
    "n_servers": 1,
    "n_workers": 2,
    "hosts": "n1",
    "created": "2026-01-02T03:04:05+00:00",
}


LEAVE = [{"worker": 0, "at_s": 1.0, "change": "leave"}]
BEGAN = "as it was when the run began"


def written(folder: Path, *numbers: int, keep: int = 2) -> Checkpoints:
    folder.mkdir(exist_ok=True)
    store = Checkpoints(folder, keep, checkpoint.newest(folder), shared=True)
    for number in numbers:
        store.begin(number)
        store.write(number, "server-0", {"value": torch.full((3,), number)})
        store.write(number, RUN, run_state(now_s=float(number)))
        store.commit(number)
    return store


def test_states_are_restored(tmp_path):
    store = written(tmp_path, 1)
    assert store.state(RUN) is None, "this run began here"
    resumed = written(tmp_path).state("server-0")
    assert resumed["value"].tolist() == [1, 1, 1]
    assert written(tmp_path).state(RUN)["now_s"] == 1.0
    assert written(tmp_path).state("worker-5") is None


def test_only_the_newest_ones_stay(tmp_path):
    written(tmp_path, 1, 2, 3, 10, keep=2)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["10", "3"]
    assert checkpoint.number_of(checkpoint.newest(tmp_path)) == 10
    assert checkpoint.newest(tmp_path / "elsewhere") is None and checkpoint.number_of(None) == 0


def test_what_an_earlier_attempt_has_left_of_a_checkpoint_is_deleted(tmp_path):
    store = Checkpoints(tmp_path, 2, None, shared=True)
    for _ in range(2):  # killed before it has committed
        store.begin(1)
        store.write(1, "server-0", {"value": 1})
    store.abandon()
    assert [*(tmp_path / "checkpoints").iterdir()] == []


def test_a_checkpoint_without_the_records_of_the_run_is_refused(tmp_path):
    store = Checkpoints(tmp_path, 2, None, shared=True)
    store.begin(1)
    store.write(1, "server-0", {"value": 1})
    store.commit(1)
    with pytest.raises(JobError, match=r"^--resume: \S+/1/run\.json: missing$"):
        checkpoint.resumed(tmp_path)


def test_a_checkpoint_that_the_system_refuses_to_read_is_refused(tmp_path, monkeypatch):
    written(tmp_path, 1)
    assert checkpoint.resumed(tmp_path) is not None, "the control"

    def refuse(path: Path, *_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)  # of another user with umask 077
    with pytest.raises(JobError, match=r"^--resume: \S+/1/manifest\.json: Permission denied$"):
        checkpoint.resumed(tmp_path)
    monkeypatch.setattr(os, "listdir", refuse)
    monkeypatch.setattr(os, "scandir", refuse)  # of `glob`, which takes that for an empty folder
    with pytest.raises(JobError, match=r"^--resume: \S+/checkpoints: Permission denied$"):
        checkpoint.resumed(tmp_path)


def test_workers_without_servers_do_not_join_again(tmp_path):
    job = make_job(paradigm={"name": "gossip", "mode": "pull"}, cluster={"workers": 4})
    before = checkpoint.Resumed(tmp_path, job, frozenset({0, 1, 3}))
    before.refuse_ranks(3)
    with pytest.raises(JobError, match=r"^--resume: 4 ranks: must be at most 3, as \S+ has workers$"):
        before.refuse_ranks(4)


def test_a_run_resumes_in_another_version_of_hpcsync(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_files, "__version__", "0.0.1")
    written(tmp_path, 1)
    monkeypatch.undo()
    assert checkpoint.resumed(tmp_path).job == make_job()


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"seed": 9}, "seed = 9: must be 1, as it was when the run began"),
        ({"stop": {"updates": 9}}, None),
        ({"checkpoint": {"seconds": 1.0}}, None),
        ({"name": "other"}, None),
        ({"predicted": {"seconds": 1.0}}, None),
        ({"optimizer": {"name": "sgd", "lr": 0.2}}, "optimizer.lr = 0.2: must be 0.1, as it was when the run began"),
        ({"paradigm": {"name": "asp"}}, 'paradigm.name = "asp": must be "bsp", as it was when the run began'),
        ({"compression": {"name": "sign"}}, 'compression.name = "sign": must be "none", as it was when the run began'),
        ({"cluster": {"workers": 3}}, "cluster.workers = 3: must be 2, as it was when the run began"),
        ({"cluster": {"workers": 2, "events": LEAVE}}, f"cluster.events = {shown(LEAVE)}: must be [], {BEGAN}"),
        ({"cluster": {"servers": 2, "workers": 3}}, "cluster.servers = 2: must be 1, as it was when the run began"),
    ],
)
def test_changes_that_a_resumed_run_may_make(changed, line):
    table = {"seed": 1, "optimizer": {"name": "sgd", "lr": 0.1}, "paradigm": {"name": "bsp"}}
    before, now = make_job(**table), make_job(**(table | changed))
    if line is None:
        checkpoint.refuse_other_job(before, now)
    else:
        assert refusal(checkpoint.refuse_other_job, before, now) == line


def test_a_setting_that_is_ignored_may_change():
    """An override may drop one with which a run of an earlier version began."""
    before, now = (make_job(batches={"policy": "equal", **more}) for more in ({"minimum": 2}, {}))
    checkpoint.refuse_other_job(before, now)
    before, now = (make_job(batches={"policy": "proportional", **more}) for more in ({"minimum": 2}, {}))
    with pytest.raises(JobError, match=r"^batches\.minimum = 1: must be 2, as it was when the run began$"):
        checkpoint.refuse_other_job(before, now)


def test_a_switch_at_a_share_of_the_samples_stays_where_it_was():
    switch = {"name": "sync-switch", "then": {"name": "asp"}, "share": 0.5}
    by_share, longer = (make_job(paradigm=switch, stop={"samples": n}) for n in (160, 320))
    with pytest.raises(JobError, match=r"^stop\.samples = 320: must be 160, as it was when the run began$"):
        checkpoint.refuse_other_job(by_share, longer)
    del switch["share"]
    by_loss, longer = (make_job(paradigm=switch | {"plateau": 0.1}, stop={"samples": n}) for n in (160, 320))
    checkpoint.refuse_other_job(by_loss, longer)


def test_a_folder_that_cannot_be_created_or_renamed_is_named(tmp_path):
    (tmp_path / "checkpoints").touch()
    with pytest.raises(NotWritten, match=r"/checkpoints/1\.unfinished: Not a directory$"):
        Checkpoints(tmp_path, 2, None, shared=True).begin(1)
    (tmp_path / "checkpoints").unlink()
    store = Checkpoints(tmp_path, 2, None, shared=True)
    store.begin(1)
    (tmp_path / "checkpoints" / "1" / "in the way").mkdir(parents=True)
    with pytest.raises(NotWritten, match=r"/checkpoints/1\.unfinished: Directory not empty$"):
        store.commit(1)


def test_a_folder_that_was_moved_is_not_created_again(tmp_path):
    """The run would find no trace in it at its end."""
    (tmp_path / "run").mkdir()
    store = Checkpoints(tmp_path / "run", 2, None, shared=True)
    store.begin(1)
    (tmp_path / "run").rename(tmp_path / "moved")
    with pytest.raises(NotWritten, match=r"run/checkpoints/2\.unfinished: No such file or directory$"):
        store.begin(2)
    assert not (tmp_path / "run").exists()


# ---- the ranks of a run that resumes ----


@pytest.mark.parametrize(
    ("away", "stops", "least"), [((), False, 2), ((1, 2), False, 2), ((0, 1), False, 4), ((0, 1), True, 2)]
)
def test_a_run_resumes_only_with_a_worker_that_is_active(tmp_path, away, stops, least):
    """Others join while there is one."""
    job = make_job(cluster={"workers": 3})
    coordinator = coordinate(job, NoRecorder())
    for worker in away:
        coordinator.left(0.5, worker)
    if stops:
        coordinator.stop(0.5)
    store = Checkpoints(tmp_path, 2, None, shared=True)
    store.begin(1)
    store.write(1, RUN, run_state(job, coordinator=plain(coordinator.state())))
    store.commit(1)
    before = checkpoint.resumed(tmp_path)
    for n_ranks in range(2, least):
        with pytest.raises(JobError, match=rf"^--resume: {n_ranks} ranks: must be at least {least}: in "):
            before.refuse_ranks(n_ranks)
    for n_ranks in range(least, 5):
        before.refuse_ranks(n_ranks)


# ---- the trace of a run that resumes ----


def traced(folder: Path, n_updates: int = 5) -> dict[str, int]:
    """Write a trace with so many updates into the folder; return what a checkpoint says of it."""
    (folder / layout.TRACE).unlink(missing_ok=True)
    with TraceWriter(folder / layout.TRACE, ATTRIBUTES) as trace:
        for version in range(1, n_updates + 1):
            trace.append("updates", (version, float(version), 1, 0.1, version, 0.5))
        trace.flush()
        return trace.flushed()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda path: path.unlink(), "trace.h5: no such file"),
        (
            lambda path: os.truncate(path, path.stat().st_size // 2),
            "trace.h5: truncated: it has [0-9,]+ of [0-9,]+ bytes",
        ),
        (lambda path: traced(path.parent, 3), r"trace.h5: 3 rows of /updates; there must be at least the 5 of \S+/1"),
    ],
    ids=["missing", "truncated", "of another run"],
)
def test_a_run_without_its_trace_is_refused_before_any_rank_starts(tmp_path, damage, says):
    store = Checkpoints(tmp_path, 2, None, shared=True)
    store.begin(1)
    store.write(1, RUN, run_state(trace_rows=traced(tmp_path)))
    store.commit(1)
    assert checkpoint.resumed(tmp_path) is not None
    traced(tmp_path, 7)
    assert checkpoint.resumed(tmp_path) is not None, "later rows are lost"
    damage(tmp_path / layout.TRACE)
    with pytest.raises(JobError, match=rf"^--resume: \S+/{says}$"):
        checkpoint.resumed(tmp_path)


def test_a_trace_whose_end_is_lost_resumes_once_it_has_its_length(tmp_path):
    path = tmp_path / layout.TRACE
    with TraceWriter(path, ATTRIBUTES) as trace:
        for version in range(1, 500):
            trace.append("updates", (version, float(version), 1, 0.1, version, 0.5))
        trace.sync()
        flushed, at_checkpoint = trace.flushed(), path.stat().st_size
        for version in range(500, 5000):
            trace.append("updates", (version, float(version), 1, 0.1, version, 0.5))
    store, size = Checkpoints(tmp_path, 2, None, shared=True), path.stat().st_size
    store.begin(1)
    store.write(1, RUN, run_state(trace_rows=flushed))
    store.commit(1)
    os.truncate(path, at_checkpoint)
    with pytest.raises(JobError, match=f"truncated: it has {at_checkpoint:,} of {size:,} bytes$"):
        checkpoint.resumed(tmp_path)
    os.truncate(path, size)
    assert checkpoint.resumed(tmp_path) is not None
    with TraceWriter(path, ATTRIBUTES, resumed_rows=flushed):
        pass
    trace = load(path)
    assert trace.tables["updates"]["version"].tolist() == list(range(1, 500))
    assert not trace.altered


@pytest.mark.parametrize("changes", [False, True])
def test_rows_that_change_before_a_run_resumes_are_found_after_it(tmp_path, changes):
    path, flushed = tmp_path / layout.TRACE, traced(tmp_path)
    if changes:
        with h5py.File(path, "r+") as file:
            rows = file["updates"][:]
            rows["lr"][2] = 0.2
            file["updates"][...] = rows
    with TraceWriter(path, ATTRIBUTES, resumed_rows=flushed) as trace:
        trace.append("updates", (6, 6.0, 1, 0.1, 6, 0.5))
    assert load(path).altered == (("updates",) if changes else ())


# ---- killed at any moment ----


def train(folder: Path) -> None:
    """A minimal run: updates and checkpoints, resumed from the newest one."""
    if (resumed := checkpoint.newest(folder)) is None:
        layout.put_aside(folder)
    store = Checkpoints(folder, 2, resumed, shared=True)
    state, path = store.state(RUN), folder / layout.TRACE
    if state is None:
        trace, version = TraceWriter(path, ATTRIBUTES), 0
    else:
        trace, version = TraceWriter(path, ATTRIBUTES, resumed_rows=state["trace_rows"]), state["starts"]
    number, begun = checkpoint.number_of(resumed), run_state()
    while True:
        for _ in range(3):
            version += 1
            trace.append("updates", (version, float(version), 1, 0.1, version, 0.5))
        trace.flush()
        number += 1
        store.begin(number)
        store.write(number, "server-0", {"weights": torch.full((20_000,), float(version))})
        store.write(number, RUN, begun | {"starts": version, "trace_rows": trace.flushed()})
        store.commit(number)


def kill_often(folder: Path, check: Callable[[Path], None]) -> None:
    written(folder.with_name("first"), 1)  # so that no process loads the modules anew
    dice = random.Random(7)
    for attempt in range(5 * KILLS):
        lost = any(folder.glob("trace.lost-*.h5"))
        if attempt >= KILLS and lost and checkpoint.number_of(checkpoint.newest(folder)) >= 3:
            return
        pid = os.fork()
        if pid == 0:
            try:
                train(folder)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        time.sleep(dice.uniform(0.002, 0.09) * 2 ** (attempt // KILLS))  # longer where the machine is slow
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "it must not end by itself"
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        check(folder)


def kill_unfinished(folder: Path, n_written: int) -> None:
    """Kill a process that has committed checkpoint 1, and has written so many states of checkpoint 2."""
    pid = os.fork()
    if pid == 0:
        write, commit, number_written = Checkpoints.write, Checkpoints.commit, itertools.count()

        def write_or_die(store: Checkpoints, number: int, name: str, state: Mapping[str, Any]) -> None:
            if number == 2 and next(number_written) == n_written:
                os.kill(os.getpid(), signal.SIGKILL)
            write(store, number, name, state)

        def commit_or_die(store: Checkpoints, number: int) -> Path:
            if number == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return commit(store, number)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Checkpoints, "write", write_or_die)
            patch.setattr(Checkpoints, "commit", commit_or_die)
            try:
                train(folder)
            except BaseException:
                traceback.print_exc()
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL


def complete(folder: Path) -> None:
    """Assert that the newest checkpoint is complete, and that the trace has all rows up to it."""
    if (newest := checkpoint.newest(folder)) is None:
        return
    store = Checkpoints(folder, 2, newest, shared=True)
    run, server = store.state(RUN), store.state("server-0")
    assert (server["weights"] == run["starts"]).all()
    versions = load(folder / layout.TRACE).tables["updates"]["version"]
    assert np.array_equal(versions, np.arange(1, len(versions) + 1))
    assert len(versions) >= run["starts"] == run["trace_rows"]["updates"]


def test_killed_forty_times_a_run_has_lost_nothing_that_it_saved(tmp_path):
    kill_often(tmp_path, complete)
    assert checkpoint.number_of(checkpoint.newest(tmp_path)) >= 3, "it must have come somewhere in spite of it"
    lost = list(tmp_path.glob("trace.lost-*.h5"))
    assert lost
    for path in lost:
        load(path)


@pytest.mark.parametrize("n_written", [0, 1, 2])
def test_killed_before_it_is_complete_a_checkpoint_does_not_count(tmp_path, n_written):
    kill_unfinished(tmp_path, n_written)
    complete(tmp_path)
    assert checkpoint.number_of(checkpoint.newest(tmp_path)) == 1
    assert list(tmp_path.glob("checkpoints/2.unfinished"))


@pytest.mark.parametrize("n_written", [0, 1, 2])
def test_without_a_name_of_its_own_an_unfinished_one_is_found(tmp_path, monkeypatch, n_written):
    """Negative control: checkpoints written under their final name."""
    monkeypatch.setattr(Checkpoints, "_unfinished", lambda self, number: self._folder / str(number))
    kill_unfinished(tmp_path, n_written)
    with pytest.raises((AssertionError, JobError, OSError)):
        complete(tmp_path)
