"""Command `hpcsync show`: a table of what a job resolves to."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hpcsync.config.cluster import Cluster, ClusterEvent, Network
from hpcsync.config.compression import takes_ratio
from hpcsync.config.job import Job, Script
from hpcsync.core.job_validation import check
from hpcsync.core.roles import Roles
from hpcsync.core.stanza_resolution import divided, fc_share, resolved, stanza_options
from hpcsync.training import compressor
from hpcsync.training.flat_model import trainable
from hpcsync.workloads.registry import Workload

EVENTS_SHOWN = 5


def print_job(job: Job) -> None:
    """Print the table of a job and the resolved job. Raises JobError if the job is not valid."""
    table = Table(title=job.name, show_header=False, title_justify="left")
    for row in rows(job):
        table.add_row(*map(escape, row))
    console = Console()
    console.print(table)
    console.print(job.to_toml(), markup=False, soft_wrap=True, end="")


def rows(job: Job) -> list[tuple[str, str]]:
    """Return the rows of the table, as names and values."""
    assert not isinstance(job.workload, Script), "the job comes from a file"
    workload = check(job)
    parameters = trainable(workload.model)
    size, itemsize = sum(p.numel() for p in parameters), parameters[0].element_size()
    return [
        ("paradigm", f"{job.paradigm.name}: {job.paradigm.describe(job.cluster.workers)}"),
        ("ranks", f"{job.cluster.ranks}: {_roles(job, workload)}"),
        ("parameters", f"{size:,} of {itemsize} bytes ({str(parameters[0].dtype).removeprefix('torch.')})"),
        *_shard_rows(job.cluster, size),
        *_move_rows(job, workload, size * itemsize, parameters),
        *job.paradigm.details(job.cluster.workers),
        ("samples per iteration", _samples(job, job.workload.batch_size)),
        *_cluster_rows(job.cluster),
        ("ends at", " or ".join(f"{key} = {value:,}" for key, value in job.stop.conditions.items())),
    ]


def _roles(job: Job, workload: Workload) -> str:
    cluster, paradigm = job.cluster, job.paradigm
    if paradigm.separates_layers:
        auto = "fc_workers" in paradigm.open_keys
        if auto and cluster.compute is None:
            return "workers; the number of fully-connected ones is chosen when the run starts"
        groups = resolved(job, workload).groups
        above, below = (_ranks("worker", group.start, len(group)) for group in (groups.fc, groups.convolution))
        chosen = f" (auto: {groups.n_fc} here; a run measures its links before it chooses)" if auto else ""
        return f"{above} fully-connected, {below} convolution{chosen}"
    workers = _ranks("worker", cluster.servers, cluster.workers)
    if cluster.placement == "spread" and cluster.servers > 1:
        workers += "\nranks are numbered so that servers are on different nodes, as far as there are enough nodes"
    if cluster.colocated:
        workers += "\nserver i is on the node of worker i"
    return f"{_ranks('server', 0, cluster.servers)}, {workers}" if cluster.servers else workers


def _shard_rows(cluster: Cluster, size: int) -> list[tuple[str, str]]:
    if not cluster.servers:
        return []
    sizes = sorted({shard.stop - shard.start for shard in Roles(cluster.servers, cluster.workers).shards(size)})
    return [("shard per server", " or ".join(f"{n:,}" for n in sizes) + " parameters")]


def _sent(job: Job, parameters: Sequence[torch.nn.Parameter]) -> str:
    """Return the bytes that a worker sends for these parameters, in words that follow the bytes that it receives."""
    compression = compressor.of_job(job, parameters)
    if compression is None:
        return "as many bytes"
    shards = Roles(max(1, job.cluster.servers), job.cluster.workers).shards(sum(p.numel() for p in parameters))

    def about(ratio: float) -> str:
        return f"about {sum(compression.nominal_bytes(shard, ratio) for shard in shards):,} bytes"

    return job.paradigm.sent(about, takes_ratio(job.compression), job.compression.name)


def _move_rows(
    job: Job, workload: Workload, size_bytes: int, parameters: Sequence[torch.nn.Parameter]
) -> list[tuple[str, str]]:
    if job.paradigm.separates_layers:
        return _stanza_rows(job, workload)
    sent = _sent(job, parameters)
    return [job.paradigm.moves(f"{size_bytes:,} bytes", sent, compressed=job.compresses)]


def _stanza_rows(job: Job, workload: Workload) -> list[tuple[str, str]]:
    assert not isinstance(job.workload, Script)
    paradigm = stanza_options(job)
    shape = divided(job, workload).shape
    share = fc_share(job, shape)
    back = job.workload.batch_size * shape.activation_bytes
    there = back + job.workload.batch_size * shape.label_bytes
    pieces = "" if paradigm.micro_batches == 1 else f", in {paradigm.micro_batches} pieces"
    return [
        (
            "cut",
            f"{paradigm.cut}: {shape.fc_parameters:,} parameters above it, {100 * share:.3g} % of the computation",
        ),
        (
            "an iteration moves",
            f"{there:,} bytes of activations and labels from each convolution worker, and {back:,} bytes of gradients "
            f"to it{pieces}",
        ),
        (
            "gradients",
            f"{shape.conv_bytes:,} bytes summed among convolution workers, {shape.fc_bytes:,} among fully-connected "
            "ones",
        ),
    ]


def _samples(job: Job, batch_size: int) -> str:
    batches, workers = job.batches, job.cluster.workers
    if job.paradigm.separates_layers:
        if "fc_workers" in job.paradigm.open_keys:
            return f"{batch_size} per convolution worker"
        return f"{batch_size} per convolution worker, {batch_size * job.groups.n_convolution} together"
    if batches.policy == "equal":
        return f"{batch_size} per worker, {batch_size * workers} together"
    limits = f"at least {batches.minimum} per worker"
    if (maxima := batches.maxima(workers)) is not None:
        most = sorted(set(maxima))
        limits += f", at most {most[0]}" if len(most) == 1 else f", at most {', '.join(map(str, maxima))}"
    allocated = {
        "proportional": "allocated in proportion to the workers' predicted speeds",
        "equal-finish": "allocated so that all workers are predicted to take the same time",
    }
    again = f"every {batches.interval} iterations, if that gains {100 * batches.gain:g} %"
    how = f"{allocated[batches.policy]} ({batches.predictor})"
    return f"{job.batch_total} together, {how}\n{limits}; allocated again {again}"


def _cluster_rows(cluster: Cluster) -> list[tuple[str, str]]:
    times = "their own time"
    if (compute := cluster.compute) is not None:
        seconds = getattr(compute, "seconds", None)
        given = seconds if seconds is not None else getattr(compute, "table", None)
        times = f"{compute.model}, {given} s (real iterations at least that)"
        if compute.fixed_share:
            times += f", {100 * compute.fixed_share:g} % of it independent of the batch size"
        if compute.backward_share:
            times += f", {100 * compute.backward_share:g} % of it the backward pass, with which all-reduce overlaps"
    found = [("iterations take", times)]
    if cluster.times_from is not None:
        found.append(("when simulated", f"iterations and transfers take the times recorded in {cluster.times_from}"))
    elif cluster.network is not None:
        found.append(("when simulated", _links(cluster.network, cluster)))
    if 0 < len(cluster.events) <= EVENTS_SHOWN:
        found.append(("events", "\n".join(_event(event) for event in cluster.events)))
    elif cluster.events:
        changed = len({event.worker for event in cluster.events})
        found.append(("events", f"{len(cluster.events)}, for {changed} of {cluster.workers} workers"))
    return found


def _links(network: Network, cluster: Cluster) -> str:
    server, *workers = (f"{8e-9 * rate:g}" for rate in network.rates(1, cluster.workers))
    given = workers[0] if len(set(workers)) == 1 else ", ".join(workers)
    of_servers = "shared with the servers" if cluster.colocated else f"server: {server}"
    return f"links of {given} Gbit/s ({of_servers}), {network.latency_us:g} us per message"


def _event(event: ClusterEvent) -> str:
    when = f"{event.at_s:g} s" if event.at_s is not None else f"its iteration {event.at_iteration:,}"
    match event.change:
        case "slow":
            return f"worker {event.worker} is slowed by a factor of {event.factor:g} from {when} on"
        case "recover":
            return f"worker {event.worker} recovers at {when}"
        case "leave":
            return f"worker {event.worker} leaves at {when}"
        case "join":
            return f"worker {event.worker} joins at {when}"
        case "die":
            return f"worker {event.worker} dies at {when}; all restart from a checkpoint {event.restart_s:g} s later"


def _ranks(role: str, first: int, n: int) -> str:
    return f"{role} {first}" if n == 1 else f"{role}s {first} to {first + n - 1}"
