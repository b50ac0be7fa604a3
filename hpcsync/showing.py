"""`hpcsync show`: a job in a table."""

from __future__ import annotations

import math

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hpcsync.job import Asp, Bsp, Dssp, Job, Script, Ssp
from hpcsync.job_cluster import Change, Cluster, Network
from hpcsync.learning.validation import check
from hpcsync.roles import Roles

EVENTS_SHOWN = 5


def print_job(job: Job) -> None:
    """What nothing but running it would tell: who does what, and how much travels. Raises JobError."""
    table = Table(title=job.name, show_header=False, title_justify="left")
    for row in rows(job):
        table.add_row(*map(escape, row))
    console = Console()
    console.print(table)
    console.print(job.to_toml(), markup=False, soft_wrap=True, end="")


def rows(job: Job) -> list[tuple[str, str]]:
    assert not isinstance(job.workload, Script), "jobs come from files here"
    parameters = [p for p in check(job).model.parameters() if p.requires_grad]
    size, itemsize = sum(p.numel() for p in parameters), parameters[0].element_size()
    servers, workers = job.cluster.servers, job.cluster.workers
    roles = Roles(servers, workers)
    sizes = sorted({shard.stop - shard.start for shard in roles.shards(size)})
    return [
        ("paradigm", f"{job.paradigm.name}: {in_words(job)}"),
        ("ranks", f"{roles.n_ranks}: {_ranks('server', 0, servers)}, {_ranks('worker', servers, workers)}"),
        ("parameters", f"{size:,} of {itemsize} bytes ({str(parameters[0].dtype).removeprefix('torch.')})"),
        ("shard of a server", " or ".join(f"{n:,}" for n in sizes) + " parameters"),
        ("an iteration moves", f"{size * itemsize:,} bytes of weights to the worker, and as many of gradient from it"),
        ("samples an iteration", f"{job.workload.batch_size} a worker, {job.workload.batch_size * workers} together"),
        *_cluster_rows(job.cluster),
        ("ends at", " or ".join(f"{key} = {value:,}" for key, value in job.stop if value is not None)),
    ]


def _cluster_rows(cluster: Cluster) -> list[tuple[str, str]]:
    times = "as long as they take"
    if (compute := cluster.compute) is not None:
        seconds = getattr(compute, "seconds", None)
        given = seconds if seconds is not None else getattr(compute, "table", None)
        times = f"so many seconds (real ones at least): {compute.model}, {given}"
    found = [("iterations take", times)]
    if cluster.times_from is not None:
        found.append(("when simulated", f"iterations and transfers take as long as in {cluster.times_from}"))
    elif cluster.network is not None:
        found.append(("when simulated", _links(cluster.network, cluster.workers)))
    if 0 < len(cluster.events) <= EVENTS_SHOWN:
        found.append(("events", "\n".join(_happens(event) for event in cluster.events)))
    elif cluster.events:
        changed = len({event.worker for event in cluster.events})
        found.append(("events", f"{len(cluster.events)}, of {changed} of {cluster.workers} workers"))
    return found


def _links(network: Network, n_workers: int) -> str:
    """Only a simulation has these."""
    server, *workers = (f"{8e-9 * rate:g}" for rate in network.rates(1, n_workers))
    given = workers[0] if len(set(workers)) == 1 else ", ".join(workers)
    return f"links of {given} Gbit/s (a server's {server}), {network.latency_us:g} us a message"


def _happens(event: Change) -> str:
    when = f"{event.at_s:g} s" if event.at_s is not None else f"its iteration {event.at_iteration:,}"
    match event.change:
        case "slow":
            return f"worker {event.worker} takes {event.factor:g} times as long from {when} on"
        case "recover":
            return f"worker {event.worker} recovers at {when}"
        case "leave":
            return f"worker {event.worker} leaves at {when}"


def in_words(job: Job) -> str:
    match job.paradigm:
        case Bsp():
            return "every update is the mean of all workers' gradients, and all wait for the slowest"
        case Asp():
            return "every gradient is an update, and nobody waits"
        case Ssp(staleness=math.inf):
            return "every gradient is an update, and nobody waits (no bound)"
        case Ssp(staleness=bound):
            return f"every gradient is an update, and nobody starts more than {bound} iterations ahead of the slowest"
        case Dssp(staleness_min=low, staleness_max=high, mode=mode):
            ahead = f"more than {low} iterations ahead of the slowest only as its controller predicts"
            return f"every gradient is an update, and {ahead}, " + (
                f"never more than {high}"
                if mode == "bounded"
                else f"aiming at {high} (as printed in the paper: no bound)"
            )


def _ranks(role: str, first: int, n: int) -> str:
    return f"{role} {first}" if n == 1 else f"{role}s {first} to {first + n - 1}"
