"""How often a rank waits for its GPU: once a push, once a pull, once an update, and for the loss."""

from __future__ import annotations

import sys
import warnings
from collections import Counter

import pytest
import torch

from hpcsync.config.job import Job
from hpcsync.mpi.transport import cuda
from hpcsync.mpi.transport.tensor_window import Transport
from hpcsync.trace.reader import load
from hpcsync.training import flat_model
from tests.gpu.device import DEVICE
from tests.mpi.training import on_some, route

PREPARATIONS = 60  # of a run: the model, its first and last weights, the evaluation


@pytest.mark.parametrize("at_once", [False, True])
def test_a_push_a_pull_and_an_update_wait_once(comm, needs, folder, trials, at_once, monkeypatch):
    """The control: norms that are read when they are begun are further waits."""
    needs(2)
    if trials["ipc"].took_s is None:
        pytest.skip(trials["ipc"].failure)
    route(monkeypatch, Transport("ipc", DEVICE))
    waits, ready, implicit = Counter(), cuda.ready, []

    def counted(tensor):
        waits[sys._getframe(1).f_code.co_name] += 1
        ready(tensor)

    monkeypatch.setattr(cuda, "ready", counted)
    if at_once:
        monkeypatch.setattr(
            flat_model.SquaredNorm, "__init__", lambda self, vector: setattr(self, "_square", vector.dot(vector).cpu())
        )
    table = {
        "name": "waits",
        "workload": {"name": "digits", "batch_size": 32},
        "optimizer": {"name": "sgd", "lr": 0.02, "momentum": 0.9},
        "stop": {"updates": 300},
        "evaluation": {"every_samples": 0},
        "paradigm": {"name": "asp"},
        "cluster": {"servers": 1, "workers": comm.size - 1, "device": "cuda"},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", lambda *warning, **_: implicit.append(str(warning[0])))
        torch.cuda.set_sync_debug_mode("warn")
        try:
            on_some(comm, Job.from_table(table), folder)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    pushes = load(folder / "trace.h5").tables["pushes"]["worker"] if comm.rank == 0 else None
    pushes = comm.bcast(pushes)
    if comm.rank == 0:
        n, explicit, read = len(pushes), waits["release"], 0
    else:
        n = int((pushes == comm.rank - 1).sum())
        explicit, read = waits["flush"] - n, n  # one of the two is a push's; the loss is read
    assert 0.9 * n <= explicit <= n + 5, waits
    implicit_ones = sum("synchroniz" in text for text in implicit)
    assert read <= implicit_ones, "the count sees waits"
    assert (implicit_ones > read + n / 2 + PREPARATIONS) == at_once, implicit_ones
