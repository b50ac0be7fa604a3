"""Processes of data loaders beside MPI: they know nothing of it, load each sample once, and end with their rank."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from hpcsync.audit.trace_audit import audit
from hpcsync.system import launcher
from hpcsync.trace.reader import load
from tests.runs.processes import ended, hpcsync, mpiexec

SCRIPT = """{first}
import json, os, sys, time
import torch, hpcsync
from torch.utils.data import DataLoader, Dataset, get_worker_info

class Data(Dataset):
    def __len__(self):
        return 50

    def __getitem__(self, index):
        time.sleep(0.004)
        of_launcher = [name for name in os.environ if name.startswith(("PMI_RANK", "PMIX_RANK"))]
        return {{"x": torch.full((3,), float(index)), "at": (index, os.getpid(), torch.get_num_threads(), of_launcher)}}

def collate(samples):
    return {{"inputs": [torch.stack([each["x"] for each in samples])], "at": [each["at"] for each in samples]}}

def begin(number):
    assert get_worker_info().id == number

def main():
    model = torch.nn.Linear(3, 1)
    loader = DataLoader(Data(), 4, shuffle=True, num_workers=2, collate_fn=collate, worker_init_fn=begin{more})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    seen = []
    with hpcsync.connect(model, optimizer, "{paradigm}", out="out") as sync:
        for epoch in range(2):
            for batch in sync.shard(loader):
                seen += [[epoch, *at] for at in batch["at"]]
                optimizer.zero_grad()
                loss = model(batch["inputs"][0]).mean()
                loss.backward()
                sync.step(loss)
                {then}
    with open(f"seen-{{sync.rank}}", "w") as file:
        json.dump([os.getpid(), seen], file)

{call}
"""
GUARDED = 'if __name__ == "__main__":\n    main()'
MORE = ', multiprocessing_context="fork", persistent_workers=True'  # new interpreters take seconds
NOTICE = "shard: 2 of 50 samples are left out in each training epoch, because whole batches of 4 are used"


def write(folder: Path, *, first: str = "", call: str = "main()", more: str = "", paradigm="bsp", then="pass") -> Path:
    script = folder / "script.py"
    script.write_text(SCRIPT.format(first=first, call=call, more=more, paradigm=paradigm, then=then))
    return script


def check(folder: Path, workers: range) -> None:
    seen = []
    for rank in workers:
        pid, mine = json.loads((folder / f"seen-{rank}").read_text())
        assert all(at[2] != pid and at[3] == 1 for at in mine), "loaded elsewhere, in one thread"
        seen += [tuple(at[:2]) for at in mine]
    assert len(set(seen)) == len(seen) == 2 * 48
    trace = load(folder / "out" / "trace.h5")
    assert (trace.status, trace.tables["updates"]["samples"][-1]) == ("finished", 2 * 48)
    rows = trace.tables["pushes" if trace.job.has_servers else "exchanges"]
    rows = rows[rows["batch_size"] > 0]
    assert (rows["batch_size"] == 4).all() and rows["load_s"].sum() > len(rows) * np.median(rows["compute_s"])
    assert [found for found in audit(trace) if not found.passed] == []


@pytest.mark.parametrize("paradigm", ["bsp", pytest.param("allreduce", marks=pytest.mark.once)])
def test_a_script_without_a_guard_loads_with_processes(tmp_path: Path, paradigm: str) -> None:
    n = 3 if paradigm == "bsp" else 2
    program = ended(mpiexec(n, write(tmp_path, paradigm=paradigm)), cwd=tmp_path, environ=launcher.environment())
    assert (program.status, program.complaints) == (0, []), program.err
    assert program.out.count(NOTICE) == 1 and program.out.count("shard: ") == 1
    check(tmp_path, workers := range(n - 2, n))
    for rank in workers:
        _, mine = json.loads((tmp_path / f"seen-{rank}").read_text())
        assert all(at[4] == [] for at in mine), "nothing of the launcher is known there"


@pytest.mark.once
@pytest.mark.parametrize("asked", ["fork", "forkserver"])
def test_a_script_that_has_imported_mpi_loads_with_new_interpreters(tmp_path: Path, asked: str) -> None:
    """They import MPI as well, and must not take themselves for ranks."""
    more = MORE.replace('"fork"', f'"{asked}"')
    script = write(tmp_path, first="from mpi4py import MPI", call=GUARDED, more=more)
    program = ended(mpiexec(2, script), cwd=tmp_path, environ=launcher.environment())
    assert (program.status, program.complaints) == (0, []), program.err
    assert program.out.count(f'multiprocessing_context = "{asked}": "spawn" is used') == 1
    check(tmp_path, range(1, 2))


@pytest.mark.once
def test_new_interpreters_must_not_run_the_script(tmp_path: Path) -> None:
    script = write(tmp_path, first="from mpi4py import MPI")
    program = ended(mpiexec(2, script), cwd=tmp_path, environ=launcher.environment())
    assert program.status != 0
    assert "num_workers = 2 starts processes that import the script, because MPI was imported before" in program.err


@pytest.mark.once
def test_processes_end_with_a_rank_that_is_killed(tmp_path: Path) -> None:
    kill = "if len(seen) == 16 and sync.worker == 0: os.kill(os.getpid(), 9)"
    script = write(tmp_path, then=kill, paradigm="allreduce")  # the other worker is ended by the launcher
    program = ended(mpiexec(2, script), cwd=tmp_path, environ=launcher.environment())  # leaves no process behind
    assert program.status != 0


@pytest.mark.once
def test_a_launch_leaves_no_temporary_files_of_a_rank_that_is_killed(tmp_path: Path) -> None:
    script = write(tmp_path, then="if len(seen) == 16 and sync.worker == 0: os.kill(os.getpid(), 9)")
    (folder := tmp_path / "temporary").mkdir()
    line = hpcsync("launch", "-n", "2", "--", "python", script)
    program = ended(line, cwd=tmp_path, environ={**os.environ, "TMPDIR": str(folder)})
    assert program.status != 0
    assert [*folder.iterdir()] == []
