"""Readers never see half of an update, however fast the server makes updates.

Rank 0 updates without pause, rank 1's gradient makes every weight equal to the version, and all other ranks read. Every
element that a reader has read must be the same number: the version that it was promised.
"""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch

from hpcsync.core.roles import Roles
from hpcsync.mpi.server import channel
from hpcsync.mpi.server.channel import Reader, ServerChannel
from hpcsync.mpi.server.shard import Shard, to
from hpcsync.mpi.transport import messages
from hpcsync.mpi.transport.in_memory import MemoryCommunicator
from hpcsync.mpi.transport.messages import CommandRecord
from hpcsync.mpi.transport.node_topology import on_one_node
from hpcsync.mpi.transport.tensor_window import HOST
from hpcsync.mpi.transport.window import Window
from hpcsync.paradigms.records import Grant, PushInfo
from hpcsync.training.optimizers import OptimizerSpec
from hpcsync.training.parameter_store import Store
from hpcsync.training.update_rules import Descent

SIZE = 1 << 18
SIZE_OF_THREADS = 1 << 12  # any of their copies may let other ranks run in its middle
SIZE_SLOW = 1 << 16  # of a transport that takes the target's help for every part of a vector
LIMIT_S = 200.0  # of looking for a torn read: with five threads on busy cores it takes long
READS = 40


def serve(link: ServerChannel, shard: Shard) -> None:
    """Update as fast as possible; PUSHED is a request to read, and LEFT ends a reader's requests."""
    inbox = link.inbox(messages.TAG_INFO, messages.PUSH_INFO)
    readers = link.roles.n_workers - 1
    if shard.pool is not None:
        shard.pool.lend(0, 0)
    while readers or shard.is_hiding:
        shard.carry_out(CommandRecord(messages.CommandKind.UPDATE, to(0), lr=1.0))
        shard.poll()
        while (record := inbox.poll()) is not None:
            kind, worker = record[:2]
            if kind == messages.InfoKind.LEFT:
                readers -= 1
            else:
                grant = Grant(worker, 1, shard.store.version)
                shard.carry_out(CommandRecord(messages.CommandKind.PROMISE, grant))


def read(link: ServerChannel, found: Window, *, until_torn: bool) -> int:
    """How many of the reads were not uniformly the version promised; all readers make at least `READS` of them.

    They tell each other of torn reads in rank 0's part of the window `found`.
    """
    worker = link.roles.worker(link.comm.rank)
    reads = -(-READS // (link.roles.n_workers - 1))
    reader, reports = Reader(link, worker), link.infos
    nothing = PushInfo(math.nan, worker)[2:]
    into = link.tensors.local.new_zeros(link.size)
    torn, deadline_s = 0, time.monotonic() + LIMIT_S
    reader.wait()
    reader.read([into])
    while reads > 0 or (until_torn and not found.fetch_add(torn, 0, 0) + torn and time.monotonic() < deadline_s):
        reports.send(0, (messages.InfoKind.PUSHED, worker, *nothing))
        grant = reader.wait()
        reader.read([into])
        torn += not (into == grant.version).all()
        reads -= 1
    reports.send(0, (messages.InfoKind.LEFT, worker, *nothing))
    return torn


def torn_reads(comm, transport, *, until_torn: bool) -> int:
    size = SIZE if transport.passive and on_one_node(comm) else SIZE_SLOW
    if isinstance(comm, MemoryCommunicator):
        size = SIZE_OF_THREADS
    start = torch.zeros(size, dtype=torch.float64, device=transport.device)
    link = ServerChannel(comm, Roles(1, comm.size - 1), size, torch.float64, transport)
    if comm.rank == 1:
        gradient = start - 1.0
        link.tensors.put(gradient, 0, link.slot(0, 0))
        link.tensors.flush(0)
    comm.Barrier()
    torn, found = 0, Window(comm, 1, np.int64)
    found.local[:] = 0
    comm.Barrier()
    if comm.rank == 0:
        first = [Grant(worker, 1) for worker in range(link.roles.n_workers)]
        serve(link, Shard(link, Descent(OptimizerSpec("sgd", 1.0).on_server), start, first))
    elif comm.rank == 1:
        Reader(link, 0).wait()  # what is sent must be received, or a later communicator may find it
    else:
        torn = read(link, found, until_torn=until_torn)
    found.free()
    link.free()
    return comm.allreduce(torn)


def test_no_read_is_torn(comm, needs, transport):
    needs(3)
    assert torn_reads(comm, transport, until_torn=False) == 0


@pytest.fixture
def two_buffers(monkeypatch):
    """Buffers of which readers of two versions have both; they share them also with the current version."""
    monkeypatch.setattr(channel, "OWN_ROWS_BYTES", 0)
    monkeypatch.setattr(channel, "SHARED_ROWS", 2)


def test_no_read_is_torn_with_fewer_buffers_than_readers(comm, needs, transport, two_buffers):
    needs(3)
    assert torn_reads(comm, transport, until_torn=False) == 0


def test_a_version_copied_over_one_that_is_read_tears_it(comm, needs, two_buffers, monkeypatch):
    needs(5)  # so that there are readers of both buffers

    def first(self: Store) -> int | None:
        found = free(self)
        return 0 if found is None else found

    free = Store._free_shared
    monkeypatch.setattr(Store, "_free_shared", first)
    assert torn_reads(comm, HOST, until_torn=True) > 0


def test_without_the_protection_reads_are_torn(comm, needs, transport, monkeypatch):
    needs(3)
    monkeypatch.setattr(Store, "_make_writable", lambda self: None)
    assert torn_reads(comm, transport, until_torn=True) > 0
