"""status.json: replaced as a whole, read at any time, settled; and the command that shows it."""

import errno
import io
import json
import math
import os
import sys
import threading
import time

import pytest

from hpcsync.cli import watch as watching
from hpcsync.config.errors import JobError
from hpcsync.run_dir import layout, status_file
from hpcsync.run_dir.status_file import STATUS, StatusError, StatusWriter, final_status, read, settle
from hpcsync.system import atomic_files
from tests.unit.jobs import make_job
from tests.unit.report.test_live import status as a_status


class Run:
    version, samples, last_loss, last_accuracy, done = 0, 0, 0.5, float("nan"), (3, 4)
    iters = (4, 4)  # worker 0 was away
    active = frozenset({0, 1})


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


def writer(folder, run=None, clock=None, cpu_clock=lambda: 0.0):
    clock, job = clock or Clock(), make_job(stop={"target_accuracy": 0.9, "target_loss": 0.1})
    return StatusWriter(folder, job, run or Run(), ["a", "b"], lambda: [3, 1], clock, cpu_clock), clock


def await_samples(folder, samples):
    deadline_s = time.monotonic() + 100
    while time.monotonic() < deadline_s:
        try:
            if (found := read(folder)).samples == samples:
                return found
        except StatusError:
            pass
        time.sleep(0.001)
    raise AssertionError("it is not written")


def test_it_is_written_every_second_and_at_the_end(tmp_path):
    run = Run()
    status, clock = writer(tmp_path, run)
    status.offer(0.0)
    workers = await_samples(tmp_path, 0).workers
    assert (workers.state, workers.iteration, workers.lead) == (("computing", "waiting"), (3, 4), (0, 0))
    run.samples = 8
    status.offer(0.5)  # too early
    clock.now_s = 1.1
    run.samples = 16
    status.offer(1.1)
    found = await_samples(tmp_path, 16)
    assert (found.status, found.now_s, found.accuracy, found.samples_per_s) == ("running", 1.1, None, 16 / 1.1)
    assert (found.every_s, found.lead_bound) == (1.0, 0.0)
    status.close("finished")
    status.close("failed")  # once is enough
    assert (read(tmp_path).now_s, read(tmp_path).workers.state) == (1.1, ("unknown", "unknown"))
    assert (read(tmp_path).status, read(tmp_path).target) == ("finished", "accuracy 0.9 or loss 0.1")
    assert [path.name for path in tmp_path.iterdir()] == [STATUS]


def test_what_takes_long_is_written_less_often(tmp_path):
    run = Run()
    status, clock = writer(tmp_path, run, cpu_clock=lambda: 0.004)  # after the first
    status.offer(0.0)
    await_samples(tmp_path, 0)
    clock.now_s, run.samples = 1.1, 8
    status.offer(1.1)
    assert await_samples(tmp_path, 8).every_s == pytest.approx(5.0)
    clock.now_s, run.samples = 3.0, 16
    status.offer(3.0)  # would be 0.002 of a core
    clock.now_s, run.samples = 6.2, 24
    status.offer(6.2)
    assert await_samples(tmp_path, 24).every_s == pytest.approx(2.5)  # 0.004 s for two
    status.close("finished")


def test_what_takes_very_long_is_written_every_ten_seconds(tmp_path):
    status, _ = writer(tmp_path, cpu_clock=lambda: 60.0)
    status.offer(0.0)
    await_samples(tmp_path, 0)
    status.close("finished")
    assert read(tmp_path).every_s == 10.0


def test_a_file_that_is_replaced_while_it_is_read_is_read_again(tmp_path, monkeypatch):
    with pytest.raises(StatusError, match=r"status\.json: no such file: the run has not begun, or wrote none$"):
        read(tmp_path)
    status, _ = writer(tmp_path)
    status.close("finished")
    content, answers = (tmp_path / STATUS).read_bytes(), []

    def answer(_):
        if isinstance(found := answers.pop(0), int):
            raise OSError(found, os.strerror(found))
        return found

    monkeypatch.setattr(status_file.Path, "read_bytes", answer)
    answers[:] = [errno.ESTALE, content]
    assert read(tmp_path).status == "finished"
    answers[:] = [errno.EIO, content]
    with pytest.raises(StatusError, match=r"status\.json: Input/output error$"):
        read(tmp_path)


def test_a_file_that_cannot_be_replaced_leaves_no_other(tmp_path):
    (tmp_path / STATUS).mkdir()
    with pytest.raises(OSError):
        atomic_files.replace(tmp_path / STATUS, "{}")
    assert [path.name for path in tmp_path.iterdir()] == [STATUS]


class InPlace(StatusWriter):
    """Negative control: the file is written in place, in two parts."""

    def _replace(self, text):
        with self._path.open("w") as file:
            file.write(text[:100])
            file.flush()
            time.sleep(0.002)
            file.write(text[100:])


@pytest.mark.parametrize("kind", [StatusWriter, InPlace])
def test_a_reader_never_sees_a_part(tmp_path, kind):
    run, clock = Run(), Clock()
    status = kind(tmp_path, make_job(), run, ["a", "b"], lambda: [3, 1], clock, lambda: 0.0)
    status.offer(0.0)
    await_samples(tmp_path, 0)
    failures, ended = [], threading.Event()

    def look():
        while not ended.is_set():
            try:
                read(tmp_path)
            except StatusError as error:
                failures.append(error)

    reader = threading.Thread(target=look)
    reader.start()
    for run.samples in range(1, 60 if kind is StatusWriter else 60_000):
        clock.now_s += 2.0
        status.offer(clock.now_s)
        time.sleep(0.003)
        if failures:
            break
    status.close("finished")
    ended.set()
    reader.join()
    assert bool(failures) == (kind is InPlace)


def test_what_cannot_be_written_is_tried_again(tmp_path, capsys):
    folder = tmp_path / "run"
    status, clock = writer(folder)
    status.offer(0.0)
    time.sleep(0.02)
    folder.mkdir()
    clock.now_s = 5.0
    status.offer(5.0)
    assert await_samples(folder, 0).status == "running"
    folder.rename(tmp_path / "elsewhere")
    status.close("finished")
    assert capsys.readouterr() == ("", "")


def test_who_was_killed_is_settled(tmp_path):
    settle(tmp_path, "failed")  # nothing to settle
    assert final_status(tmp_path) is None
    status, _ = writer(tmp_path)
    status.offer(0.0)
    await_samples(tmp_path, 0)
    assert final_status(tmp_path) is None
    settle(tmp_path, "failed")
    assert read(tmp_path).status == "failed"
    assert final_status(tmp_path) == "failed"
    settle(tmp_path, "interrupted")
    assert read(tmp_path).status == "failed", "the first is kept"
    status.close("failed")


def test_a_restart_leaves_no_moment_without_a_status_and_a_resume_none_with_the_end_before(tmp_path):
    status, _ = writer(tmp_path)
    status.offer(0.0)
    await_samples(tmp_path, 0)  # and now all ranks are killed
    restarted, _ = writer(tmp_path)
    assert read(tmp_path).status == "running"
    restarted.close("failed")
    resumed, _ = writer(tmp_path)
    assert not (tmp_path / STATUS).exists()
    resumed.close("finished")
    status.close("failed")


def written(folder, status="finished"):
    folder.mkdir(parents=True)
    made, _ = writer(folder)
    made.close(status)


def test_the_command_shows_the_newest_run(tmp_path, capsys):
    written(tmp_path / "old", "failed")
    time.sleep(0.02)
    written(tmp_path / "new")
    assert watching.watch(tmp_path, once=False, as_json=True) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["workers"]["host"] == ["a", "b"]
    assert watching.watch(tmp_path / "old", once=True, as_json=False) == 1
    time.sleep(0.02)
    written(tmp_path / "digits-compare" / "bsp" / "seed-1", "failed")  # a run of `hpcsync compare`
    assert [watching.watch(folder, once=True, as_json=False) for folder in (tmp_path, tmp_path / "digits-compare")] == [
        1,
        1,
    ]
    assert "failed" in capsys.readouterr().out


@pytest.mark.parametrize("has_summary", [True, False])
def test_a_run_that_was_killed_between_its_summary_and_its_last_status_has_finished(tmp_path, has_summary):
    written(tmp_path / "run", "running")
    if has_summary:
        (tmp_path / "run" / layout.SUMMARY).touch()
    assert read(tmp_path / "run").status == "running", "its last status may just be written"
    if has_summary:
        os.utime(tmp_path / "run" / layout.SUMMARY, (0, time.time() - 100))
    assert read(tmp_path / "run").status == ("finished" if has_summary else "running")
    if has_summary:
        os.utime(tmp_path / "run" / layout.SUMMARY)
    settle(tmp_path / "run", "failed")
    assert read(tmp_path / "run").status == ("finished" if has_summary else "failed")


def test_what_vanishes_while_the_newest_run_is_looked_for_is_passed_over(tmp_path, capsys, monkeypatch):
    """Checkpoints are renamed and deleted all the time."""
    written(tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "2.unfinished").mkdir(parents=True)
    scan, find = os.scandir, watching.below

    def scan_others(path):
        if str(path).endswith(".unfinished"):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", scan_others)
    monkeypatch.setattr(watching, "below", lambda *where: [*find(*where), tmp_path / "gone" / STATUS])
    assert watching.watch(tmp_path, once=True, as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "finished"


def test_the_view_of_a_run_that_resumes_on_a_host_whose_clock_is_behind(tmp_path, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(watching, "LOOK_S", 0.01)
    atomic_files.replace(tmp_path / STATUS, a_status(name="before", written_s=time.time() + 3600).model_dump_json())
    deadline_s = time.monotonic() + 100
    with watching.viewed(tmp_path):
        time.sleep(0.1)
        atomic_files.replace(tmp_path / STATUS, a_status(name="resumed", written_s=time.time()).model_dump_json())
        while "resumed" not in terminal.getvalue() and time.monotonic() < deadline_s:
            time.sleep(0.01)
    assert "resumed" in terminal.getvalue() and "before" not in terminal.getvalue()


def printed(capsys):
    """Return what is printed next, up to the end of a line."""
    out, deadline_s = "", time.monotonic() + 100
    while not out.endswith("\n") and time.monotonic() < deadline_s:
        time.sleep(0.001)
        out += capsys.readouterr().out
    return out


def test_it_shows_each_status_until_the_end(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(watching, "LOOK_S", 0.01)
    monkeypatch.setattr(watching, "OLD_S", math.inf)
    run = Run()
    status, clock = writer(tmp_path, run)
    status.offer(0.0)
    await_samples(tmp_path, 0)
    shown = threading.Thread(target=watching.watch, args=(tmp_path,), kwargs={"once": False, "as_json": True})
    shown.start()
    out = printed(capsys)
    clock.now_s, run.samples = 2.0, 8
    status.offer(2.0)
    out += printed(capsys)
    status.close("interrupted")
    shown.join(100)
    found = [json.loads(line) for line in (out + capsys.readouterr().out).splitlines()]
    assert [(each["samples"], each["status"]) for each in found] == [
        (0, "running"), (8, "running"), (8, "interrupted")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "contains no run with a status"),
        ("", "status.json: not a status: Invalid JSON"),
        ('{"version": 1}', "status.json: not a status: name: Field required"),
    ],
)
def test_what_cannot_be_shown_is_one_line(tmp_path, content, said):
    if content is not None:
        (tmp_path / STATUS).write_text(content)
    with pytest.raises(JobError, match=said) as caught:
        watching.watch(tmp_path, once=True, as_json=False)
    assert "\n" not in str(caught.value)
    with pytest.raises(JobError, match="no such folder"):
        watching.watch(tmp_path / "none", once=True, as_json=False)
    (tmp_path / "trace.h5").touch()
    with pytest.raises(JobError, match=r"trace.h5: must be the folder of a run"):
        watching.watch(tmp_path / "trace.h5", once=True, as_json=False)
