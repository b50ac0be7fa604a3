"""Communication between servers and workers."""

from __future__ import annotations

import torch

from hpcsync.core.roles import Roles
from hpcsync.mpi.server.channel import ServerChannel
from hpcsync.mpi.transport import messages


def test_what_was_sent_is_complete_when_the_channel_has_been_freed(comm, needs):
    needs(2)
    link = ServerChannel(comm, Roles(1, comm.size - 1), 3, torch.float64)
    wanted, asked = link.outbox(messages.TAG_SLOT, messages.SLOT), link.inbox(messages.TAG_SLOT, messages.SLOT)
    wanted.send(0, (comm.rank,))
    if comm.rank == 0:
        assert {link.backoff.until(asked.poll) for _ in range(comm.size)} == {(rank,) for rank in range(comm.size)}
    link.free()
    assert not any(wanted._requests)
