"""The `[cluster]` of the job file: ranks, compute times, changes during the run, and the network."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, ValidationInfo, field_validator, model_validator

from hpcsync.config.base import LEAST, MOST, Amount, Count, Table, Time, missing, one_or_each
from hpcsync.config.errors import JobError, shown
from hpcsync.config.time_table import read_times

# ---- compute times ----


SECONDS = f"a number from 0 to {MOST:g}, or a list of them, one per worker"
Seconds = Annotated[float | tuple[float, ...], one_or_each(float, lambda x: 0 <= x <= MOST, SECONDS)]

# fixed_share: part of an iteration's time, at the job's batch size, that is independent of the number of samples.
# backward_share: the last part of the iteration, in which the gradient becomes complete, its last elements first.
Fraction = Annotated[float, Field(ge=0, le=1)]


class Constant(Table):
    """Constant compute times of `seconds`."""

    model: Literal["constant"]
    seconds: Seconds = Field(description=SECONDS)
    fixed_share: Fraction = 0.0
    backward_share: Fraction = 0.0


class LogNormal(Table):
    """Log-normal compute times; `seconds` is the median, `jitter` the standard deviation of the logarithm."""

    model: Literal["lognormal"]
    seconds: Seconds = Field(description=SECONDS)
    jitter: Annotated[float, Field(ge=0, le=10)] = 0.2
    fixed_share: Fraction = 0.0
    backward_share: Fraction = 0.0


class Exponential(Table):
    """Exponential compute times; `seconds` is the mean."""

    model: Literal["exponential"]
    seconds: Seconds = Field(description=SECONDS)
    fixed_share: Fraction = 0.0
    backward_share: Fraction = 0.0


class RecordedCompute(Table):
    """Compute times from a CSV file with the columns worker, iteration (both from 0) and seconds; see `read_times`."""

    model: Literal["table"]
    table: str = Field(description="a CSV file with the columns worker,iteration,seconds")
    fixed_share: Fraction = 0.0
    backward_share: Fraction = 0.0


Compute = Annotated[Constant | LogNormal | Exponential | RecordedCompute, Discriminator("model")]


# ---- changes during the run ----


class ClusterEvent(Table):
    """A change of one worker during the run.

    Parameters
    ----------
    worker
        The worker, from 0.
    at_s, at_iteration
        Time of the change: seconds since the start of the run, or the worker's iteration (from 1) at whose start it
        happens. Exactly one is given.
    change
        "slow": iterations take `factor` times as long from then on; factors replace each other. "recover": a factor of
        1. "leave": the worker leaves instead of starting an iteration. "join": it is active again; a worker that has
        not left before is active only from then on. "die": simulation only; a process of the worker dies, and
        with on_death = "restart" all ranks restart from the last checkpoint.
    factor
        Slowdown of a "slow" device.
    restart_s
        Seconds from a death until the restarted ranks train.
    """

    worker: int = Field(description="the number of a worker, from 0")
    at_s: Time | None = None
    at_iteration: Count | None = None
    change: Literal["slow", "recover", "leave", "join", "die"] = Field(
        description='"slow", "recover", "leave", "join" or "die"'
    )
    factor: Amount | None = None
    restart_s: Time | None = None

    @field_validator("at_iteration")
    @classmethod
    def _one_moment(cls, at_iteration: int | None, info: ValidationInfo) -> int | None:
        if at_iteration is not None and info.data.get("at_s") is not None:
            raise ValueError(f"must be omitted beside at_s = {info.data['at_s']}")
        return at_iteration

    @field_validator("factor", "restart_s")
    @classmethod
    def _of_one_change(cls, value: float | None, info: ValidationInfo) -> float | None:
        change = info.data.get("change")  # None: it is wrong itself
        if value is not None and change not in (None, {"factor": "slow", "restart_s": "die"}[str(info.field_name)]):
            raise ValueError(f'must be omitted: change = "{change}" has none')
        return value

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.at_s is None and self.at_iteration is None:
            raise missing("at_s", "seconds since the start of the run (or at_iteration: the worker's, from 1)")
        if self.change == "slow" and self.factor is None:
            raise missing("factor", "a number greater than 0: how many times as long iterations take")
        if self.change == "die" and self.restart_s is None:
            raise missing("restart_s", "seconds from the death until the restarted ranks train")
        return self


def absences(events: Iterable[ClusterEvent]) -> list[tuple[float, float]]:
    """Return the intervals during which a worker is absent, (from, to) in seconds, in order.

    Parameters
    ----------
    events
        Changes of one worker; only "leave" and "join" at a time count.

    Returns
    -------
    list of tuple of float
        The end of the last interval is inf if the worker does not join again.

    Raises
    ------
    ValueError
        If the worker would join without having left.
    """
    timed = [(e.at_s, e) for e in events if e.change in ("leave", "join") and e.at_s is not None]
    timed.sort(key=lambda moment: moment[0])
    found: list[tuple[float, float]] = []
    since_s = 0.0 if timed and timed[0][1].change == "join" else math.inf
    for at_s, event in timed:
        if event.change == "leave":
            since_s = min(since_s, at_s)
        elif since_s >= at_s:
            raise ValueError(f"worker {event.worker} must leave before it joins at {at_s:g} s")
        else:
            found.append((since_s, at_s))
            since_s = math.inf
    return found if since_s == math.inf else [*found, (since_s, math.inf)]


def _tables(events: Any) -> Any:
    if not isinstance(events, list | tuple):
        raise ValueError("must be a list of tables, each of them [[cluster.events]]")
    return tuple(events)


# ---- network ----

BANDWIDTH = f"a number from {LEAST:g} to {MOST:g}, or a list of them, one per worker"
Bandwidth = Annotated[float | tuple[float, ...], one_or_each(float, lambda x: LEAST <= x <= MOST, BANDWIDTH)]


class Network(Table):
    """The network of a simulation; real ranks use the one they are on.

    Links are full duplex: every rank has an uplink and a downlink, each of the rank's bandwidth.

    Parameters
    ----------
    bandwidth_gbit
        Bandwidth of the workers, or of each worker, in Gbit/s.
    server_bandwidth_gbit
        Bandwidth of each server in Gbit/s; by default the largest of the workers'.
    latency_us
        Latency of one message from rank to rank in microseconds.
    """

    bandwidth_gbit: Bandwidth = 10.0
    server_bandwidth_gbit: Amount | None = None
    latency_us: Time = 50.0

    def rates(self, n_servers: int, n_workers: int) -> list[float]:
        """Return the bytes per second of each rank's links, servers first; of each node's, without servers."""
        given = self.bandwidth_gbit
        workers = [given] * n_workers if isinstance(given, float) else list(given)
        server = self.server_bandwidth_gbit or max(workers)
        return [gbit * 1e9 / 8 for gbit in [server] * n_servers + workers]


def _is_away(away: Sequence[tuple[float, float]], at_s: float) -> bool:
    """Return True if a worker with these absences is certainly absent at this time."""
    return any(since_s <= at_s <= until_s for since_s, until_s in away)


# ---- the cluster ----


class Cluster(Table):
    """Ranks, devices and network.

    Parameters
    ----------
    servers, workers
        Number of ranks of each kind.
    device
        Device of the ranks; "auto" is a GPU if there is one.
    window
        Memory through which tensors move between ranks: "host" is an MPI window in host memory, "mpi" one in GPU
        memory, "ipc" GPU memory that the ranks of a node open, "staged" page-locked host memory to and from which a GPU
        copies, and "auto" the fastest that works.
    placement
        "packed": the servers are the first ranks that were started; "spread": each is on a node of its own, as far as
        there are enough nodes.
    colocated
        Whether server i is on the node of worker i, and shares its link; the servers are on different nodes, as far as
        there are enough.
    on_death
        Reaction to the death of a rank's process: "end" ends the run, with "continue" the other ranks continue, and
        with "restart" `hpcsync run` starts the ranks that are left again, from the last checkpoint.
    workers_min
        Fewest workers with which the run may start or resume; None: all to start, and one to resume.
    times_from
        A trace, or a run's folder, whose times a simulation uses instead of `compute` and `network`.
    compute
        Compute times. Real ranks pad their iterations to them.
    network
        Network of a simulation.
    update_gbytes_per_s
        Throughput of updates in a simulation, in 10^9 bytes per second: of the contributions that a server adds to its
        weights, and of the weights to which a worker without servers adds its step. By default updates take no time.
    checkpoint_s
        Duration of a checkpoint in a simulation, in seconds, from the moment at which all workers have halted. By
        default a simulation makes no checkpoints, unless ranks die: then they take no time.
    events
        Changes during the run.
    """

    servers: Annotated[int, Field(ge=0, le=1_000_000)] = 1  # unless the job's paradigm has none
    workers: Annotated[int, Field(ge=1, le=1_000_000)] = 3
    device: Literal["auto", "cpu", "cuda"] = "auto"
    window: Literal["auto", "host", "mpi", "ipc", "staged"] = "auto"
    placement: Literal["packed", "spread"] = "packed"
    colocated: bool = False
    on_death: Literal["end", "continue", "restart"] = "end"
    workers_min: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    times_from: str | None = None
    compute: Compute | None = None
    network: Network | None = None
    update_gbytes_per_s: Amount | None = None
    checkpoint_s: Amount | None = None
    events: Annotated[tuple[ClusterEvent, ...], BeforeValidator(_tables)] = ()

    @model_validator(mode="after")
    def _within_reach(self) -> Self:
        allowed = {"cpu": ("auto", "host"), "cuda": ("auto", "mpi", "ipc", "staged")}.get(self.device, (self.window,))
        if self.window not in allowed:
            *others, last = map(shown, allowed)
            raise JobError(
                f"cluster.window = {shown(self.window)}: must be {', '.join(others)} or {last} "
                f"with cluster.device = {shown(self.device)}"
            )
        return self

    @model_validator(mode="after")
    def _at_least(self) -> Self:
        if self.workers_min is not None and self.workers_min > self.workers:
            raise JobError(
                f"cluster.workers_min = {self.workers_min}: must be at most cluster.workers = {self.workers}"
            )
        return self

    @model_validator(mode="after")
    def _colocation(self) -> Self:
        if not self.colocated:
            return self
        if self.servers > self.workers:
            raise JobError(
                f"cluster.servers = {self.servers}: must be at most cluster.workers = {self.workers} "
                "with cluster.colocated = true: server i is on the node of worker i"
            )
        if self.placement != "packed":
            raise JobError(
                f"cluster.placement = {shown(self.placement)}: must be omitted with cluster.colocated = true, which "
                "places the servers"
            )
        if self.network is not None and self.network.server_bandwidth_gbit is not None:
            raise JobError(
                f"cluster.network.server_bandwidth_gbit = {self.network.server_bandwidth_gbit:g}: must be omitted with "
                "cluster.colocated = true: servers share the links of workers"
            )
        return self

    @model_validator(mode="after")
    def _one_each(self) -> Self:
        for table, key in (("compute", "seconds"), ("network", "bandwidth_gbit")):
            each = getattr(getattr(self, table), key, None)
            if isinstance(each, tuple) and len(each) != self.workers:
                raise JobError(
                    f"cluster.{table}.{key} = {shown(each)}: must be one number, "
                    f"or a list of cluster.workers = {self.workers} numbers"
                )
        return self

    @model_validator(mode="after")
    def _events_happen(self) -> Self:
        for i, event in enumerate(self.events):
            key = f"cluster.events[{i}]"
            if not 0 <= event.worker < self.workers:
                raise JobError(
                    f"{key}.worker = {event.worker}: must be 0 to {self.workers - 1} (cluster.workers = {self.workers})"
                )
            if event.change in ("slow", "recover") and self.compute is None and self.times_from is None:
                raise JobError(
                    f"{key}.change = {shown(event.change)}: must come with [cluster.compute] or cluster.times_from, "
                    "whose times it changes"
                )
        return self

    @model_validator(mode="after")
    def _deaths_make_sense(self) -> Self:
        for i, event in enumerate(self.events):
            if event.change != "die":
                continue
            if event.at_s is None:
                raise JobError(
                    f'cluster.events[{i}].at_iteration = {event.at_iteration}: must be at_s with change = "die"'
                )
            if self.on_death != "restart":
                raise JobError(
                    f'cluster.events[{i}].change = "die": must come with cluster.on_death = "restart"; a worker '
                    'without which the others continue has change = "leave"'
                )
        return self

    @model_validator(mode="after")
    def _joins_make_sense(self) -> Self:
        joins = [(i, event) for i, event in enumerate(self.events) if event.change == "join"]
        of_each: list[list[ClusterEvent]] = [[] for _ in range(self.workers)]
        for event in self.events if joins else ():
            of_each[event.worker].append(event)
        timed: list[tuple[int, float]] = []
        for i, event in joins:
            key = f"cluster.events[{i}]"
            if event.at_s is None:
                raise JobError(f'{key}.at_iteration = {event.at_iteration}: must be at_s with change = "join"')
            if any(other.change == "leave" and other.at_s is None for other in of_each[event.worker]):
                raise JobError(f'{key}.change = "join": worker {event.worker} must leave at_s, not at_iteration')
            timed.append((i, event.at_s))
        try:
            away = [absences(events) for events in of_each]
        except ValueError as error:
            raise JobError(f"cluster.events: {error}") from None
        for i, at_s in timed:
            if all(_is_away(each, at_s) for each in away):
                raise JobError(
                    f"cluster.events[{i}].at_s = {at_s:g}: must be while another worker is active: the run ends when "
                    "none is"
                )
        return self

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.servers + self.workers

    def found(self, folder: Path) -> Cluster:
        """Return this cluster with the files that it names resolved from a folder.

        Their paths become absolute, because ranks need not start in the folder of the job file.

        Raises
        ------
        JobError
            If a file is missing or invalid.
        """
        update: dict[str, Any] = {}
        if self.times_from is not None:
            path = (folder / self.times_from).resolve()
            try:
                path = path / "trace.h5" if path.is_dir() else path
                why = None if path.is_file() else "no such file"
            except OSError as error:
                why = error.strerror
            if why is not None:
                raise JobError(f"cluster.times_from = {shown(str(path))}: must be a trace, or a run's folder; {why}")
            update["times_from"] = str(path)
        if isinstance(self.compute, RecordedCompute):
            table = str((folder / self.compute.table).resolve())
            read_times(table, self.workers)
            update["compute"] = self.compute.model_copy(update={"table": table})
        return self.model_copy(update=update)
