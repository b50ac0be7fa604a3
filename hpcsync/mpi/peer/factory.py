"""Exchange and layers of a rank in a job without servers."""

from __future__ import annotations

from collections.abc import Callable

from mpi4py import MPI
from torch import nn

from hpcsync.config.job import Job
from hpcsync.config.paradigms import AllReduceOptions, GossipOptions, LocalSgdOptions, StanzaOptions
from hpcsync.core.peer_coordinator import BatchDivision
from hpcsync.mpi.collectives.model_parts import Layers, SeparatedLayers
from hpcsync.mpi.peer.channel import PeerChannel
from hpcsync.mpi.peer.exchange import AllReducing, Averaging, Exchange, Permuting
from hpcsync.mpi.peer.gossip import Pulling, Pushing, PushSumming
from hpcsync.mpi.peer.stanza import StanzaExchange
from hpcsync.training.flat_model import FlatModel
from hpcsync.training.optimizers import OptimizerSpec


def layers(comm: MPI.Intracomm, job: Job, model: nn.Module) -> Layers:
    """Return the layers of this rank; collective."""
    if isinstance(job.paradigm, StanzaOptions):
        return SeparatedLayers(comm, model, job.paradigm.cut, job.groups)
    return Layers(comm, model)


def exchange(
    job: Job,
    link: PeerChannel,
    flat: FlatModel,
    optimizer: OptimizerSpec,
    layers: Layers,
    at_end_of_backward: Callable[[], None],
    division: BatchDivision | None = None,
) -> Exchange:
    """Create the exchange of a job without servers; collective.

    Parameters
    ----------
    job
        Job without servers.
    link
        Channel of the run.
    flat
        Flat view of the model.
    optimizer
        Optimizer of the local steps.
    layers
        Layers of this rank.
    at_end_of_backward
        See `BucketReducer`.
    division
        Division of the samples among workers, if the job allocates batches.

    Raises
    ------
    ValueError
        If the paradigm has servers.
    """
    match job.paradigm:
        case AllReduceOptions():
            return AllReducing(job, link, flat, optimizer, at_end_of_backward, division)
        case LocalSgdOptions():
            return Averaging(job, link, flat, optimizer)
        case GossipOptions(mode=mode):
            kinds: dict[str, Callable[..., Exchange]] = {
                "pull": Pulling,
                "push": Pushing,
                "push-sum": PushSumming,
                "permutation": Permuting,
            }
            return kinds[mode](job, link, flat, optimizer)
        case StanzaOptions():
            assert isinstance(layers, SeparatedLayers)
            return StanzaExchange(job, link, flat, optimizer, layers)
    raise ValueError(f'paradigm.name = "{job.paradigm.name}": must be a paradigm without servers')
