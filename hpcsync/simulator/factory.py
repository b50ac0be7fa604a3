"""Selection of the simulation of a job without servers."""

from __future__ import annotations

from typing import Any

from hpcsync.config.job import Job
from hpcsync.core.peer_machine import create_method
from hpcsync.simulator.gossip import PullSimulation, PushSimulation
from hpcsync.simulator.pairs import PairSimulation
from hpcsync.simulator.peer_run import PeerSimulation
from hpcsync.simulator.stanza import StanzaSimulation
from hpcsync.simulator.sync_peers import AllReduceSimulation, AveragingSimulation, SwapSimulation

TRANSPORTS: dict[str, type[PeerSimulation]] = {
    "all-reduce": AllReduceSimulation,
    "separated-layers": StanzaSimulation,
    "average": AveragingSimulation,
    "swap": SwapSimulation,
    "published": PullSimulation,
    "inbox": PushSimulation,
    "pairs": PairSimulation,
}


def simulation(job: Job, *of_every_run: Any) -> PeerSimulation:
    """Create the simulation of a job without servers, from the arguments of `PeerSimulation`."""
    return TRANSPORTS[create_method(job).transport](job, *of_every_run)
