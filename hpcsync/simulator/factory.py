"""Which simulation a job without servers is."""

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
    """The simulation of this job, which has no servers."""
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
