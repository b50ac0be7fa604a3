"""Signals left to rank 0, in separate processes: early ones, second ones, and those at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hpcsync.config.user_code import of_user
from hpcsync.system import signals
from tests.unit.jobs import make_job

HEAD = "import signal, time, os\nfrom hpcsync.system.signals import *\n"
LISTENING = {
    "on_signals": "heard = []\nwith on_signals(heard.append):\n    pass\n",
    "SignalListener": "listener, heard = SignalListener(), []\n"
    "while (number := listener.received()):\n    heard.append(number)\nlistener.close()\n",
}


def await_reception(pid: int) -> None:
    """Wait until a process has no signal pending and waits again, or has ended."""
    while True:
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        if status["State"][0] in "ZX" or (status["State"][0] == "S" and int(status["ShdPnd"], 16) == 0):
            return
        time.sleep(0.001)


def ended(code: str, *numbers: int) -> tuple[int, str]:
    """Return status and output of a process that receives these signals once it has started."""
    argv = [sys.executable, "-c", HEAD + code]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == "up\n"
    for number in numbers:
        process.send_signal(number)
        await_reception(process.pid)  # two of a kind at once are one
    out, _ = process.communicate("go on\n", timeout=200)
    return process.returncode, out.strip()


@pytest.mark.parametrize("listening", LISTENING)
def test_signals_before_the_listener_are_not_lost(listening: str) -> None:
    code = "left_to_rank_0()\nprint('up', flush=True)\ninput()\n" + LISTENING[listening]
    code += LISTENING[listening].replace("heard", "again") + "print(*sorted(map(int, heard)), len(again))\n"
    assert ended(code, signal.SIGTERM, signal.SIGUSR1) == (0, f"{signal.SIGUSR1:d} {signal.SIGTERM:d} 0")


def test_without_a_handler_a_signal_kills() -> None:
    """Control of the test above."""
    assert ended("print('up', flush=True)\ninput()\n", signal.SIGTERM) == (-signal.SIGTERM, "")


def test_a_second_sigterm_ends_a_rank_to_be_resumed() -> None:
    code = "left_to_rank_0()\nprint('up', flush=True)\ninput()\nprint('alive')\n"
    assert ended(code, signal.SIGTERM) == (0, "alive")
    assert ended(code, signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM) == (0, "alive")
    assert ended(code, signal.SIGTERM, signal.SIGTERM) == (75, "")


def test_sigterm_ends_a_rank_of_mpich_s_launcher_while_it_starts() -> None:
    """Not one of another launcher; and a session takes over with handlers that note signals."""
    mpich = "import hpcsync.system.signals as signals\nsignals.MPICH_PROXY = signals._parent()\n"
    wait = "print('up', flush=True)\ninput()\nprint('alive')\n"
    starting = "left_to_rank_0(starting=True)\n"
    assert ended(mpich + starting + wait, signal.SIGUSR1) == (0, "alive")
    assert ended(mpich + starting + wait, signal.SIGTERM) == (75, "")
    assert ended(starting + wait, signal.SIGTERM) == (0, "alive")
    assert ended(mpich + starting + "left_to_rank_0()\n" + wait, signal.SIGTERM) == (0, "alive")


@pytest.mark.skipif(sys.platform != "linux", reason="the name of the parent is known on Linux only")
def test_a_rank_may_be_started_by_a_program_whose_name_was_cut_within_a_character() -> None:
    """The kernel keeps 15 bytes of the name of a script that is started as a program."""
    cut = "experimente_grün.sh".encode()[:15]
    assert ended(f"open('/proc/self/comm', 'wb').write({cut!r})\n" + IN_CHILD) == (0, ascii(os.fsdecode(cut)))


IN_CHILD = """
print("up", flush=True)
input()  # what follows at once may be read together with "up", and would be lost
import hpcsync.system.signals as signals
if not (child := os.fork()):
    left_to_rank_0(starting=True)
    print(ascii(signals._parent()), flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""
ENDING = """
class Late:
    def __del__(self):  # once Python has given signals back
        print("up", flush=True)
        os.read(0, 1)
        print("to its end", flush=True)
late = Late()
"""


@pytest.mark.parametrize(
    ("first", "status"), [("left_to_rank_0()\n", 0), ("signal.signal(signal.SIGTERM, print)\n", -15)]
)
def test_a_process_that_is_ending_is_not_killed(first: str, status: int) -> None:
    """The control is a handler that Python removes at its end."""
    assert ended(first + ENDING, signal.SIGTERM)[0] == status


@pytest.mark.parametrize("name", ["a run", "two\nlines", 'quoted "x" \\n', os.fsdecode(b"\xff")])
def test_folders_of_any_name_are_listened_to(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(signals.LISTENING, str(tmp_path / "listening"))
    for folder in (tmp_path / name, tmp_path / "other"):
        signals.tell_listening(folder)
    found = signals.listeners(tmp_path / "listening")
    assert found == [(os.getpid(), tmp_path / name), (os.getpid(), tmp_path / "other")]


def test_a_listener_leaves_no_file_open() -> None:
    """A process may have one session after another."""
    before = len(os.listdir("/dev/fd"))
    for _ in range(3):
        signals.SignalListener().close()
    assert len(os.listdir("/dev/fd")) == before


EVALUATE = """
import signal
def evaluate():
    try:
        signal.raise_signal(signal.SIGTERM)
    except Exception:
        return "caught"
"""


def test_a_signal_is_no_error_of_the_user_s_code_that_it_meets() -> None:
    """As in the evaluation of the final weights, which is of a script or of a workload."""
    user: dict[str, Any] = {}
    exec(compile(EVALUATE, "users.py", "exec"), user)
    job = make_job(workload={"name": "users:make", "batch_size": 1})
    with signals.on_signals(signals.interrupt), pytest.raises(signals.Terminated) as raised:
        user["evaluate"]()
    assert of_user(job, raised.value) is raised.value
    error = KeyError("x")
    assert of_user(job, error.with_traceback(raised.tb)) is not error  # the control
