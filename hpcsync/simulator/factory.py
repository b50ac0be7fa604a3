"""Selection of the simulation of a job without servers."""

from __future__ import annotations

from hpcsync.config.job import Job
from hpcsync.core.coordinator import Recorder
from hpcsync.core.peer_machine import create_method
from hpcsync.simulator.gossip import PullSimulation, PushSimulation
from hpcsync.simulator.pairs import PairSimulation
from hpcsync.simulator.peer_run import PeerSimulation
from hpcsync.simulator.peer_transfers import Workers
from hpcsync.simulator.run import Watch
from hpcsync.simulator.stanza import StanzaSimulation
from hpcsync.simulator.sync_peers import AllReduceSimulation, AveragingSimulation, PermutationSimulation
from hpcsync.workloads.registry import Workload

__all__ = ["PeerSimulation", "simulation"]

TRANSPORTS: dict[str, type[PeerSimulation]] = {
    "all-reduce": AllReduceSimulation,
    "separated-layers": StanzaSimulation,
    "average": AveragingSimulation,
    "swap": PermutationSimulation,
    "published": PullSimulation,
    "inbox": PushSimulation,
    "pairs": PairSimulation,
}


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
    return TRANSPORTS[create_method(job).transport](job, workload, workers, trace, watch)
