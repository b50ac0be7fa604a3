"""Buffers of models under MPI: the rows on server 0, and a run with and without servers."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from hpcsync.mpi.server.buffer_rows import BufferRows
from hpcsync.trace.reader import load
from tests.mpi.training import failures, on_some
from tests.normalised import SMALL, chosen, evaluated, in_step
from tests.unit.jobs import make_job

UPDATES = 5


def test_the_row_of_a_handled_push_stays(comm, needs):
    """It is still there when the next push has arrived, and others may be written meanwhile."""
    needs(2)
    rows = BufferRows(comm, comm.size - 1, 3)
    for iteration in (1, 2, 3, 4):
        if comm.rank > 0:
            rows.put(comm.rank - 1, iteration, torch.full((3,), 10 * comm.rank + iteration))
        comm.Barrier()
        if comm.rank == 0 and iteration > 1:
            for handled in (iteration - 1, iteration):
                found = rows.latest(range(comm.size - 1), [handled] * (comm.size - 1))
                assert [row.tolist() for row in found] == [[10 * rank + handled] * 3 for rank in range(1, comm.size)]
        comm.Barrier()
    rows.free()


@pytest.mark.parametrize("paradigm", ["bsp", "allreduce"])
def test_evaluations_and_the_final_model_have_the_mean_of_the_buffers(comm, folder, paradigm):
    servers = int(paradigm == "bsp")
    if comm.size <= servers:
        return
    workers = comm.size - servers
    this = make_job(
        seed=3,
        workload=SMALL,
        optimizer={"name": "sgd", "lr": 0.1, "momentum": 0.9},
        stop={"updates": UPDATES},
        evaluation={"every_samples": 4 * workers, "buffers": "mean"},
        paradigm={"name": paradigm},
        cluster={"servers": servers, "workers": workers},
    )
    on_some(comm, this, folder)
    if comm.rank > 0:
        return
    assert failures(folder / "trace.h5") == []
    found = {int(row["version"]): float(row["loss"]) for row in load(folder / "trace.h5").tables["evaluations"]}
    for version, (model, of_workers) in enumerate(in_step(this, UPDATES), 1):
        if version in found:
            expected, other = (
                evaluated(this, model, chosen(this, c, model, of_workers))[0] for c in ("mean", "worker")
            )
            assert found[version] == pytest.approx(expected, rel=1e-9)
            assert workers == 1 or found[version] != pytest.approx(other, rel=1e-6), "the test can tell"
    assert UPDATES in found
    saved = load_file(folder / "weights.safetensors")
    for name, value in chosen(this, "mean", model, of_workers).items():
        assert name not in saved or torch.allclose(saved[name], value, rtol=1e-9)
