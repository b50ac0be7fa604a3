"""Runs without servers that go on from a checkpoint, and what they would have come to without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hpcsync
from hpcsync.job import Job
from hpcsync.learning import generators
from hpcsync.learning.peer import LocalOptimizer, Outer
from hpcsync.mpi.parcels import Parcels
from hpcsync.mpi.reducer import Reducer
from hpcsync.peers import PeerCoordinator
from hpcsync.traces.reading import load
from tests.mpi.test_checkpoints import ADAM, NESTEROV, SGD, TOP_K, both, killed
from tests.mpi.training import failures, on_some

ALLREDUCE = {"name": "allreduce"}
DILOCO = {"name": "local-sgd", "steps": 3, "outer_lr": 0.7, "outer_momentum": 0.3}
PERMUTATION = {"name": "gossip", "mode": "permutation", "period": 2}
FREE: dict[str, dict[str, Any]] = {
    "pull": {"name": "gossip", "mode": "pull"},
    "push": {"name": "gossip", "mode": "push", "period": 2},
    "push-sum": {"name": "gossip", "mode": "push-sum", "topology": "exponential", "include_self": False},
}
SHARED = {"policy": "equal-finish", "predictor": "last", "interval": 10_000, "gain": 0.0}
POWER = {"name": "powersgd", "rank": 1}


def job(paradigm: dict[str, Any], workers: int, optimizer: Any = SGD, **tables: Any) -> Job:
    """About 30 iterations of every worker, a checkpoint after each 12."""
    each = 1 if paradigm["name"] in ("allreduce", "stanza") else workers
    table = {
        "name": "test",
        "seed": 3,
        "workload": {"name": "linear", "batch_size": 4, "features": 11, "samples": 200},
        "optimizer": optimizer,
        "stop": {"updates": 30 * each},
        "evaluation": {"every_samples": 50},
        "checkpoint": {"updates": 12 * each, "keep": 9},
        "paradigm": paradigm,
        "cluster": {"workers": workers, "compute": {"model": "lognormal", "seconds": 0.003}},
    }
    return Job.from_table(table | tables)


# ---- exactly as if nothing had been ----

EXACT: dict[str, tuple[dict[str, Any], Any, dict[str, Any]]] = {
    "allreduce": (ALLREDUCE, NESTEROV, {}),
    "allreduce-adam": (ALLREDUCE, ADAM, {}),
    "allreduce-top-k": (ALLREDUCE, SGD, {"compression": TOP_K}),
    "diloco": (DILOCO, NESTEROV, {}),
    "permutation": (PERMUTATION, NESTEROV, {}),
}


@pytest.mark.parametrize("which", EXACT)
def test_a_run_that_goes_on_comes_to_the_same_bits(comm, folder, which):
    paradigm, optimizer, tables = EXACT[which]
    this = job(paradigm, comm.size, optimizer, **tables)
    weights, resumed = both(comm, this, folder)
    if comm.rank == 0:
        assert (weights == resumed).all()
        assert not failures(folder / "a-killed" / "trace.h5")
