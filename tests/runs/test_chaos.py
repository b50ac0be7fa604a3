"""Slowdowns, deaths and interruptions at random, under every paradigm with servers; and then every trace must audit."""

from __future__ import annotations

import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

from hpcsync.audit.trace_audit import audit
from hpcsync.system import launcher
from hpcsync.trace.reader import load
from tests.runs.processes import Program, started

pytestmark = pytest.mark.timeout(600)

N_RANKS = 3  # one server
UPDATES = 200
INTERRUPTIONS = 3  # then the ranks are left alone

# The same ranks train under one paradigm after the other, each run in a folder of its own, from wherever it was; what
# has finished they leave as it is. Once one of them has died the others end with that run.
SCRIPT = """
import sys
from pathlib import Path
import torch
import hpcsync
from mpi4py import MPI

PARADIGMS = {
    "bsp": {},
    "asp": {},
    "ssp": {"staleness": 2},
    "dssp": {"staleness_min": 1, "staleness_max": 5},
    "k-sync": {"k": 2, "cancel": "abort"},
    "k-batch-sync": {"k": "loss"},
    "k-async": {"k": "state"},
    "k-batch-async": {"k": "min"},
    "easgd": {"period": 2},
    "ashl": {"warmup": 1, "profiled": 4, "steps_coarse": 3, "steps_fine": 2, "loss_preset": 0.5},
    "ashl after the gate": {"commit": "after-gate", "staleness": 0, "warmup": 1, "profiled": 4, "loss_preset": 0.5},
    "adsp": {"check_period_s": 0.1, "interval_min_s": 0.01, "commits": 4},
}
on_death, n_updates = sys.argv[1], int(sys.argv[2])
generator = torch.Generator().manual_seed(1)
x = torch.randn(400, 20, generator=generator)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
compute = {"model": "lognormal", "seconds": [0.004, 0.007], "jitter": 0.4}
for paradigm, options in PARADIGMS.items():
    out = Path(paradigm)
    if MPI.COMM_WORLD.bcast((out / "summary.json").exists()):
        continue
    model = torch.nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with hpcsync.connect(
        model, optimizer, paradigm.split()[0], **options, out=out, resume=True, checkpoint={"seconds": 0.2},
        stop={"updates": n_updates}, compute=compute, on_death=on_death,
    ) as sync:
        for inputs, targets in sync.shard(data, batch_size=4, epochs=None):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            sync.step(loss)
    if on_death == "continue" and MPI.COMM_WORLD.Get_failed().size:
        break
"""
N_PARADIGMS = 12
START = """
import sys
from hpcsync.system.launcher import launch
tolerant = sys.argv[2] == "continue"
sys.exit(launch({n}, ["python", "-m", "mpi4py", *sys.argv[1:]], suspends=True, tolerant=tolerant).status)
"""


# ---- what happens to the ranks ----


def stand_still(program: Program, dice: random.Random) -> None:
    rank = program.rank(dice.randrange(1, N_RANKS))
    rank.send_signal(signal.SIGSTOP)
    time.sleep(dice.uniform(0.05, 0.4))
    rank.send_signal(signal.SIGCONT)


def lose_a_worker(program: Program, dice: random.Random) -> None:
    program.rank(dice.randrange(1, N_RANKS)).send_signal(signal.SIGKILL)


def save(program: Program, dice: random.Random) -> None:
    program.process.send_signal(signal.SIGUSR1)


def be_told_to_end(program: Program, dice: random.Random) -> None:
    program.process.send_signal(signal.SIGTERM)


def lose_server_0(program: Program, dice: random.Random) -> None:
    program.rank(0).send_signal(signal.SIGKILL)


def be_killed(program: Program, dice: random.Random) -> None:
    program.kill()


Trouble = Callable[[Program, random.Random], None]
TROUBLES: list[Trouble] = [stand_still, save, lose_a_worker]
ENDS: list[Trouble] = [be_told_to_end, lose_server_0, be_killed]


def troubled(program: Program, dice: random.Random, folder: Path) -> None:
    """Until they end."""
    for trouble in [*dice.sample(TROUBLES, 2), dice.choice(ENDS)]:
        time.sleep(dice.uniform(0.0, 0.6))
        with suppress(psutil.NoSuchProcess, AssertionError):  # the rank that was to suffer has died, or all have ended
            if trouble in ENDS:
                program.wait_for(lambda _: bool(to_be_resumed(folder)))
            trouble(program, dice)


def saved(folder: Path) -> set[Path]:
    """The finished checkpoints."""
    return {path for path in folder.glob("*/checkpoints/*") if path.name.isdigit()}


def finished(folder: Path) -> set[Path]:
    return {path.parent for path in folder.glob("*/summary.json")}


def to_be_resumed(folder: Path) -> set[Path]:
    """The runs that the next launch goes on with: at most one."""
    return {path.parents[1] for path in saved(folder)} - finished(folder)


def on_death() -> str:
    """What this MPI's ranks can do when others have died."""
    try:
        launcher.command(1, ["true"], tolerant=True)
    except launcher.LaunchError:
        return "end"
    return "continue"


@pytest.mark.once
def test_whatever_happens_all_runs_end_and_their_traces_audit(tmp_path: Path) -> None:
    dice = random.Random(9)
    (tmp_path / "train.py").write_text(SCRIPT)
    argv = [sys.executable, "-c", START.format(n=N_RANKS), "train.py", on_death(), str(UPDATES)]
    interrupted = 0
    launches = []  # what each has left, to be shown
    while len(finished(tmp_path)) < N_PARADIGMS:
        is_troubled, before = interrupted < INTERRUPTIONS, saved(tmp_path) | finished(tmp_path)
        with started(argv, tmp_path) as program:
            if is_troubled:
                program.wait_for(lambda _, before=before: bool((saved(tmp_path) | finished(tmp_path)) - before))
                troubled(program, dice, tmp_path)
        launches.append((program.status, sorted(p.name for p in finished(tmp_path)), sorted(map(str, saved(tmp_path)))))
        if is_troubled:
            interrupted += len(to_be_resumed(tmp_path))
        else:
            assert program.status == 0, f"{program.out}\n{program.err}"
    traces = [load(path) for path in tmp_path.glob("*/trace.h5")]
    assert len(traces) == N_PARADIGMS
    for trace in traces:
        assert trace.finished, trace.path
        assert not [found for found in audit(trace) if not found.passed], trace.path
        assert np.array_equal(trace.tables["updates"]["version"], np.arange(1, UPDATES + 1)), trace.path
    assert interrupted
    starts = {trace.path.parent.name: len(trace.tables["starts"]) for trace in traces}
    assert sum(starts.values()) == N_PARADIGMS + interrupted, (starts, launches)
