"""Command `hpcsync show`: a table of what a job resolves to."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hpcsync.config.cluster import Cluster, ClusterEvent, Network
from hpcsync.config.compression import RandomKOptions, TopKOptions
from hpcsync.config.job import Job, Script
from hpcsync.config.paradigms import (
    AdspOptions,
    AllReduceOptions,
    AshlOptions,
    AspOptions,
    BspOptions,
    DsspOptions,
    EasgdOptions,
    FirstKOfAnyOptions,
    FirstKOfAVersionOptions,
    FirstKOptions,
    GossipOptions,
    KAsyncOptions,
    KBatchAsyncOptions,
    KBatchSyncOptions,
    KSyncOptions,
    LocalSgdOptions,
    ParadigmOptions,
    SspOptions,
    StanzaOptions,
)
from hpcsync.core.job_validation import check
from hpcsync.core.roles import Roles
from hpcsync.core.stanza_resolution import divided, fc_share, resolved
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
        ("paradigm", f"{job.paradigm.name}: {in_words(job)}"),
        ("ranks", f"{job.cluster.ranks}: {_roles(job, workload)}"),
        ("parameters", f"{size:,} of {itemsize} bytes ({str(parameters[0].dtype).removeprefix('torch.')})"),
        *_shard_rows(job.cluster, size),
        *_move_rows(job, workload, size * itemsize, parameters),
        *_k_rows(job.paradigm, job.cluster.workers),
        *_commit_rows(job.paradigm),
        ("samples per iteration", _samples(job, job.workload.batch_size)),
        *_cluster_rows(job.cluster),
        ("ends at", " or ".join(f"{key} = {value:,}" for key, value in job.stop if value is not None)),
    ]


def _roles(job: Job, workload: Workload) -> str:
    cluster, paradigm = job.cluster, job.paradigm
    if isinstance(paradigm, StanzaOptions):
        auto = paradigm.fc_workers == "auto"
        if auto and cluster.compute is None:
            return "workers; the number of fully-connected ones is chosen when the run starts"
        groups = resolved(job, workload).groups
        above, below = (_ranks("worker", group.start, len(group)) for group in (groups.fc, groups.convolution))
        chosen = f" (auto: {groups.n_fc} here; a run measures its links before it chooses)" if auto else ""
        return f"{above} fully-connected, {below} convolution{chosen}"
    workers = _ranks("worker", cluster.servers, cluster.workers)
    if cluster.placement == "spread" and cluster.servers > 1:
        workers += "\nranks are numbered so that servers are on different nodes, as far as there are enough nodes"
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

    def about(ratio: float = math.nan) -> str:
        return f"about {sum(compression.nominal_bytes(shard, ratio) for shard in shards):,} bytes"

    if isinstance(job.paradigm, AshlOptions) and isinstance(job.compression, TopKOptions | RandomKOptions):
        coarse, fine = (about(ratio) for ratio in (job.paradigm.ratio_coarse, job.paradigm.ratio_fine))
        return f"{coarse} ({job.compression.name}; in the fine stage {fine}) or more"
    return f"{about()} ({job.compression.name})"


def _move_rows(
    job: Job, workload: Workload, size_bytes: int, parameters: Sequence[torch.nn.Parameter]
) -> list[tuple[str, str]]:
    if isinstance(job.paradigm, StanzaOptions):
        return _stanza_rows(job, job.paradigm, workload)
    return [_moves(job, size_bytes, _sent(job, parameters))]


def _stanza_rows(job: Job, paradigm: StanzaOptions, workload: Workload) -> list[tuple[str, str]]:
    assert not isinstance(job.workload, Script)
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


def _moves(job: Job, size_bytes: int, sent: str) -> tuple[str, str]:
    match job.paradigm:
        case EasgdOptions(period=n):
            return _every(n), f"{size_bytes:,} bytes of weights from the worker, and as many of the centre to it"
        case AllReduceOptions() if job.compresses:
            return "an iteration moves", f"{sent} of gradient ({size_bytes:,} bytes) from each worker to the others"
        case AllReduceOptions():
            return "an iteration moves", f"{size_bytes:,} bytes of gradient, summed among the workers"
        case LocalSgdOptions(steps=n):
            return _every(n), f"{size_bytes:,} bytes of weights, summed among the workers"
        case GossipOptions(period=n):
            return _every(n), f"{size_bytes:,} bytes of weights from one worker to another, for each worker"
        case AshlOptions() | AdspOptions():
            return "a push moves", f"{size_bytes:,} bytes of weights to the worker, and {sent} of weight change from it"
        case _:
            return (
                "an iteration moves",
                f"{size_bytes:,} bytes of weights to the worker, and {sent} of gradient from it",
            )


def _every(n: int) -> str:
    return "an iteration moves" if n == 1 else f"every {n} iterations move"


def _k_rows(paradigm: ParadigmOptions, n_workers: int) -> list[tuple[str, str]]:
    if not isinstance(paradigm, FirstKOptions) or isinstance(paradigm.k, int):
        return []
    adapts_to = {
        "state": "the workers' speeds",
        "loss": "the loss",
        "min": "the workers' speeds and the loss, whichever gives the smaller k",
    }
    start = paradigm.k_at_first(n_workers)
    return [("k", f"{paradigm.k_min} to {n_workers}, initially {start}: adapts to {adapts_to[paradigm.k]}")]


def _commit_rows(paradigm: ParadigmOptions) -> list[tuple[str, str]]:
    match paradigm:
        case AshlOptions(loss_preset=preset) as ashl:
            until = (
                f"improves by less than {100 * ashl.plateau:g} % over five rounds"
                if preset is None
                else f"is {preset:g}"
            )
            ahead = f"no worker starts more than {ashl.staleness} pushes ahead of the slowest"
            return [
                (
                    "initial pushes",
                    f"{ashl.warmup + ashl.profiled} pushes of one local step, the last {ashl.profiled} timed",
                ),
                ("coarse stage", f"{_steps(ashl.steps_coarse)}; no worker waits; until the average loss {until}"),
                ("fine stage", f"{_steps(ashl.steps_fine)}; {ahead}"),
            ]
        case AdspOptions(commits=commits) as adsp:
            within = f"every {adsp.check_period_s:g} s, at least {adsp.interval_min_s:g} s apart"
            missed = "; missed pushes are made up for" if adsp.rule == "cumulative" else ""
            if commits is not None:
                return [("pushes", f"{commits} by each worker {within}{missed}")]
            again = f"{adsp.search_every_s:g} s and when the average loss has risen by {100 * adsp.loss_rise:g} %"
            return [
                ("pushes", f"the same number by each worker {within}{missed}\nthe number is searched every {again}")
            ]
        case _:
            return []


def _steps(n: int) -> str:
    return f"{n} local steps by the slowest worker, and by the others as many as take the same time"


def _samples(job: Job, batch_size: int) -> str:
    batches, workers = job.batches, job.cluster.workers
    if isinstance(job.paradigm, StanzaOptions):
        if job.paradigm.fc_workers == "auto":
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
    found = [("iterations take", times)]
    if cluster.times_from is not None:
        found.append(("when simulated", f"iterations and transfers take the times recorded in {cluster.times_from}"))
    elif cluster.network is not None:
        found.append(("when simulated", _links(cluster.network, cluster.workers)))
    if 0 < len(cluster.events) <= EVENTS_SHOWN:
        found.append(("events", "\n".join(_event(event) for event in cluster.events)))
    elif cluster.events:
        changed = len({event.worker for event in cluster.events})
        found.append(("events", f"{len(cluster.events)}, for {changed} of {cluster.workers} workers"))
    return found


def _links(network: Network, n_workers: int) -> str:
    server, *workers = (f"{8e-9 * rate:g}" for rate in network.rates(1, n_workers))
    given = workers[0] if len(set(workers)) == 1 else ", ".join(workers)
    return f"links of {given} Gbit/s (server: {server}), {network.latency_us:g} us per message"


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


def in_words(job: Job) -> str:
    """Describe the paradigm of a job in a sentence."""
    match job.paradigm:
        case BspOptions():
            return "each update is the mean of all workers' gradients; all wait for the slowest"
        case AspOptions():
            return "each gradient is an update; no worker waits"
        case SspOptions(staleness=math.inf):
            return "each gradient is an update; no worker waits (no bound)"
        case SspOptions(staleness=bound):
            return f"each gradient is an update; no worker starts more than {bound} iterations ahead of the slowest"
        case DsspOptions(staleness_min=low, staleness_max=high, mode=mode):
            ahead = f"a worker starts more than {low} iterations ahead of the slowest only if the controller allows it"
            return f"each gradient is an update; {ahead}, " + (
                f"never more than {high}"
                if mode == "bounded"
                else f"with {high} as its target (as printed in the paper: no bound)"
            )
        case KSyncOptions() as first:
            return f"each update is the mean of the first {_k(first)} workers' gradients; {_late(first)}"
        case KBatchSyncOptions() as first:
            of = f"the first {_k(first)} gradients of its version; a worker may contribute several"
            return f"each update is the mean of {of}; {_late(first)}"
        case KAsyncOptions() as first:
            of = f"the next {_k(first)} workers' gradients; these workers wait for it, the others continue"
            return f"each update is the mean of {of}{_stale(first)}"
        case KBatchAsyncOptions() as first:
            return f"each update is the mean of the next {_k(first)} gradients; no worker waits{_stale(first)}"
        case EasgdOptions(synchronous=synchronous) as easgd:
            rate = easgd.moving_rate(job.cluster.workers)
            together = "all workers at once" if synchronous else "each worker by itself"
            return f"workers and the centre move {rate:.3g} of their distance towards each other, {together}"
        case AshlOptions(share=share):
            weight = "in proportion to its share of the data" if share == "data" else "equally"
            return f"workers push the weight change of their local steps, all at the same time; a push counts {weight}"
        case AdspOptions():
            return "workers push the weight change of their local steps, equally often, and do not wait"
        case AllReduceOptions():
            return "each update is the mean of all workers' gradients, summed among the workers"
        case StanzaOptions():
            return "one model with separated layers; each update is the mean of all convolution workers' batches"
        case LocalSgdOptions(steps=steps, outer_lr=1.0, outer_momentum=0.0):
            return f"every {steps} iterations all workers' weights become their mean"
        case LocalSgdOptions(steps=steps, outer_lr=lr, outer_momentum=momentum):
            outer = f"outer learning rate {lr:g} and momentum {momentum:g}"
            return f"every {steps} iterations all workers' weights step towards their mean with {outer} (DiLoCo)"
        case GossipOptions(mode="permutation", topology=topology):
            return f"all workers average their weights at once, each with a peer drawn by permutation ({topology})"
        case GossipOptions(mode=mode, topology=topology):
            does = {
                "pull": "reads the weights of a peer and averages",
                "push": "sends its weights to a peer and averages its own with those received",
                "push-sum": "sends half of its weights to a peer and adds those received to its own",
            }
            return f"each worker {does[mode]}, without waiting; peers are drawn from the seed ({topology})"


def _k(paradigm: FirstKOptions) -> str:
    return str(paradigm.k) if isinstance(paradigm.k, int) else "k"


def _late(paradigm: FirstKOfAVersionOptions) -> str:
    if paradigm.cancel == "drop":
        return "late gradients are dropped"
    return f"late gradients are cancelled between their {paradigm.micro_batches} micro-batches"


def _stale(paradigm: FirstKOfAnyOptions) -> str:
    bound = ""
    if paradigm.staleness_max is None:
        bound = f"; gradients older than 2 workers / {_k(paradigm)} updates are dropped"
    elif paradigm.staleness_max < math.inf:
        bound = f"; gradients older than {paradigm.staleness_max:g} updates are dropped"
    return bound + ("; the weight of a gradient is 1 / age" if paradigm.staleness_weight == "inverse" else "")


def _ranks(role: str, first: int, n: int) -> str:
    return f"{role} {first}" if n == 1 else f"{role}s {first} to {first + n - 1}"
