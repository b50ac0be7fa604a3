"""Runs whose servers have fewer buffers than readers and fewer slots than workers: the same bits, bounds and states."""

from __future__ import annotations

import pytest
import torch

from hpcsync.core.roles import Roles
from hpcsync.mpi.server import channel
from hpcsync.mpi.server.channel import ServerChannel, n_rows
from hpcsync.mpi.server.slot_pool import SlotPool
from tests.mpi.training import on_some
from tests.unit.mpi.test_checkpoints import (  # noqa: F401
    test_a_resumed_run_has_the_same_bits,
    test_a_run_resumes_with_fewer_workers_and_one_returns,
)
from tests.unit.mpi.test_commits import test_the_weights_are_those_of_the_commits_in_the_trace  # noqa: F401
from tests.unit.mpi.test_compression import (  # noqa: F401
    test_a_compressed_run_is_its_simulation_to_the_bit_however_many_servers_there_are,
)
from tests.unit.mpi.test_delay_compensation import (  # noqa: F401
    test_the_weights_are_those_of_the_formula_with_and_without_an_interruption,
)
from tests.unit.mpi.test_elastic import test_a_grant_waits_until_its_workers_slot_is_free  # noqa: F401
from tests.unit.mpi.test_training import (
    job,
    test_every_paradigm_keeps_its_bounds,  # noqa: F401
    test_workers_may_finish_early,  # noqa: F401
)

MODEL_BYTES = 4 * 100_000_000


@pytest.fixture(autouse=True)
def few_rows(request, monkeypatch):
    monkeypatch.setattr(channel, "OWN_ROWS_BYTES", 0)
    n_ranks = request.getfixturevalue("n_ranks") if "n_ranks" in request.fixturenames else 1
    monkeypatch.setattr(channel, "SHARED_ROWS", 2 if n_ranks > 5 else 1)


def bsp(comm, folder, rows: int):
    """Return the final weights of a run in which every worker waits for all others."""
    comm.Barrier()
    if comm.rank == 0:
        channel.SHARED_ROWS = rows
    comm.Barrier()
    servers = 1 + (comm.size > 3)
    return on_some(comm, job("bsp", servers, comm.size - servers), folder / str(rows))


def test_few_rows_change_no_bit(comm, needs, folder):
    needs(3)
    few, many = bsp(comm, folder, channel.SHARED_ROWS), bsp(comm, folder, comm.size + 1)
    if comm.rank == 0:
        assert (few == many).all()


class OverwritesWaitingContributions(SlotPool):
    def lend(self, worker: int, slot: int) -> int | None:
        if (overwritten := super().lend(worker, slot)) is not None:
            self._slots[overwritten] = slot  # it is thought to be there still
        return None


@pytest.mark.once
def test_a_contribution_that_is_not_moved_before_its_slot_is_lent_changes_the_bits(comm, only, folder, monkeypatch):
    only(5)
    many = bsp(comm, folder, comm.size + 1)
    monkeypatch.setattr("hpcsync.mpi.server.shard.SlotPool", OverwritesWaitingContributions)
    few = bsp(comm, folder, 1)
    if comm.rank == 0:
        assert (few != many).any()


# ---- memory ----


def test_a_large_model_has_at_most_eight_copies(monkeypatch):
    monkeypatch.undo()
    assert n_rows(33, MODEL_BYTES) + n_rows(32, MODEL_BYTES) == 8
    assert n_rows(34, MODEL_BYTES) == 4
    assert n_rows(4, MODEL_BYTES) + n_rows(3, MODEL_BYTES) == 7, "few workers have all rows"
    assert n_rows(33, 1000) + n_rows(32, 1000) == 65, "a small model has all rows"
    assert n_rows(33, 0) == 33


@pytest.mark.parametrize("contributors_read", [False, True])
def test_a_server_allocates_the_rows_that_are_planned(comm, needs, monkeypatch, contributors_read):
    needs(2)
    monkeypatch.setattr(channel, "SHARED_ROWS", 4)
    size, n_workers = 1000, comm.size - 1
    link = ServerChannel(comm, Roles(1, n_workers), size, torch.float32, contributors_read=contributors_read)
    rows = min(n_workers + 1 + contributors_read, 4) + min(n_workers, 4)
    assert (link.n_buffers + link.n_slots, link.lends) == (rows, n_workers > 4)
    assert len(link.tensors.local) == (rows * 1024 if comm.rank == 0 else 0)
    link.free()
