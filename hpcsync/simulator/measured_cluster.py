"""A cluster of a simulation as a run has measured it: the computation times of its workers, and their links.

Unlike `replayed_times`, which repeats a run's own times for the same paradigm, this gives a `[cluster]` under which any
paradigm can be simulated. Computation times are drawn anew from the recorded ones, in blocks of successive iterations
that are the same for all workers: stragglers last, and may be common to several.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hpcsync.config.errors import JobError
from hpcsync.config.job import Job, Script
from hpcsync.report.between import Between
from hpcsync.simulator.replayed_times import link_of
from hpcsync.trace.reader import Trace
from hpcsync.trace.schema import Rows

BLOCK = 20  # iterations that stay together
MOST_SPREAD = 3.0  # of further workers over that of the measured ones: what two leave open has no mean
RATE_SHARE = 0.75  # quantile of a worker's rates
MESSAGES = 6  # latencies of a simulated iteration with one server: of the push, the grant and the weights
LEAST = 30  # iterations of each worker, of which the first does not count


def computation_s(trace: Trace, job: Job, extrapolate: bool = False) -> list[Rows]:
    """Return the seconds of loading and computing of each worker's local steps, without the first iteration.

    Those that were cancelled are extrapolated to their full length. What a worker did between two iterations, such as
    the step of its optimizer, counts as computing of the second one.

    Parameters
    ----------
    trace
        The run.
    job
        The job that is to be simulated.
    extrapolate
        Whether it may have another number of workers.

    Raises
    ------
    JobError
        If the run had other workers or batches than the job, or too few iterations.
    """
    rows, between_s = Between.of(trace).add(trace.tables["pushes" if trace.job.has_servers else "exchanges"])
    assert not isinstance(job.workload, Script)
    steps, share = np.ones(len(rows), int), np.ones(len(rows))
    if trace.job.has_servers:
        steps, share = np.maximum(rows["local_steps"], 1), rows["share"]
    sizes = set(np.unique(rows["batch_size"] // steps).tolist())
    for name, needed, found, remedy in (
        ("cluster.workers", job.cluster.workers, {trace.n_workers}, "; or give --extrapolate"),
        ("workload.batch_size", job.workload.batch_size, sizes, ""),
    ):
        others = sorted(found - {needed})
        if others and not (extrapolate and remedy):
            measured = ", ".join(map(str, others))
            raise JobError(f"--from {trace.path}: must be of a run with {name} = {needed}, it has {measured}{remedy}")
    seconds = (between_s + rows["load_s"] + rows["compute_s"] / share) / steps
    each = []
    for worker in range(trace.n_workers):
        own = rows["worker"] == worker
        each.append(np.repeat(seconds[own][1:], steps[own][1:]))
        if len(each[-1]) < LEAST:
            n = len(each[-1])
            raise JobError(
                f"--from {trace.path}: must have {LEAST} iterations of every worker; worker {worker} has {n}"
            )
    return each


class Links(NamedTuple):
    """Rates of links in Gbit/s: of each worker's, and of a server's."""

    workers: list[float]
    server: float


def links(trace: Trace) -> Links | None:
    """Return the rates that a run has measured; None if its transfers took no time.

    With servers, a worker's rate is the upper quartile of those of its pushes, most of which meet few others on the
    servers' links. A server's rate is its part of that of all pushes together while there was at least one: as much as
    its link was seen to carry. It is the least of a colocated worker, whose bytes to its own server use no link. Where
    pushes are compressed, and without servers, a rate is the median of the bytes of an iteration over its time of
    communication, and a server's link is taken to be as wide as the widest of the workers'.
    """
    rows, n_servers = trace.tables["pushes" if trace.job.has_servers else "exchanges"], trace.job.cluster.servers
    rows = rows[(rows["wire_bytes"] > 0) & (rows["comm_s"] > 0)]
    if trace.job.has_servers and not trace.job.compresses:
        seconds = rows["comm_s"] - rows["pull_s"]
        rows, seconds = rows[seconds > 0], seconds[seconds > 0]
        n_bytes, share = rows["wire_bytes"] / 2, RATE_SHARE  # a gradient is as large as the weights that are read
        if trace.job.cluster.colocated:
            n_bytes = n_bytes * np.where(rows["worker"] < n_servers, 1.0 - 1.0 / n_servers, 1.0)
    else:
        seconds, n_bytes, share = rows["comm_s"], rows["wire_bytes"], 0.5
    if len(np.unique(rows["worker"])) < trace.n_workers:
        return None
    rates = 8e-9 * n_bytes / seconds
    workers = [float(np.quantile(rates[rows["worker"] == worker], share)) for worker in range(trace.n_workers)]
    if share < RATE_SHARE:
        return Links(workers, max(workers))
    begin_s, sent = rows["end_s"], n_bytes > 0
    if not sent.any():
        return None  # the only worker is beside the only server
    server = 8e-9 * float(n_bytes.sum()) / _covered_s(begin_s[sent], (begin_s + seconds)[sent]) / n_servers
    if trace.job.cluster.colocated:
        workers[:n_servers] = [max(rate, server) for rate in workers[:n_servers]]
    return Links(workers, server)


def pushes_at_once(trace: Trace) -> float:
    """Return how many pushes, in the mean, were under way during those that show a worker's rate: 1 if these met none.

    Where all of these met others, nothing shows whether the worker's link is as narrow as its rate, or the server's
    link was shared: the link may be so many times as wide. It is the largest such number of a worker, and 1 where the
    rates are not those of pushes.
    """
    rows = trace.tables["pushes"]
    seconds = rows["comm_s"] - rows["pull_s"]
    chosen = (rows["wire_bytes"] > 0) & (seconds > 0)
    if not trace.job.has_servers or trace.job.compresses or not chosen.any():
        return 1.0
    rows, seconds = rows[chosen], seconds[chosen]
    begin_s, end_s = rows["end_s"], rows["end_s"] + seconds

    def begun_before(at_s: Rows, times_s: Rows) -> Rows:
        """Return the time from those of the given times that are before a moment to this moment, in all."""
        times_s = np.sort(times_s)
        n = np.searchsorted(times_s, at_s)
        return n * at_s - np.append(0.0, np.cumsum(times_s))[n]

    under_way_s = [begun_before(at_s, begin_s) - begun_before(at_s, end_s) for at_s in (begin_s, end_s)]
    met = (under_way_s[1] - under_way_s[0]) / seconds
    rates, most = rows["wire_bytes"] / seconds, 1.0
    for worker in range(trace.n_workers):
        own = rows["worker"] == worker
        if own.any():
            most = max(most, float(met[own & (rates >= np.quantile(rates[own], RATE_SHARE))].mean()))
    return most


def _covered_s(begin_s: Rows, end_s: Rows) -> float:
    """Return the length of the union of intervals."""
    order = np.argsort(begin_s)
    ends = np.maximum.accumulate(end_s[order])
    gaps = np.maximum(0.0, begin_s[order][1:] - ends[:-1])
    return float(ends[-1] - begin_s.min() - gaps.sum())


def stand_ins(n_measured: int, n_workers: int, seed: int) -> list[int]:
    """Return for each of these workers the measured one that it takes after, in how its times vary and in its link.

    As many workers as were measured are these. Of fewer, each seed draws some. Further ones are drawn such that each
    measured worker stands for equally many, or for one more.
    """
    if n_workers == n_measured:
        return list(range(n_measured))
    draw = np.random.default_rng([seed, n_measured, n_workers])
    if n_workers < n_measured:
        return sorted(draw.permutation(n_measured)[:n_workers].tolist())
    rounds = [draw.permutation(n_measured) for _ in range(n_workers // n_measured)]
    return [*range(n_measured), *np.concatenate(rounds).tolist()][:n_workers]


def slowdowns(seconds: Sequence[float], seed: int, n_workers: int) -> Rows:
    """Return the mean time of each worker over that of the measured one that it takes after: 1 for a measured one.

    The workers are taken for a sample of a population whose mean times are log-normal, with an unknown mean and spread.
    A seed draws both as the measured times leave them open, and then the time of each further worker (Gelman et al.;
    prior 1 / variance). The spread is at most `MOST_SPREAD` times that of the measured workers. A single worker shows
    no spread, so others are as it is.

    Parameters
    ----------
    seconds
        Mean time of each measured worker.
    seed
        Seed of the draw.
    n_workers
        Number of workers.
    """
    n, levels = len(seconds), np.log(seconds)
    factors = np.ones(n_workers)
    if 1 < n < n_workers:
        draw = np.random.default_rng([seed, n, n_workers, 1])
        spread = levels.std(ddof=1) * min(MOST_SPREAD, np.sqrt((n - 1) / draw.chisquare(n - 1)))
        centre = levels.mean() + spread / np.sqrt(n) * draw.standard_normal()
        further = centre + spread * draw.standard_normal(n_workers - n)
        factors[n:] = np.exp(further - levels[stand_ins(n, n_workers, seed)[n:]])
    return factors


def resampled(each: list[Rows], seed: int, n_workers: int | None = None) -> list[Rows]:
    """Return as many times of each worker as the shortest record has, drawn in blocks.

    They are drawn twice, first blocks that the run might have recorded, and then some of these, so that seeds differ by
    what another run would differ by and by what the record of this one leaves open.

    The measured workers share the blocks. Further workers have blocks and speeds of their own, so that no two workers
    are slow at the same moments because both take after one.

    Parameters
    ----------
    each
        Times of each measured worker.
    seed
        Seed of the draw.
    n_workers
        Number of workers; by default as many as were measured.
    """
    n, n_workers = min(map(len, each)), n_workers or len(each)
    block = min(BLOCK, n)

    def places(*key: int) -> Rows:
        draw = np.random.default_rng([seed, n, *key])
        recorded = draw.integers(0, n - block + 1, size=-(-n // block))
        begins = draw.choice(recorded, len(recorded))
        return (begins[:, None] + np.arange(block)).ravel()[:n]

    shared = places()
    measured = stand_ins(len(each), n_workers, seed)
    factors = slowdowns([times.mean() for times in each], seed, n_workers)
    return [
        factors[worker] * each[measured[worker]][shared if worker < len(each) else places(worker)]
        for worker in range(n_workers)
    ]


def write_table(each: list[Rows], path: Path) -> None:
    """Write times as a file for ``cluster.compute.table``."""
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(("worker", "iteration", "seconds"))
        for worker, seconds in enumerate(each):
            rows.writerows((worker, i, repr(float(second))) for i, second in enumerate(seconds))


def turnaround_s(trace: Trace) -> float:
    """Return the seconds from a push to its grant beside waiting for other workers; 0 without servers.

    It is the mean over rounds, of as many successive pushes as there are workers, of the least wait: who comes last
    waits for nobody. The update, messages, and processes that share a core are in it.
    """
    if not trace.job.has_servers:
        return 0.0
    rows, n = trace.tables["pushes"], trace.n_workers
    waits = rows[rows["iteration"] > 1]["wait_s"]
    waits = waits[: len(waits) // n * n].reshape(-1, n)
    return float(waits.min(axis=1).mean()) if len(waits) else 0.0


def network(trace: Trace, seed: int = 0, n_workers: int | None = None, with_servers: bool = True) -> dict[str, Any]:
    """Return the ``[cluster.network]`` that a run has measured; empty if its transfers took no time.

    Nothing shows that more workers would find a wider link at the server. The latency is such that all messages of an
    iteration together take the turnaround; that of transfers is in the rates. Of a recorded loop, transfers to servers
    take the times of the link that it has measured, and others those of its all-reduces.

    Parameters
    ----------
    trace
        The run.
    seed, n_workers
        See `stand_ins`; by default the workers that were measured.
    with_servers
        Whether the simulated paradigm has servers.
    """
    n_workers = n_workers or trace.n_workers
    if with_servers and (link := link_of(trace.attributes)) is not None:
        return link.network(_gradient_bytes(trace), n_workers).model_dump()
    if (found := links(trace)) is None:
        return {}
    of = stand_ins(trace.n_workers, n_workers, seed)
    return {
        "bandwidth_gbit": [found.workers[measured] for measured in of],
        "server_bandwidth_gbit": found.server,
        "latency_us": 1e6 * turnaround_s(trace) / MESSAGES,
    }


def _gradient_bytes(trace: Trace) -> int:
    """Return the bytes of a gradient of a recorded loop, from those that a worker sends in a ring."""
    sent, n = float(np.median(trace.tables["exchanges"]["wire_bytes"])), trace.n_workers
    return round(sent * n / (2 * (n - 1)))
