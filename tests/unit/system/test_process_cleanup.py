"""What a killed process leaves is removed: by its guard, and only if nobody uses it."""

import mmap
import os
import signal
import subprocess
import sys
import time
import uuid

import pytest

from hpcsync.system import process_cleanup
from hpcsync.system.process_cleanup import MEMORY, remove_segments

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are found on Linux only")

HOLDER = """
import os, sys, time
from hpcsync.system.process_cleanup import Will, guarded
segment, folder, file, *locks = sys.argv[1:]
kept = [os.open(path, os.O_RDONLY) for path in locks]
with guarded("/test-" + folder, Will(["touch", file], [*locks, folder], kept)):
    for path in locks[1:]:  # another run's lock takes its place
        os.rename(path + ".new", path)
    open(segment, "w").close()
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("guards", [True, False])
def test_the_guard_of_a_killed_process_carries_out_its_will(tmp_path, guards):
    segment, folder, file = MEMORY / f"mpich_shm_{uuid.uuid4().hex}", tmp_path / "folder", tmp_path / "file"
    (folder / "below").mkdir(parents=True)
    argv = [sys.executable, "-c", HOLDER, str(segment), str(folder), str(file)]
    try:
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "ready\n"
            if not guards:
                (guard,) = map(int, open(f"/proc/{process.pid}/task/{process.pid}/children").read().split())
                os.kill(guard, signal.SIGKILL)
            process.kill()
        deadline_s = time.monotonic() + (100.0 if guards else process_cleanup.GRACE_S + 1.0)
        while folder.exists() and time.monotonic() < deadline_s:
            time.sleep(0.02)
        assert (file.exists(), not folder.exists()) == (guards, guards)
        assert not (guards and segment.exists())  # without a guard that of another launch may remove it
    finally:
        segment.unlink(missing_ok=True)


def test_the_guard_removes_no_file_that_has_taken_the_place_of_a_kept_one(tmp_path):
    own, anothers = tmp_path / "own", tmp_path / "anothers"
    for path in (own, anothers, tmp_path / "anothers.new"):
        path.write_text(path.name)
    (folder := tmp_path / "folder").mkdir()
    arguments = ("unused", folder, tmp_path / "file", own, anothers)
    argv = [sys.executable, "-c", HOLDER.replace("open(segment", "open(file"), *map(str, arguments)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.kill()
    deadline_s = time.monotonic() + 100.0
    while folder.exists() and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert (folder.exists(), own.exists(), anothers.read_text()) == (False, False, "anothers.new")


SEMAPHORE = """
import multiprocessing, sys
semaphore = multiprocessing.get_context(sys.argv[1]).Semaphore()
print(semaphore._semlock.name.removeprefix("/"), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("start", ["spawn", "forkserver"])
def test_semaphores_of_a_living_process_are_kept(start):
    """They are mapped under the name of a temporary file."""
    since_ns = time.time_ns()
    # In a process of its own: joblib, which scikit-learn loads, gives the semaphores of its process other names.
    argv = [sys.executable, "-c", SEMAPHORE, start]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        path = MEMORY / f"sem.{process.stdout.readline().strip()}"
        assert process_cleanup.SEGMENT.match(path.name)
        remove_segments(since_ns)
        assert path.exists()
        process.stdin.close()


def test_only_segments_that_nobody_uses_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(process_cleanup, "MEMORY", tmp_path)
    before, host = tmp_path / "mpich_shm_before", os.uname().nodename
    before.write_bytes(b"x")
    time.sleep(0.02)
    since_ns = time.time_ns()
    time.sleep(0.02)
    names = ("mpich_shm_1", f"sm_segment.{host}.0.1.0", f"osc_sm.{host}.10730001.0.8", "sem.mp-abc")
    left = [tmp_path / name for name in names]
    kept = [tmp_path / name for name in ("mpich_shm_open", "mpich_shm_mapped", "users", "sm_segment.other.0.1.0")]
    for path in (*left, *kept):
        path.write_bytes(b"x")
    with kept[0].open() as _, kept[1].open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 1)
        file.close()
        remove_segments(since_ns)
        assert {*tmp_path.iterdir()} == {before, *kept}
        mapped.close()
    remove_segments(since_ns)
    assert {*tmp_path.iterdir()} == {before, *kept[2:]}


def test_other_processes_may_map_files_of_any_name(tmp_path, monkeypatch):
    monkeypatch.setattr(process_cleanup, "MEMORY", tmp_path)
    used, left, since_ns = tmp_path / "mpich_shm_used", tmp_path / "mpich_shm_left", time.time_ns()
    names = [os.fsencode(tmp_path / name) for name in ("\udce9", "\x85", "a\u2028b", "a\nb", "mpich_shm_used")]
    for name in (*names, left):
        with open(name, "wb") as file:
            file.write(b"x")
    mapped = []
    for name in names:
        with open(name, "r+b") as file:
            mapped.append(mmap.mmap(file.fileno(), 1))
    process_cleanup.unlink_attached()  # with these names in the map of this process
    remove_segments(since_ns)
    assert used.exists() and not left.exists()
    for each in mapped:
        each.close()


def test_only_empty_sessions_since_the_launch_are_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    top = tmp_path / f"ompi.{os.uname().nodename}.{os.getuid()}"
    (top / "jf.0" / "1" / "0").mkdir(parents=True)
    time.sleep(0.02)
    since_ns = time.time_ns()
    time.sleep(0.02)
    for name in ("2/0", "2/1", "3/0"):
        (top / "jf.0" / name).mkdir(parents=True)
    (top / "jf.0" / "3" / "0" / "used").touch()
    process_cleanup.remove_sessions(since_ns)
    assert {path.name for path in top.glob("jf.0/*")} == {"1", "3"}
    (top / "jf.0" / "3" / "0" / "used").unlink()
    process_cleanup.remove_sessions(0)
    assert list(tmp_path.iterdir()) == []


def test_topologies_of_dead_proxies_since_the_launch_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(process_cleanup, "TOPOLOGIES", tmp_path)
    monkeypatch.setattr(process_cleanup, "PROCESSES", tmp_path / "proc")
    old, new, other = (tmp_path / f"hydra_hwloc_xmlfile_{name}" for name in ("old", "new", "newer"))
    old.touch()
    time.sleep(0.02)
    since_ns = time.time_ns()
    time.sleep(0.02)
    new.touch()
    proxy = tmp_path / "proc" / "12"
    proxy.mkdir(parents=True)
    (proxy / "cmdline").write_bytes(b"/usr/bin/hydra_pmi_proxy\0--rmk\0user\0")
    process_cleanup.remove_topologies(since_ns)
    assert new.exists()  # it may be that proxy's
    (proxy / "cmdline").write_bytes(b"")  # it has ended and has not been waited for
    process_cleanup.remove_topologies(since_ns)
    assert old.exists() and not new.exists()
    other.touch()
    monkeypatch.setattr(process_cleanup.os, "getuid", lambda: -1)
    process_cleanup.remove_topologies(since_ns)
    assert other.exists()
