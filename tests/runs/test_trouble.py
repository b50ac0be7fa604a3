"""A few trials of `tests/trouble.py`: kills and signals at random moments of runs under any paradigm."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from hpcsync.system import launcher
from tests.runs.processes import GONE_S
from tests.trouble import Trial

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a /dev/shm of its own"),
]

SCRIPT = Path(__file__).parents[1] / "trouble.py"
# The trials of either seed hit each target and kill hpcsync once; both together come at eight steps.
TRIALS, OPEN_MPI, ANOTHER = 4, 57207, 4566
WITHOUT_GUARD = """
import contextlib
from hpcsync.system import process_cleanup
process_cleanup.guarded = lambda *_: contextlib.nullcontext()
"""


def trouble(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(line, env={**os.environ, **variables}, capture_output=True, text=True, timeout=550)


def test_whatever_is_killed_nothing_is_left_and_the_run_resumes() -> None:
    version = subprocess.run([*launcher.mpiexec(), "--version"], capture_output=True, text=True, check=True).stdout
    seed = OPEN_MPI if "Open MPI" in version else ANOTHER
    ended = trouble("--trials", TRIALS, "--seed", seed, "--gone", GONE_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count(": ok\n") == TRIALS


@pytest.mark.once
def test_without_a_guard_something_is_left(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_GUARD)
    killed = ("hpcsync", signal.SIGKILL, "training")
    seed = next(n for n in range(10**6) if (trial := Trial.drawn(Random(n)))[1:4] == killed and not trial.disk)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    ended = trouble("--trials", 1, "--seed", seed, "--no-resume", "--limit", 10, PYTHONPATH=path)
    assert ended.returncode == 1
    # The launcher may end by itself, its output closed, or live on.
    assert re.search(r"WRONG .*temporary: \['hpcsync-", ended.stdout), ended.stdout + ended.stderr
    shutil.rmtree(ended.stdout.rpartition("what is left: ")[2].strip())
