"""Whole runs under MPI, one of each paradigm: tests/unit/mpi shows all else of runs, on ranks that are threads.

The bits of a synchronous run are those of its simulation; the weights of an asynchronous one those of its trace.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from hpcsync.cli.rank_main import train
from hpcsync.config.job import Job
from hpcsync.mpi.transport.node_topology import arranged
from hpcsync.simulator.simulate import simulate
from hpcsync.trace.reader import load
from hpcsync.trace.schema import Change
from tests.mpi.training import failures, on_some, recomputed, resume_run
from tests.plain import committed
from tests.unit.mpi.test_checkpoints import killed
from tests.unit.mpi.test_training import PARADIGMS

IN_STEP: dict[str, dict[str, Any]] = {
    "bsp": {"name": "bsp"},
    "bsp, compressed": {"name": "bsp"},
    "easgd": {"name": "easgd", "period": 2, "synchronous": True},
    "allreduce": {"name": "allreduce"},
    "local-sgd": {"name": "local-sgd", "steps": 3, "outer_lr": 0.7, "outer_momentum": 0.3},
    "permutation": {"name": "gossip", "mode": "permutation"},
    "stanza": {"name": "stanza", "cut": "classifier", "fc_workers": 1, "fc_share": 0.3, "micro_batches": 2},
}
ASHL = {"warmup": 1, "profiled": 4, "steps_coarse": 3, "steps_fine": 2, "loss_preset": 1.5}
ADSP = {"check_period_s": 0.03, "interval_min_s": 0.005, "commits": 3}
FREE: dict[str, dict[str, Any]] = {
    **{name: {"name": name, **options} for name, options in PARADIGMS.items() if name not in ("bsp", "easgd")},
    "easgd": {"name": "easgd", "period": 2},
    "ashl": {"name": "ashl", **ASHL},
    "adsp": {"name": "adsp", **ADSP},
    "async-diloco": {"name": "async-diloco", "steps": 6, "grace_s": 0.004},
    "pull": {"name": "gossip", "mode": "pull"},
    "push": {"name": "gossip", "mode": "push", "period": 2},
    "push-sum": {"name": "gossip", "mode": "push-sum", "topology": "exponential"},
    "ad-psgd": {"name": "ad-psgd"},
}
SERVED = {*PARADIGMS, "bsp, compressed", "ashl", "adsp", "async-diloco"}
WITHOUT_MOMENTUM = {"ashl", "adsp", "async-diloco", "stanza"}


def job(n_ranks: int, which: str, paradigm: dict[str, Any], **tables: Any) -> Job | None:
    """The job on so many ranks, with two servers where that leaves workers that differ; None on too few ranks."""
    servers = (2 if n_ranks > 3 else 1) if which in SERVED else 0
    if n_ranks < 1 + max(servers, which == "stanza"):
        return None
    workers = n_ranks - servers
    linear = {"name": "linear", "batch_size": 8, "features": 11, "samples": 200}
    network = {"name": "tests.mpi.network:convolutional", "batch_size": 4}
    table = {
        "name": "test",
        "seed": 3,
        "workload": network if which == "stanza" else linear,
        "optimizer": {"name": "sgd", "lr": 0.02, **({} if which in WITHOUT_MOMENTUM else {"momentum": 0.5})},
        "stop": {"updates": 24},
        "evaluation": {"every_samples": 80},
        "checkpoint": {"updates": 9, "keep": 9},
        "paradigm": paradigm,
        "cluster": {
            "servers": servers,
            "workers": workers,
            "colocated": which == "bsp, compressed" and servers > 1,
            "compute": {"model": "lognormal", "seconds": [0.001 * (1 + (w == 1)) for w in range(workers)]},
        },
        **({"compression": {"name": "top-k", "ratio": 0.3}} if which == "bsp, compressed" else {}),
    }
    return Job.from_table(table | tables)


def test_synchronous_runs_have_the_bits_of_their_simulations(comm, folder):
    """Another seed is the control, on three ranks. Resumed from a checkpoint, a run has the same bits again."""
    for which, paradigm in IN_STEP.items():
        if (this := job(comm.size, which, paradigm)) is None:
            continue
        at = folder / which
        train(arranged(comm, this.cluster), this, at)
        resumed = killed(comm, at) if which in ("bsp", "allreduce") else at
        if resumed != at:
            resume_run(comm, this, resumed)
        if comm.rank == 0:
            assert same_weights(at, resumed), which
            assert failures(resumed / "trace.h5") == [], which
            for seed in (3, 4) if comm.size == 3 else (3,):
                again = folder / f"{which}-{seed}"
                assert simulate(this.model_copy(update={"seed": seed}), again, Console(quiet=True)) == 0
                assert same_weights(at, again) == (seed == 3), which


def same_weights(one: Path, other: Path) -> bool:
    a, b = (load_file(folder / "weights.safetensors") for folder in (one, other))
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("which", FREE)
def test_asynchronous_runs_keep_their_bounds(comm, folder, which):
    if (this := job(comm.size, which, FREE[which])) is None:
        pytest.skip("needs 2 ranks")
    weights = on_some(comm, this, folder)
    if comm.rank == 0:
        trace = load(folder / "trace.h5")
        assert trace.status == "finished"
        assert failures(folder / "trace.h5") == []
        if which in ("ashl", "adsp", "async-diloco"):
            np.testing.assert_allclose(weights, committed(this, trace), rtol=1e-9, atol=1e-12)
        elif which in SERVED - {"easgd"}:
            np.testing.assert_allclose(weights, recomputed(this, trace), rtol=0, atol=1e-11)


def test_workers_that_leave_and_join(comm, needs, folder):
    needs(3)
    last = comm.size - 2
    for unit_s in (0.1, 0.4, 1.6):  # on a busy machine little happens in a while
        n_iterations = round(6000 * unit_s)  # an active worker is left when worker 0 joins
        events = [
            {"worker": 0, "change": "leave", "at_s": 0.2 * unit_s},
            {"worker": 0, "change": "join", "at_s": unit_s},
            {"worker": last, "change": "leave", "at_iteration": n_iterations},
        ]
        compute = {"model": "constant", "seconds": 0.002}
        cluster = {"servers": 1, "workers": last + 1, "compute": compute, "events": events}
        at, stop = folder / str(unit_s), {"seconds": 20 * unit_s}
        on_some(comm, job(comm.size, "asp", {"name": "asp"}, cluster=cluster, stop=stop), at)
        if comm.rank == 0:
            assert failures(at / "trace.h5") == []
        changes = load(at / "trace.h5").tables["membership"]
        of_worker_0 = changes["change"][changes["worker"] == 0].tolist()
        if Change.JOINED in of_worker_0:
            break
    assert of_worker_0 == [Change.LEFT, Change.JOINED, Change.LEFT]
