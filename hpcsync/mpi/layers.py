"""Which layers of the model a rank trains, and who is given whose when a run begins and ends."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from mpi4py import MPI
from torch import nn

from hpcsync.learning.cutting import cut, positions
from hpcsync.planning.groups import Groups

BCAST_BYTES = 1 << 30


class Layers:
    """All of them, on every rank.

    model:       the whole one. trained: what of it this rank trains.
    first_below: the first rank that has the layers into which the samples go.
    """

    first_below = 0

    def __init__(self, comm: MPI.Intracomm, model: nn.Module) -> None:
        self._comm = comm
        self.model = model
        self.trained = model

    def share(self, source_of_statistics: int = 0) -> None:
        """Rank 0's weights become everybody's, and the running statistics of this rank; collective."""
        share([p.detach() for p in self.model.parameters()], self._comm, 0)
        share(self.model.buffers(), self._comm, source_of_statistics)

    def free(self) -> None:
        """Collective, and harmless when repeated."""


class SeparatedLayers(Layers):
    """Fully-connected workers train those above the cut, convolution workers those below it.

    What is above never comes to a convolution worker: there it stays as its own process has initialised it.

    group: the communicator of those that train the same. groups: who they are.
    """

    def __init__(self, comm: MPI.Intracomm, model: nn.Module, name: str, groups: Groups) -> None:
        super().__init__(comm, model)
        self.groups = groups
        self.first_below = groups.n_fc
        self.is_fc = groups.is_fc(comm.rank)
        self.below, self.above = cut(model, name)
        self.trained = self.above if self.is_fc else self.below
        self.group: MPI.Intracomm = comm.Split(int(self.is_fc))  # type: ignore[assignment]

    def share(self, source_of_statistics: int = 0) -> None:
        share([p.detach() for p in self.below.parameters()], self._comm, 0)
        share(self.below.buffers(), self._comm, source_of_statistics)
        if self.is_fc:
            share([*(p.detach() for p in self.above.parameters()), *self.above.buffers()], self.group, 0)

    def shown(self, into: torch.Tensor) -> list[tuple[int, list[torch.Tensor]]]:
        """The first worker of each group, and the parts of a flat vector of the whole model, shape (size,), that it
        trains, in the order of its own."""
        halves = ((0, self.above), (self.first_below, self.below))
        return [(worker, [into[part] for part in positions(self.model, half)]) for worker, half in halves]

    def free(self) -> None:
        if self.group != MPI.COMM_NULL:
            self.group.Free()


def share(tensors: Iterable[torch.Tensor], comm: MPI.Intracomm, root: int) -> None:
    """Give everybody the root's values, of any type, through host memory: MPI's collectives get no other."""
    for tensor in tensors:
        values = tensor.detach().cpu().contiguous()  # the tensor's own memory, if it can be
        octets = values.reshape(-1).view(torch.uint8).numpy()
        for begin in range(0, len(octets), BCAST_BYTES):  # Open MPI takes less than 2^31 of anything
            comm.Bcast(octets[begin : begin + BCAST_BYTES], root)
        if values.data_ptr() != tensor.data_ptr():
            tensor.copy_(values)
