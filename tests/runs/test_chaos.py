"""Slowdowns, deaths and interruptions at random, under every paradigm with servers; and then every trace must audit."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

from hpcsync import checkpoints, launcher
from hpcsync.traces.audit import audit
from hpcsync.traces.reading import load
from tests.runs.processes import Program, ended, hpcsync, started

pytestmark = pytest.mark.timeout(200)

JOB = """
name = "chaos"
seed = 5
workload = {{name = "linear", batch_size = 4, features = 40, samples = 400}}
optimizer = {{name = "sgd", lr = 0.01}}
stop = {{updates = 1_000_000}}
evaluation = {{every_samples = 400}}
checkpoint = {{seconds = 0.3}}
paradigm = {{{paradigm}}}
[cluster]
servers = 2
workers = 3
on_death = "{on_death}"
compute = {{model = "lognormal", seconds = [0.003, 0.004, 0.006], jitter = 0.4}}
"""
PARADIGMS = {
    "bsp": 'name = "bsp"',
    "asp": 'name = "asp"',
    "ssp": 'name = "ssp", staleness = 2',
    "dssp": 'name = "dssp", staleness_min = 1, staleness_max = 5',
    "k-sync": 'name = "k-sync", k = 2, cancel = "abort"',
    "k-batch-sync": 'name = "k-batch-sync", k = "loss"',
    "k-async": 'name = "k-async", k = "state"',
    "k-batch-async": 'name = "k-batch-async", k = "min"',
    "easgd": 'name = "easgd", period = 2',
    "ashl": 'name = "ashl", warmup = 1, profiled = 4, steps_coarse = 3, steps_fine = 2, loss_preset = 0.5',
    "adsp": 'name = "adsp", check_period_s = 0.1, interval_min_s = 0.01, commits = 4',
}
WITH_EVERY_MPI = ("dssp",)
TWICE = ("bsp", "dssp")  # interrupted; the others once. Then a run is left alone, until it has made so many
MORE_UPDATES = 40

# ---- what happens to a run ----


def stands_still(program: Program, dice: random.Random) -> None:
    rank = program.rank(dice.randrange(2, 5))
    rank.send_signal(signal.SIGSTOP)
    time.sleep(dice.uniform(0.05, 0.4))
    rank.send_signal(signal.SIGCONT)


def loses_a_worker(program: Program, dice: random.Random) -> None:
    program.rank(dice.randrange(2, 5)).send_signal(signal.SIGKILL)
    time.sleep(dice.uniform(0.5, 1.5))


def saves(program: Program, dice: random.Random) -> None:
    program.process.send_signal(signal.SIGUSR1)


def is_told_to_end(program: Program) -> None:
    program.process.send_signal(signal.SIGTERM)


def loses_server_0(program: Program) -> None:
    program.rank(0).send_signal(signal.SIGKILL)


def is_killed(program: Program) -> None:
    program.kill()


Trouble = Callable[[Program, random.Random], None]
ENDS = [is_told_to_end, loses_server_0, is_killed]


def interrupted(job: Path, out: Path, troubles: list[Trouble], dice: random.Random) -> None:
    """From one checkpoint beyond the next, until something ends it."""
    before = checkpoints.newest(out)
    with started(hpcsync("run", job, "--out", out, "--resume")) as program:
        program.wait_for(lambda _: checkpoints.newest(out) != before)
        for trouble in dice.sample(troubles, 2):
            time.sleep(dice.uniform(0.0, 0.3))
            with suppress(psutil.NoSuchProcess, AssertionError):  # the rank that was to suffer is dead
                trouble(program, dice)
        dice.choice(ENDS)(program)
    assert program.status != 0, "somebody has ended it"


def tolerates() -> bool:
    """Whether this MPI's ranks can go on when others have died."""
    try:
        return bool(launcher.command(1, ["true"], tolerant=True))
    except launcher.LaunchError:
        return False


@pytest.mark.parametrize(
    "paradigm",
    [name if name in WITH_EVERY_MPI else pytest.param(name, marks=pytest.mark.once) for name in PARADIGMS],
)
def test_whatever_happens_the_run_ends_and_its_trace_audits(tmp_path: Path, paradigm: str) -> None:
    dice = random.Random(paradigm)
    on_death = "continue" if tolerates() else "end"
    job, out = tmp_path / "chaos.toml", tmp_path / "out"
    job.write_text(JOB.format(paradigm=PARADIGMS[paradigm], on_death=on_death))
    troubles = [stands_still, saves, *([loses_a_worker] if tolerates() else [])]
    n_interruptions = 2 if paradigm in TWICE else 1
    for _ in range(n_interruptions):
        interrupted(job, out, troubles, dice)
    newest = checkpoints.newest(out)
    assert newest is not None
    updates = checkpoints.read_run(newest)["coordinator"]["version"] + MORE_UPDATES
    last = ended(hpcsync("run", job, "--out", out, "--resume", "--set", f"stop.updates={updates}"))
    assert last.status == 0, f"{last.out}\n{last.err}"
    trace = load(out / "trace.h5")
    assert not [found for found in audit(trace) if not found.passed]
    assert trace.finished
    assert np.array_equal(trace.tables["updates"]["version"], np.arange(1, updates + 1))
    assert trace.tables["starts"]["start"].tolist() == list(range(n_interruptions + 1))
