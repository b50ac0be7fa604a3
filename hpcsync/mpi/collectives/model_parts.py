"""Which layers of the model a rank trains, and who is given whose when a run begins and ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from mpi4py import MPI
from torch import nn

from hpcsync.planning.layer_groups import Groups
from hpcsync.training.flat_model import FlatModel, trainable
from hpcsync.training.local_update import Mean
from hpcsync.training.model_split import cut, positions

BCAST_BYTES = 1 << 30


# Fills a tensor, shape (size,), from what a worker shows, and another, shape (1,), with its weight; False: it cannot.
Read = Callable[[int, torch.Tensor, torch.Tensor | None], bool]


class Layers:
    """All of them, on every rank.

    model: the whole one. trained: what of it this rank trains.
    first: the first rank that trains the layers into which samples go; running statistics end as its own.
    """

    def __init__(self, comm: MPI.Intracomm, model: nn.Module, first: int = 0) -> None:
        self._comm = comm
        self.model = model
        self.trained = model
        self.first = first
        self.dead: set[int] = set()  # ranks that have nothing to show any more

    def share(self, statistics_of: int = 0, comm: MPI.Intracomm | None = None) -> None:
        """Rank 0's weights become everybody's, and the running statistics of this rank; collective.

        comm: of those that are left, in which rank 0 is the same, and where there are others before `first` these too.
        """
        comm = comm or self._comm
        share([p.detach() for p in self.model.parameters()], comm, 0)
        share(self.model.buffers(), comm, statistics_of)

    def read(self, into: torch.Tensor, read: Read) -> float | None:
        """The mean of what all ranks show, into a flat vector of the whole model, shape (size,); their consensus
        distance. None where one cannot be read."""
        mean, replica, weight = Mean(into), torch.empty_like(into), into.new_empty(1)
        for worker in sorted(set(range(self._comm.size)) - self.dead):
            if not read(worker, replica, weight):
                return None
            mean.add(replica, float(weight[0]))
        return mean.distance

    def complete(self, flat: FlatModel, read: Read) -> float:
        """At the end: let the model, whose trained part is `flat`, be that mean; their consensus distance."""
        distance = self.read(flat.weights, read)
        assert distance is not None
        return distance

    def free(self) -> None:
        """Collective, and harmless when repeated."""


class SeparatedLayers(Layers):
    """Fully-connected workers train those above the cut, convolution workers those below it.

    What is above never comes to a convolution worker: there it stays as its own process has initialised it.

    group: the communicator of those that train the same. groups: who they are.
    """

    def __init__(self, comm: MPI.Intracomm, model: nn.Module, name: str, groups: Groups) -> None:
        super().__init__(comm, model, groups.n_fc)
        self.groups = groups
        self.is_fc = groups.is_fc(comm.rank)
        self.below, self.above = cut(model, name)
        self.trained = self.above if self.is_fc else self.below
        self.group: MPI.Intracomm = comm.Split(int(self.is_fc))  # type: ignore[assignment]

    def share(self, statistics_of: int = 0, comm: MPI.Intracomm | None = None) -> None:
        share([p.detach() for p in self.below.parameters()], self._comm, 0)
        share(self.below.buffers(), self._comm, statistics_of)
        if self.is_fc:
            share([*(p.detach() for p in self.above.parameters()), *self.above.buffers()], self.group, 0)

    def read(self, into: torch.Tensor, read: Read) -> float | None:
        """All of a group have the same: of each half, what its first worker shows."""
        for worker, half in ((0, self.above), (self.first, self.below)):
            if not _read_parts([into[part] for part in positions(self.model, half)], worker, read):
                return None
        return 0.0

    def complete(self, flat: FlatModel, read: Read) -> float:
        """On rank 0, which has the upper half."""
        assert _read_parts([p.detach().view(-1) for p in trainable(self.below)], self.first, read)
        return 0.0

    def free(self) -> None:
        if self.group != MPI.COMM_NULL:
            self.group.Free()


def _read_parts(parts: Sequence[torch.Tensor], worker: int, read: Read) -> bool:
    """Fill these parts, in this order, from what the worker shows."""
    vector = torch.cat(list(parts))
    if not read(worker, vector, None):
        return False
    for part, values in zip(parts, vector.split([len(part) for part in parts]), strict=True):
        part.copy_(values)
    return True


def share(tensors: Iterable[torch.Tensor], comm: MPI.Intracomm, root: int) -> None:
    """Give everybody the root's values, of any type, through host memory: MPI's collectives get no other."""
    for tensor in tensors:
        values = tensor.detach().cpu().contiguous()  # the tensor's own memory, if it can be
        octets = values.reshape(-1).view(torch.uint8).numpy()
        for begin in range(0, len(octets), BCAST_BYTES):  # Open MPI takes less than 2^31 of anything
            comm.Bcast(octets[begin : begin + BCAST_BYTES], root)
        if values.data_ptr() != tensor.data_ptr():
            tensor.copy_(values)
