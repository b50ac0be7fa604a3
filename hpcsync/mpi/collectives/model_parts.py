"""Parts of the model that ranks train, and how ranks share weights at the start and end of a run."""

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


# Read a worker's published replica into a tensor, shape (size,), and its weight into another, shape (1,). False if it
# cannot be read.
Read = Callable[[int, torch.Tensor, torch.Tensor | None], bool]


class Layers:
    """Layers that this rank trains; here the whole model on every rank.

    Parameters
    ----------
    comm
        Communicator of all ranks that train.
    model
        The whole model.
    first
        First rank that trains the input layers; its running statistics become the final ones.

    Attributes
    ----------
    trained : torch.nn.Module
        Part of the model that this rank trains.
    dead : set of int
        Ranks that no longer publish a replica.
    """

    def __init__(self, comm: MPI.Intracomm, model: nn.Module, first: int = 0) -> None:
        self._comm = comm
        self.model = model
        self.trained = model
        self.first = first
        self.dead: set[int] = set()

    def share(self, statistics_of: int = 0, comm: MPI.Intracomm | None = None) -> None:
        """Broadcast rank 0's weights and the running statistics of rank `statistics_of`; collective.

        Parameters
        ----------
        statistics_of
            Rank in `comm` whose running statistics are broadcast.
        comm
            Communicator of the surviving ranks, in which the rank 0 is the same; if others precede `first` in it, these
            survive too.
        """
        comm = comm or self._comm
        share([p.detach() for p in self.model.parameters()], comm, 0)
        share(self.model.buffers(), comm, statistics_of)

    def read(self, into: torch.Tensor, read: Read) -> float | None:
        """Average all ranks' published replicas into a flat vector of the whole model, shape (size,).

        Returns
        -------
        float or None
            Consensus distance of the replicas; None if one of them cannot be read.
        """
        mean, replica, weight = Mean(into), torch.empty_like(into), into.new_empty(1)
        for worker in sorted(set(range(self._comm.size)) - self.dead):
            if not read(worker, replica, weight):
                return None
            mean.add(replica, float(weight[0]))
        return mean.distance

    def complete(self, flat: FlatModel, read: Read) -> float:
        """Set the model, whose trained part is `flat`, to that mean at the end; return the consensus distance."""
        distance = self.read(flat.weights, read)
        assert distance is not None
        return distance

    def free(self) -> None:
        """Free all resources; collective, and harmless when repeated."""


class SeparatedLayers(Layers):
    """Layers of Stanza: fully-connected workers train those above the cut, convolution workers those below it.

    A convolution worker never receives the layers above the cut: they stay as its own process initialised them.

    Parameters
    ----------
    comm
        Communicator of all workers.
    model
        The whole model.
    name
        Name of the first layer above the cut.
    groups
        Ranks of the two groups.

    Attributes
    ----------
    group : MPI.Intracomm
        Communicator of the ranks that train the same layers.
    """

    def __init__(self, comm: MPI.Intracomm, model: nn.Module, name: str, groups: Groups) -> None:
        super().__init__(comm, model, groups.n_fc)
        self.groups = groups
        self.is_fc = groups.is_fc(comm.rank)
        self.below, self.above = cut(model, name)
        self.trained = self.above if self.is_fc else self.below
        self.group: MPI.Intracomm = comm.Split(int(self.is_fc))  # type: ignore[assignment]

    def share(self, statistics_of: int = 0, comm: MPI.Intracomm | None = None) -> None:
        """Broadcast the layers below the cut to all ranks, and those above it to the fully-connected workers."""
        share([p.detach() for p in self.below.parameters()], self._comm, 0)
        share(self.below.buffers(), self._comm, statistics_of)
        if self.is_fc:
            share([*(p.detach() for p in self.above.parameters()), *self.above.buffers()], self.group, 0)

    def read(self, into: torch.Tensor, read: Read) -> float | None:
        """Read each part from the first worker of its group: all workers of a group have equal weights."""
        for worker, half in ((0, self.above), (self.first, self.below)):
            if not _read_parts([into[part] for part in positions(self.model, half)], worker, read):
                return None
        return 0.0

    def complete(self, flat: FlatModel, read: Read) -> float:
        """Read the layers below the cut; on rank 0, which has those above it."""
        assert _read_parts([p.detach().view(-1) for p in trainable(self.below)], self.first, read)
        return 0.0

    def free(self) -> None:
        """Free the group's communicator."""
        if self.group != MPI.COMM_NULL:
            self.group.Free()


def _read_parts(parts: Sequence[torch.Tensor], worker: int, read: Read) -> bool:
    """Fill these tensors, in this order, from the worker's published replica; return whether it could be read."""
    vector = torch.cat(list(parts))
    if not read(worker, vector, None):
        return False
    for part, values in zip(parts, vector.split([len(part) for part in parts]), strict=True):
        part.copy_(values)
    return True


def share(tensors: Iterable[torch.Tensor], comm: MPI.Intracomm, root: int) -> None:
    """Broadcast the root's values, of any type, through host memory, because MPI collectives get no device pointers."""
    for tensor in tensors:
        values = tensor.detach().cpu().contiguous()  # shares the tensor's memory if possible
        octets = values.reshape(-1).view(torch.uint8).numpy()
        for begin in range(0, len(octets), BCAST_BYTES):  # Open MPI takes fewer than 2^31 elements
            comm.Bcast(octets[begin : begin + BCAST_BYTES], root)
        if values.data_ptr() != tensor.data_ptr():
            tensor.copy_(values)
