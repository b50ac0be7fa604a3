"""Selection of the simulation of a job without servers."""

from __future__ import annotations

from hpcsync.config.job import Job
from hpcsync.config.paradigms import AllReduceOptions, GossipOptions, LocalSgdOptions, StanzaOptions
from hpcsync.core.coordinator import Recorder
from hpcsync.simulator.gossip import PullSimulation, PushSimulation
from hpcsync.simulator.peer_run import PeerSimulation, Watch
from hpcsync.simulator.peer_transfers import Workers
from hpcsync.simulator.stanza import StanzaSimulation
from hpcsync.simulator.sync_peers import AllReduceSimulation, AveragingSimulation, PermutationSimulation
from hpcsync.workloads.registry import Workload

__all__ = ["PeerSimulation", "simulation"]


def simulation(
    job: Job,
    workload: Workload,
    workers: Workers,
    trace: Recorder,
    watch: Watch = lambda now_s, coordinator: None,
) -> PeerSimulation:
    """Create the simulation of a job without servers.

    Parameters
    ----------
    job
        Job without servers.
    workload
        Its workload.
    workers
        Devices and links, from `peer_transfers.build`.
    trace
        Receiver of the trace rows.
    watch
        Called with the virtual time in seconds and the coordinator after every iteration.
    """
    kind: type[PeerSimulation]
    match job.paradigm:
        case AllReduceOptions():
            kind = AllReduceSimulation
        case StanzaOptions():
            kind = StanzaSimulation
        case LocalSgdOptions():
            kind = AveragingSimulation
        case GossipOptions(mode="permutation"):
            kind = PermutationSimulation
        case GossipOptions(mode="pull"):
            kind = PullSimulation
        case _:
            kind = PushSimulation
    return kind(job, workload, workers, trace, watch)
