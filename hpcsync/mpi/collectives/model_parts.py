"""Parts of the model that ranks train, and how ranks share weights at the start and end of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from mpi4py import MPI
from torch import nn

from hpcsync.planning.layer_groups import Groups
from hpcsync.training.buffers import Buffers
from hpcsync.training.flat_model import FlatModel, trainable
from hpcsync.training.local_update import Mean
from hpcsync.training.model_split import cut, positions

BCAST_BYTES = 1 << 30


# Read a worker's published replica into a tensor, shape (size,), its weight into another, shape (1,), and its model's
# buffers into a third, shape (n_words,). False if it cannot be read.
Read = Callable[[int, torch.Tensor, torch.Tensor | None, torch.Tensor | None], bool]


class Layers:
    """Layers that this rank trains; here the whole model on every rank.

    Parameters
    ----------
    comm
        Communicator of all ranks that train.
    model
        The whole model.

    Attributes
    ----------
    trained : torch.nn.Module
        Part of the model that this rank trains.
    dead : set of int
        Ranks that no longer publish a replica.
    """

    def __init__(self, comm: MPI.Intracomm, model: nn.Module) -> None:
        self._comm = comm
        self.model = model
        self.trained = model
        self.dead: set[int] = set()

    def share(self, comm: MPI.Intracomm | None = None, untrained: Sequence[nn.Parameter] = ()) -> None:
        """Broadcast rank 0's weights and buffers; collective.

        Parameters
        ----------
        comm
            Communicator of the surviving ranks, in which the rank 0 is the same; by default of all.
        untrained
            Parameters that are the last rank's instead.
        """
        comm, others = comm or self._comm, {id(p) for p in untrained}
        buffers = [buffer.clone() for buffer in self.model.buffers()]  # numpy's memory can never be resized
        share([*(p.detach() for p in self.model.parameters() if id(p) not in others), *buffers], comm)
        for buffer, shared in zip(self.model.buffers(), buffers, strict=True):
            buffer.detach().copy_(shared)
        share([p.detach() for p in untrained], comm, comm.size - 1)

    def compare(self, weights: torch.Tensor) -> None:
        """Compare the final weights of ranks that train the same layers, where `complete` does not; collective."""

    def read(self, into: torch.Tensor, read: Read, buffers: Buffers) -> float | None:
        """Average all ranks' published replicas into a flat vector of the whole model, shape (size,).

        Parameters
        ----------
        into
            Output.
        read
            Reads one of the replicas.
        buffers
            Buffers of the model that is to have these weights; they adopt those of these ranks.

        Returns
        -------
        float or None
            Consensus distance of the replicas; None if one of them cannot be read.
        """
        mean, replica, weight = Mean(into), torch.empty_like(into), into.new_empty(1)
        vectors: list[torch.Tensor] = []
        for worker in sorted(set(range(self._comm.size)) - self.dead):
            wanted = buffers.new() if buffers.needs_all or not vectors else None
            if not read(worker, replica, weight, wanted):
                return None
            mean.add(replica, float(weight[0]))
            if wanted is not None:
                vectors.append(wanted)
        buffers.adopt(vectors)
        return mean.distance

    def complete(self, flat: FlatModel, read: Read, buffers: Buffers) -> float:
        """Set the model, whose trained part is `flat`, to that mean at the end; return the consensus distance."""
        distance = self.read(flat.weights, read, buffers)
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
        super().__init__(comm, model)
        self.groups = groups
        self.first = groups.n_fc  # first rank that trains the layers below the cut
        self.is_fc = groups.is_fc(comm.rank)
        self.below, self.above = cut(model, name)
        self.trained = self.above if self.is_fc else self.below
        above = {id(buffer) for buffer in self.above.buffers()}
        self._owners = [int(id(buffer) not in above) for buffer in model.buffers()]
        self.group: MPI.Intracomm = comm.Split(int(self.is_fc))  # type: ignore[assignment]
        self._distance = math.nan  # of the final weights
        # As they are now: a script may freeze parameters later.
        self._positions = {half: positions(model, half) for half in (self.below, self.above)}
        self._all_below = trainable(self.below)

    def share(self, comm: MPI.Intracomm | None = None, untrained: Sequence[nn.Parameter] = ()) -> None:
        """Broadcast the layers below the cut to all ranks, and those above it to the fully-connected workers."""
        share([*(p.detach() for p in self.below.parameters()), *self.below.buffers()], self._comm)
        if self.is_fc:
            share([*(p.detach() for p in self.above.parameters()), *self.above.buffers()], self.group)

    def compare(self, weights: torch.Tensor) -> None:
        """Compute the distance of the final weights, shape (size,), from those of the first worker of the group."""
        first = weights.clone()
        share([first], self.group)
        square = float((weights - first).double().square().sum())
        self._distance = math.sqrt(self._comm.allreduce(square) / self._comm.size)

    def read(self, into: torch.Tensor, read: Read, buffers: Buffers) -> float | None:
        """Read each part from the first worker of its group, whose workers have equal weights; the distance is NaN."""
        vectors = buffers.new(), buffers.new()
        for worker, half, vector in ((0, self.above, vectors[0]), (self.first, self.below, vectors[1])):
            if not _read_parts([into[part] for part in self._positions[half]], worker, read, vector):
                return None
        buffers.adopt(vectors, self._owners)
        return math.nan

    def complete(self, flat: FlatModel, read: Read, buffers: Buffers) -> float:
        """Read the layers below the cut; on rank 0, which has those above it."""
        vectors = buffers.packed(), buffers.new()
        was_read = _read_parts([p.detach() for p in self._all_below], self.first, read, vectors[1])
        assert was_read
        buffers.adopt(vectors, self._owners)
        return self._distance

    def free(self) -> None:
        """Free the group's communicator."""
        if self.group != MPI.COMM_NULL:
            self.group.Free()


def _read_parts(parts: Sequence[torch.Tensor], worker: int, read: Read, buffers: torch.Tensor) -> bool:
    """Fill these tensors, in this order, from the worker's published replica; return whether it could be read."""
    vector = torch.cat([part.flatten() for part in parts])
    if not read(worker, vector, None, buffers):
        return False
    for part, values in zip(parts, vector.split([part.numel() for part in parts]), strict=True):
        part.copy_(values.view(part.shape))
    return True


def share(tensors: Iterable[torch.Tensor], comm: MPI.Intracomm, root: int = 0) -> None:
    """Broadcast a rank's values, of any type, through host memory, because MPI collectives get no device pointers."""
    for tensor in tensors:
        values = tensor.detach().cpu().contiguous()  # shares the tensor's memory if possible
        octets = values.reshape(-1).view(torch.uint8).numpy()
        for begin in range(0, len(octets), BCAST_BYTES):  # Open MPI takes fewer than 2^31 elements
            comm.Bcast(octets[begin : begin + BCAST_BYTES], root)
        if values.data_ptr() != tensor.data_ptr():
            tensor.copy_(values)
