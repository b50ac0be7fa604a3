"""Which exchange, and which layers, a worker of a job without servers has."""

from __future__ import annotations

from collections.abc import Callable

from mpi4py import MPI
from torch import nn

from hpcsync.config.job import Job
from hpcsync.config.paradigms import AllReduce, Gossip, LocalSgd, Stanza
from hpcsync.core.peer_coordinator import Division
from hpcsync.mpi.collectives.model_parts import Layers, SeparatedLayers
from hpcsync.mpi.peer.channel import PeerLink
from hpcsync.mpi.peer.exchange import AllReducing, Averaging, Exchange, Permuting
from hpcsync.mpi.peer.gossip import Pulling, Pushing, PushSumming
from hpcsync.mpi.peer.stanza import Separated
from hpcsync.training.flat_model import FlatModel
from hpcsync.training.optimizers import OptimizerSpec


def layers(comm: MPI.Intracomm, job: Job, model: nn.Module) -> Layers:
    """This rank's; collective."""
    if isinstance(job.paradigm, Stanza):
        return SeparatedLayers(comm, model, job.paradigm.cut, job.groups)
    return Layers(comm, model)


def exchange(
    job: Job,
    link: PeerLink,
    flat: FlatModel,
    optimizer: OptimizerSpec,
    layers: Layers,
    at_end_of_backward: Callable[[], None],
    division: Division | None = None,
) -> Exchange:
    """The job's; collective."""
    match job.paradigm:
        case AllReduce():
            return AllReducing(job, link, flat, optimizer, at_end_of_backward, division)
        case LocalSgd():
            return Averaging(job, link, flat, optimizer)
        case Gossip(mode=mode):
            kinds: dict[str, Callable[..., Exchange]] = {
                "pull": Pulling,
                "push": Pushing,
                "push-sum": PushSumming,
                "permutation": Permuting,
            }
            return kinds[mode](job, link, flat, optimizer)
        case Stanza():
            assert isinstance(layers, SeparatedLayers)
            return Separated(job, link, flat, optimizer, layers)
    raise ValueError(f"{job.paradigm.name} has servers")
