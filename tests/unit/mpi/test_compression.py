"""Compressed pushes: the final weights, and the bytes of the trace."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hpcsync.config.job import Job
from hpcsync.core.job_validation import check
from hpcsync.training.compressor import Compression
from tests.mpi.training import failures, on_some, simulated
from tests.unit.jobs import make_job

CODECS = {
    "top-k": {"name": "top-k", "ratio": 0.1},
    "random-k": {"name": "random-k", "ratio": 0.1},
    "dgc": {"name": "dgc", "ratio": 0.1, "warmup": 4},
    "qsgd": {"name": "qsgd", "levels": 7, "bucket": 64},
    "one-bit": {"name": "one-bit"},
    "sign": {"name": "sign"},
    "powersgd": {"name": "powersgd", "rank": 2},
    "fp16": {"name": "fp16"},
    "bf16": {"name": "bf16"},
}
SIZE = 12 * 20 + 20 + 20 * 3 + 3


def job(workers: int, servers: int, compression: Any, dtype: str = "float64", updates: int = 8, **paradigm: Any) -> Job:
    return make_job(
        seed=3,
        workload={"name": "tests.mpi.network:regression", "batch_size": 4, "options": {"dtype": dtype}},
        optimizer={"name": "sgd", "lr": 0.05},
        stop={"updates": updates},
        evaluation={"every_samples": 0},
        paradigm=paradigm or {"name": "bsp"},
        cluster={
            "servers": servers,
            "workers": workers,
            "compute": {"model": "constant", "seconds": 0.0 if not paradigm else 0.001},
        },
        **({} if compression is None else {"compression": compression}),
    )


@pytest.mark.parametrize("name", CODECS)
def test_a_compressed_run_is_its_simulation_to_the_bit_however_many_servers_there_are(comm, needs, folder, name):
    """The servers' shards may end within tensors, groups of bits and factors."""
    needs(2)
    servers = min(3, comm.size - 1)
    workers = comm.size - servers
    several = on_some(comm, job(workers, servers, CODECS[name]), folder / "several")
    one = on_some(comm, job(workers, 1, CODECS[name]), folder / "one")
    if comm.rank == 0:
        assert failures(folder / "several" / "trace.h5") == []
        assert np.array_equal(several, one)
        assert np.array_equal(one, simulated(job(workers, 1, CODECS[name])))
        assert np.isfinite(one).all()
        assert not np.allclose(one, simulated(job(workers, 1, None)), rtol=0, atol=1e-9), "something is compressed"


def test_sending_all_elements_equals_no_compression(comm, needs, folder):
    needs(2)
    workers = comm.size - 1
    whole = on_some(comm, job(workers, 1, {"name": "top-k", "ratio": 1.0}), folder / "whole")
    if comm.rank == 0:
        assert np.array_equal(whole, simulated(job(workers, 1, None)))


def test_unsent_elements_are_sent_later_only_with_feedback(comm, needs, folder):
    """Training then follows uncompressed training. Without feedback, the control, most of the gradient is lost."""
    needs(2)
    workers, away = comm.size - 1, {}
    for feedback in (True, False):
        this = job(workers, 1, {"name": "top-k", "ratio": 0.01, "error_feedback": feedback}, updates=40)
        away[feedback] = on_some(comm, this, folder / str(feedback))
    if comm.rank == 0:
        dense = simulated(job(workers, 1, None, updates=40))
        start = torch.cat([p.detach().flatten() for p in check(job(workers, 1, None)).model.parameters()]).numpy()
        missing = {key: np.linalg.norm(found - dense) / np.linalg.norm(dense - start) for key, found in away.items()}
        assert missing[True] < 0.5 < 0.65 < missing[False]


def test_a_server_that_decodes_another_shard_is_noticed(comm, needs, folder, monkeypatch):
    needs(2)
    decode = Compression.decode

    def shifted(self: Any, payload: torch.Tensor, into: torch.Tensor, shard: slice) -> None:
        decode(self, payload, into, shard)
        into.copy_(into.roll(1))

    monkeypatch.setattr(Compression, "decode", shifted)
    wrong = on_some(comm, job(comm.size - 1, 1, CODECS["fp16"]), folder)
    monkeypatch.undo()
    if comm.rank == 0:
        assert not np.allclose(wrong, simulated(job(comm.size - 1, 1, CODECS["fp16"])), rtol=0, atol=1e-6)


@pytest.mark.parametrize("paradigm", ["ssp", "dssp", "k-sync", "k-async", "allreduce"])
def test_other_paradigms_with_compressed_pushes(comm, needs, folder, paradigm):
    needs(2)
    options: dict[str, Any] = {
        "ssp": {"staleness": 1},
        "dssp": {"staleness_min": 1, "staleness_max": 3},
        "k-sync": {"k": 1, "cancel": "abort"},
        "k-async": {"k": 1},
        "allreduce": {},
    }[paradigm]
    servers = int(paradigm != "allreduce")
    this = job(comm.size - servers, servers, CODECS["one-bit"], updates=20, name=paradigm, **options)
    weights = on_some(comm, this, folder)
    if comm.rank == 0:
        assert failures(folder / "trace.h5") == []
        assert np.isfinite(weights).all()
