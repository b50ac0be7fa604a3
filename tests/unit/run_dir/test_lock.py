"""The lock of a run's folder: one of several wins, a killed owner releases it, and what is left behind is removed."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

from hpcsync.config.errors import JobError
from hpcsync.run_dir import lock
from hpcsync.run_dir.lock import Owner, Verdict, judge, start_of, take, this_process
from tests.unit.jobs import refusal

TRIALS = 25
HOLDER = """
import sys, time
from pathlib import Path
from hpcsync.run_dir import lock
from hpcsync.config.errors import JobError
{more}
print("ready", flush=True)
for line in sys.stdin:
    try:
        held = lock.take(Path(line.strip()) / lock.NAME, lock.this_process())
        print("won", flush=True)
    except JobError as error:
        print("refused", error, flush=True)
"""
WITHOUT_LOCKS = "lock._busy = lambda handle: None"
WITHOUT_LINKS = "import os\ndef link(*_): raise PermissionError\nos.link = link"
NO_LOCK = "lock._created = lambda path, mine: 0\nlock.Lock = lambda *_: None"


def holder(more: str = "") -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", HOLDER.format(more=more)]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def told(process: subprocess.Popen[str], folder: Path) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{folder}\n")
    process.stdin.flush()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def wins(folder: Path, more: str = "") -> list[int]:
    """How many of three processes get the lock of each of many folders at once."""
    processes = [holder(more) for _ in range(3)]
    found = []
    try:
        for trial in range(TRIALS):
            here = folder / str(trial)
            here.mkdir()
            if trial % 2 and not more:
                (here / lock.NAME).write_text(json.dumps(asdict(left_behind())))
            for process in processes:
                told(process, here)
            found.append(sum(said(process) == "won\n" for process in processes))
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return found


def left_behind() -> Owner:
    """An owner on this host that has ended."""
    return replace(this_process(), token="old", pid=2**22 + 1, started="1")


@pytest.mark.parametrize("more", ["", WITHOUT_LOCKS, WITHOUT_LINKS], ids=["here", "no flock", "no links"])
def test_exactly_one_of_several_wins(tmp_path, more):
    assert wins(tmp_path, more) == [1] * TRIALS


def test_control_without_the_lock_several_win(tmp_path):
    assert max(wins(tmp_path, NO_LOCK)) > 1


def test_a_killed_owner_releases_it_and_a_living_one_is_named(tmp_path):
    process = holder()
    try:
        told(process, tmp_path)
        assert said(process) == "won\n"
        host = os.uname().nodename
        assert refusal(take, tmp_path / lock.NAME, this_process()) == (
            f"out {tmp_path}: must be a folder that no other process uses: process {process.pid} on {host} "
            "holds run.lock"
        )
        process.send_signal(signal.SIGKILL)
        process.wait()
        take(tmp_path / lock.NAME, this_process()).release()
    finally:
        process.kill()
        process.communicate()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("has_links", [True, False])
def test_whoever_may_write_the_other_files_can_remove_one_that_was_left_behind(tmp_path, monkeypatch, has_links):
    def refuse(*_):
        raise PermissionError

    if not has_links:
        monkeypatch.setattr(os, "link", refuse)
    before = os.umask(0o002)  # as in a folder of a group
    try:
        held = take(tmp_path / lock.NAME, this_process())
    finally:
        os.umask(before)
    assert stat.S_IMODE(held.path.stat().st_mode) == 0o664
    held.release()


def test_whoever_inherits_the_file_holds_it(tmp_path, monkeypatch, capsys):
    """As the guard of a killed process does, until the ranks have ended."""
    held = take(tmp_path / lock.NAME, left_behind())
    guard = subprocess.Popen(["sleep", "600"], pass_fds=[held.handle])
    os.close(held.handle)
    held._released.set()
    monkeypatch.setattr(lock, "CLEARING_S", 1.0)
    try:
        with pytest.raises(JobError):
            take(tmp_path / lock.NAME, this_process())
        assert capsys.readouterr().err == (
            f"hpcsync: {tmp_path / lock.NAME}: waiting for the ranks of {left_behind()} to end\n"
        )
        monkeypatch.setattr(lock, "CLEARING_S", 30.0)
    finally:
        guard.kill()
    take(tmp_path / lock.NAME, this_process()).release()
    guard.wait()


def beating():
    return {thread for thread in threading.enumerate() if thread.name == "lock"}


def silence(held, others):
    """Let a lock give no sign any more."""
    held._released.set()
    for thread in beating() - others:
        thread.join()


def test_a_lock_of_another_host_is_watched(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lock, "BEAT_S", 0.1)
    monkeypatch.setattr(lock, "PATIENCE_S", 60.0)
    monkeypatch.setattr(lock, "_busy", lambda handle: None)
    path, others = tmp_path / lock.NAME, beating()
    elsewhere = take(path, replace(this_process(), kernel="other", host="n7", job="12"))
    with pytest.raises(JobError, match=r"process \d+ on n7 \(job 12\) holds run.lock"):
        take(path, this_process())
    silence(elsewhere, others)
    monkeypatch.setattr(lock, "PATIENCE_S", 0.4)
    mine = take(path, this_process())
    assert json.loads(path.read_text())["token"] == mine.owner.token
    elsewhere.release()
    mine.release()
    assert not path.exists()
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(" s to see whether process")[0].split()[-1] for line in said] == ["60", "0.4"]
    vanishing = take(path, elsewhere.owner)
    silence(vanishing, others)
    monkeypatch.setattr(lock, "PATIENCE_S", 60.0)
    threading.Timer(0.1, path.unlink).start()
    mine = take(path, this_process())
    os.close(vanishing.handle)
    with pytest.raises(JobError, match=f"process {os.getpid()} on "):
        take(path, this_process())  # which need not watch itself
    mine.release()


@pytest.mark.parametrize("text", ["", "[]", '{"token": "old"}'])
def test_a_lock_that_names_no_owner_is_watched_unless_it_is_locked(tmp_path, monkeypatch, capsys, text):
    monkeypatch.setattr(lock, "BEAT_S", 0.1)
    monkeypatch.setattr(lock, "PATIENCE_S", 0.2)
    path = tmp_path / lock.NAME
    path.write_text(text)
    with path.open() as file:
        assert lock._busy(file.fileno()) is False
        with pytest.raises(JobError, match="another process holds run.lock$"):
            take(path, this_process())
    take(path, this_process()).release()
    assert capsys.readouterr().err == f"hpcsync: {path}: waiting 0.2 s to see whether a process still runs\n"
    assert not path.exists()


def test_a_lock_that_another_process_has_taken_meanwhile_is_not_removed(tmp_path, monkeypatch):
    path = tmp_path / lock.NAME
    path.write_text(json.dumps(asdict(left_behind())))
    mine, taken = this_process(), []

    def start_of_owner(pid: int) -> str:
        if not taken:
            path.unlink()
            taken.append(take(path, mine))
        return start_of(pid)

    monkeypatch.setattr(lock, "start_of", start_of_owner)
    with pytest.raises(JobError, match=f"process {os.getpid()} on .* holds run.lock"):
        take(path, mine)
    taken[0].release()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_is_released_meanwhile_is_taken_at_once(tmp_path, monkeypatch, capsys):
    path = tmp_path / lock.NAME
    held, opened = take(path, this_process()), os.open

    def open_and_release(name, flags, *mode):
        handle = opened(name, flags, *mode)
        if name == path and flags == os.O_RDWR:
            held.release()
        return handle

    monkeypatch.setattr(os, "open", open_and_release)
    take(path, this_process()).release()
    assert capsys.readouterr().err == ""
    assert list(tmp_path.iterdir()) == []


def test_a_lock_on_a_file_system_without_links_names_its_owner(tmp_path, monkeypatch):
    def link(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", link)
    held = take(tmp_path / lock.NAME, this_process())
    with pytest.raises(JobError, match=f"process {os.getpid()} on .* holds run.lock"):
        take(tmp_path / lock.NAME, this_process())
    held.release()
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_ends_removes_its_locks(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    holds = "from pathlib import Path; from hpcsync.run_dir import lock; [*map(lock.hold, map(Path, {}))]"
    subprocess.run([sys.executable, "-c", holds.format([*map(str, folders)])], check=True)
    assert [[*folder.iterdir()] for folder in folders] == [[], []]


def test_a_process_is_told_from_another_of_its_id_by_its_start():
    started_s = psutil.boot_time() + int(start_of(os.getpid())) / os.sysconf("SC_CLK_TCK")
    assert started_s == pytest.approx(psutil.Process().create_time(), abs=2.0)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's name of a process is read on Linux only")
def test_the_start_of_a_process_whose_name_was_cut_within_a_character():
    """The kernel keeps 15 bytes of the name of a script that is started as a program."""
    name, start = Path("/proc/self/comm"), start_of(os.getpid())
    before = name.read_bytes()
    try:
        name.write_bytes("experimente_grün.py".encode()[:15])
        assert name.read_bytes() == b"experimente_gr\xc3\n"
        assert start_of(os.getpid()) == start != ""
    finally:
        name.write_bytes(before)


def test_the_owner_is_judged_by_what_is_known():
    mine = Owner("a", "n1", "k", "p", 1, "5", "77", "1")
    other = replace(mine, token="b", job="", restarts="0")
    assert judge(other, mine, "", locked=True) is Verdict.ALIVE
    assert judge(other, mine, "5", locked=False) is Verdict.DEAD, "flock is exact on one kernel"
    assert judge(other, mine, "5", locked=None) is Verdict.ALIVE
    assert judge(other, mine, "6", locked=None) is Verdict.UNKNOWN, "another process has its id"
    assert judge(other, mine, "", locked=None) is Verdict.UNKNOWN, "its ranks may live, and its guard"
    assert judge(replace(other, processes="q"), mine, "", locked=None) is Verdict.UNKNOWN, "another container"
    for locked in (None, False):
        assert judge(replace(other, kernel="l"), mine, "5", locked=locked) is Verdict.UNKNOWN, "another host"
        assert judge(None, mine, "", locked=locked) is Verdict.UNKNOWN, "it is being written"
        requeued = replace(other, kernel="l", job="77")
        assert judge(requeued, mine, "", locked=locked) is Verdict.DEAD, "this job before it was requeued"
        assert judge(replace(requeued, restarts="1"), mine, "", locked=locked) is Verdict.UNKNOWN, "another step of it"


def test_a_process_holds_a_folder_once_and_a_rank_lets_its_parent_hold_it(tmp_path, monkeypatch):
    with lock.releasing():
        held = lock.hold(tmp_path)
        assert lock.hold(tmp_path) is held is not None
        monkeypatch.setattr(lock, "_held", {})
        monkeypatch.setattr(lock, "_of_launcher", held.owner.token)
        assert lock.hold(tmp_path) is None
        monkeypatch.setattr(lock, "_of_launcher", "another")
        with pytest.raises(JobError):
            lock.hold(tmp_path)
    held.release()
    with lock.releasing():
        assert lock.hold(tmp_path) is not None
    assert list(tmp_path.iterdir()) == []
