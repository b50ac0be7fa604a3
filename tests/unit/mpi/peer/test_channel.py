"""Messages between the ranks of a run without servers."""

from __future__ import annotations

import pytest
import torch

from hpcsync.mpi.peer.channel import PeerChannel
from hpcsync.mpi.transport.messages import PeerCommandKind as Kind


@pytest.mark.parametrize("halts_again", [False, True])
def test_a_halt_ends_even_if_the_next_one_is_due_at_once(comm, halts_again):
    """Rank 0 continues the run and halts it again before a worker has looked at the first command."""
    link = PeerChannel(comm, 3, torch.float64)
    infos, commands = (link.infos(), link.commands()) if comm.rank == 0 else (None, None)
    halted: list[int] = []

    def broadcast(kind: int, number: int = 0) -> None:
        for rank in range(comm.size):
            commands.send(rank, (kind, number))

    def write(number: int) -> None:
        halted.append(number)
        comm.Barrier()
        if comm.rank == 0:
            broadcast(Kind.CONTINUE)
            if halts_again:
                broadcast(Kind.HALT)
        comm.Barrier()

    if comm.rank == 0:
        broadcast(Kind.SAVE, 7)
    link.halt(write)
    assert halted == [7] and link.halt_requested == halts_again
    if infos is not None:
        while infos.poll() is not None:
            pass
    comm.Barrier()
    link.free()
