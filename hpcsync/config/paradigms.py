"""The `[paradigm]` of the job file: synchronisation of the workers."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, ValidationInfo, field_validator

from hpcsync.config.base import Count, NotNegative, Positive, Share, Table
from hpcsync.config.errors import JobError
from hpcsync.config.stanza import StanzaOptions
from hpcsync.planning.commit_rate_search import most_commits

# ---- with parameter servers ----


class ServedOptions(Table):
    """Options of a paradigm with parameter servers."""

    @property
    def bound(self) -> str:
        """Description of the synchronisation, for messages."""
        return "no worker waits for another"

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of `hpcsync.paradigms.create`, without name and number of workers."""
        return self.model_dump(exclude={"name"})


class BspOptions(ServedOptions):
    """Bulk synchronous parallel: a barrier in every iteration."""

    name: Literal["bsp"]

    @property
    def bound(self) -> str:
        """Description of the synchronisation, for messages."""
        return "all workers wait for each other in every iteration"


class AspOptions(ServedOptions):
    """Asynchronous parallel: no synchronisation."""

    name: Literal["asp"]


class SspOptions(ServedOptions):
    """Stale synchronous parallel.

    Parameters
    ----------
    staleness
        Largest lead in iterations over the slowest worker with which a worker continues.
    """

    name: Literal["ssp"]
    staleness: int | float = Field(description="a whole number of at least 0, or inf")

    @field_validator("staleness", mode="before")
    @classmethod
    def _whole_or_inf(cls, staleness: Any) -> Any:
        if staleness != math.inf and (type(staleness) is not int or staleness < 0):
            raise ValueError("must be a whole number of at least 0, or inf")
        return staleness

    @property
    def bound(self) -> str:
        """Description of the synchronisation, for messages."""
        return f"a worker more than {self.staleness} iterations ahead of the slowest waits for it"


class DsspOptions(ServedOptions):
    """Dynamic stale synchronous parallel.

    Parameters
    ----------
    staleness_min
        Lead in iterations up to which a worker continues without credits.
    staleness_max
        Largest lead in iterations for which credits are granted.
    mode
        "bounded" never exceeds `staleness_max`; "paper" follows the published algorithm, which can.
    """

    name: Literal["dssp"]
    staleness_min: Annotated[int, Field(ge=0)] = Field(description="a whole number of at least 0")
    staleness_max: Annotated[int, Field(ge=0)] = Field(description="a whole number of at least staleness_min")
    mode: Literal["bounded", "paper"] = "bounded"

    @field_validator("staleness_max")
    @classmethod
    def _ordered(cls, staleness_max: int, info: ValidationInfo) -> int:
        if "staleness_min" in info.data and staleness_max < info.data["staleness_min"]:
            raise ValueError(f"must be at least paradigm.staleness_min = {info.data['staleness_min']}")
        return staleness_max

    @property
    def bound(self) -> str:
        """Description of the synchronisation, for messages."""
        at_most = f"with credits {self.staleness_max}" if self.mode == "bounded" else "without credits"
        return f"a worker more than {self.staleness_min} ({at_most}) iterations ahead of the slowest waits for it"


K = 'a whole number of at least 1, or one of "state", "loss", "min"'


class FirstKOptions(ServedOptions):
    """Each update uses k contributions.

    Parameters
    ----------
    k
        Contributions of an update, or the policy that adapts k during the run: the workers' "state", the "loss", or
        the "min" of both.
    k_min, k_start
        Least k of a policy, and its first k; only with a policy.
    """

    name: str
    k: int | Literal["state", "loss", "min"] = Field(description=K)
    k_min: Count | None = Field(default_factory=lambda data: 1 if isinstance(data.get("k"), str) else None)
    k_start: Count | None = None

    @field_validator("k", mode="before")
    @classmethod
    def _whole_or_chosen(cls, k: Any) -> Any:
        if k not in ("state", "loss", "min") and (type(k) is not int or k < 1):
            raise ValueError(f"must be {K}")
        return k

    @field_validator("k_min", "k_start")
    @classmethod
    def _of_a_k_that_changes(cls, chosen: int | None, info: ValidationInfo) -> int | None:
        if chosen is not None and isinstance(k := info.data.get("k"), int):
            raise ValueError(f"must be omitted beside paradigm.k = {k}, which does not change")
        return chosen

    @field_validator("k_start")
    @classmethod
    def _not_below(cls, k_start: int | None, info: ValidationInfo) -> int | None:
        if k_start is not None and (k_min := info.data.get("k_min")) is not None and k_start < k_min:
            raise ValueError(f"must be at least paradigm.k_min = {k_min}")
        return k_start

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of `hpcsync.paradigms.create`, which do not include the worker's micro-batches."""
        return self.model_dump(exclude={"name", "micro_batches"} | ({"k_min"} if self.k_min is None else set()))

    def k_at_first(self, n_workers: int) -> int:
        """Return the k of the first update."""
        if isinstance(self.k, int):
            return self.k
        return self.k_start or (n_workers if self.k == "state" else self.k_min or 1)

    @property
    def bound(self) -> str:
        """Description of the synchronisation, for messages."""
        if "batch" in self.name:  # a worker may contribute several times
            return super().bound
        return f"a worker that has pushed waits until {self.k if isinstance(self.k, int) else 'k'} workers have pushed"

    @property
    def smallest_k(self) -> int:
        """The least k of the run."""
        return self.k if isinstance(self.k, int) else self.k_min or 1

    def check(self, n_workers: int) -> None:
        """Raise JobError if there are fewer workers than contributions to an update."""
        for key in ("k", "k_min", "k_start"):
            value = getattr(self, key)
            if isinstance(value, int) and value > n_workers:
                raise JobError(f"paradigm.{key} = {value}: must be at most cluster.workers = {n_workers}")


class FirstKOfAVersionOptions(FirstKOptions):
    """All contributions to an update are computed from the version before it; late ones are dropped.

    Parameters
    ----------
    cancel
        "drop": a late worker finishes its iteration and the contribution is dropped. "abort": it stops at its next
        micro-batch.
    micro_batches
        Number of micro-batches of a batch.
    """

    cancel: Literal["drop", "abort"] = "drop"
    micro_batches: Count = 4


class KSyncOptions(FirstKOfAVersionOptions):
    """K-sync: each update uses the first k workers to contribute."""

    name: Literal["k-sync"]


class KBatchSyncOptions(FirstKOfAVersionOptions):
    """K-batch-sync: each update uses the first k contributions, several of which may be of one fast worker."""

    name: Literal["k-batch-sync"]


class FirstKOfAnyOptions(FirstKOptions):
    """Contributions count whatever version they were computed from; nothing is cancelled.

    Parameters
    ----------
    staleness_max
        Largest staleness in updates; older contributions are dropped. inf: no bound, the default with a fixed k. None:
        ceil(2 workers / k) of the current k, the default with a policy.
    staleness_weight
        Weight of a contribution: "none" is 1, "inverse" 1 / staleness for a staleness from 1 on (the default with a
        policy).
    """

    staleness_max: Annotated[float, Field(ge=0)] | None = Field(
        default_factory=lambda data: None if isinstance(data.get("k"), str) else math.inf
    )
    staleness_weight: Literal["none", "inverse"] = Field(
        default_factory=lambda data: "inverse" if isinstance(data.get("k"), str) else "none"
    )


class KAsyncOptions(FirstKOfAnyOptions):
    """K-async: each update uses k workers, which wait for it; the others continue."""

    name: Literal["k-async"]


class KBatchAsyncOptions(FirstKOfAnyOptions):
    """K-batch-async: each update uses any k contributions; no worker waits."""

    name: Literal["k-batch-async"]


class EasgdOptions(ServedOptions):
    """Elastic averaging SGD (EASGD): a worker and the servers' centre move towards each other.

    Parameters
    ----------
    period
        Iterations from one move to the next.
    alpha, beta
        Share of their distance by which each moves (alpha), or workers x alpha (beta). At most one of them; by default
        beta is 0.9.
    synchronous
        If True, all workers move at the same time.
    """

    name: Literal["easgd"]
    period: Count = 10
    alpha: Annotated[float, Field(ge=0, le=1)] | None = None
    beta: NotNegative | None = None
    synchronous: bool = False

    @field_validator("beta")
    @classmethod
    def _one_rate(cls, beta: float | None, info: ValidationInfo) -> float | None:
        if beta is not None and (alpha := info.data.get("alpha")) is not None:
            raise ValueError(f"must be omitted beside paradigm.alpha = {alpha}")
        return beta

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of `hpcsync.paradigms.create`; the period and the rate concern the workers alone."""
        return {"synchronous": self.synchronous}

    @property
    def bound(self) -> str:
        """Description of the synchronisation, for messages."""
        if self.synchronous:
            return f"all workers wait for each other every {self.period} iterations"
        return super().bound

    def moving_rate(self, n_workers: int) -> float:
        """Return alpha."""
        return self.alpha if self.alpha is not None else (0.9 if self.beta is None else self.beta) / n_workers

    def check(self, n_workers: int) -> None:
        """Raise JobError for a rate with which workers and centre diverge."""
        limit = 2 / (n_workers + 1) if self.synchronous else 1.0
        if self.moving_rate(n_workers) > limit:
            key, factor = ("beta", n_workers) if self.alpha is None else ("alpha", 1)
            raise JobError(
                f"paradigm.{key} = {getattr(self, key)}: must be at most {limit * factor:g} with "
                f"cluster.workers = {n_workers}: above that, workers and centre diverge"
            )


class AshlOptions(ServedOptions):
    """ASHL: numbers of local steps with which all workers are expected to push at the same time.

    After profiling, one step per push, workers make many local steps (coarse stage), and later few (fine stage).

    Parameters
    ----------
    steps_coarse, steps_fine
        Local steps of the slowest worker in each stage; those of the others follow from them.
    staleness
        Largest lead in pushes over the slowest worker with which a worker continues in the fine stage.
    ratio_coarse, ratio_fine
        Share of the contribution that the slowest worker sends, if the compression takes a ratio; workers that would
        wait for others send more.
    loss_preset
        Average loss at which the fine stage begins; by default it begins on a plateau.
    plateau
        A plateau is an improvement of the loss by less than this share of itself over five rounds.
    share
        Weight of a push: its share of the data ("data"), or equal for all.
    warmup, profiled
        Pushes of each worker before profiling, and those that are profiled.
    """

    name: Literal["ashl"]
    steps_coarse: Count = 16
    steps_fine: Count = Field(default_factory=lambda data: min(4, data.get("steps_coarse", 4)))
    staleness: Annotated[int, Field(ge=0)] = 2
    ratio_coarse: Share = 0.05
    ratio_fine: Share = 0.1
    loss_preset: Annotated[float, Field(allow_inf_nan=False)] | None = None
    plateau: Annotated[float, Field(gt=0, lt=1)] = 0.01
    share: Literal["data", "equal"] = "data"
    warmup: Annotated[int, Field(ge=0)] = 10
    profiled: Annotated[int, Field(ge=2)] = 20

    @field_validator("steps_fine")
    @classmethod
    def _finer(cls, steps_fine: int, info: ValidationInfo) -> int:
        if (steps_coarse := info.data.get("steps_coarse")) is not None and steps_fine > steps_coarse:
            raise ValueError(f"must be at most paradigm.steps_coarse = {steps_coarse}")
        return steps_fine

    @property
    def bound(self) -> str:
        """Description of the synchronisation, for messages."""
        return f"in the fine stage a worker more than {self.staleness} pushes ahead of the slowest waits for it"


class AdspOptions(ServedOptions):
    """ADSP: workers make local steps without waiting, and all commit equally often.

    Parameters
    ----------
    check_period_s
        Length of a period in seconds.
    interval_min_s
        Least time between two commits of a worker in seconds.
    rule
        "cumulative" makes up for missed commits, as in the paper; "released" uses the same number of commits for all,
        as in the authors' code.
    commits
        Commits of each worker in a period; by default the number is searched for.
    search_every_s
        Seconds from the end of a search to the next one.
    loss_rise
        A search also begins if the average loss has risen by this share over a period.
    loss_target
        Target loss of a search, which maximises the speed of reaching it; by default half of the loss at its start.
    """

    name: Literal["adsp"]
    check_period_s: Positive = 60.0
    interval_min_s: Positive = Field(default_factory=lambda data: data.get("check_period_s", 60.0) / 6)
    rule: Literal["cumulative", "released"] = "cumulative"
    commits: Count | None = None
    search_every_s: Positive = Field(default_factory=lambda data: data.get("check_period_s", 60.0) * 1000 / 60)
    loss_rise: Positive = 0.3
    loss_target: Annotated[float, Field(allow_inf_nan=False)] | None = None

    @field_validator("interval_min_s")
    @classmethod
    def _within_a_period(cls, interval_min_s: float, info: ValidationInfo) -> float:
        if (period_s := info.data.get("check_period_s")) is not None and interval_min_s > period_s:
            raise ValueError(f"must be at most paradigm.check_period_s = {period_s:g}")
        return interval_min_s

    @field_validator("commits")
    @classmethod
    def _as_many_as_fit(cls, commits: int | None, info: ValidationInfo) -> int | None:
        if commits is not None and {"check_period_s", "interval_min_s"} <= info.data.keys():
            period_s, interval_s = info.data["check_period_s"], info.data["interval_min_s"]
            if commits > (most := most_commits(period_s, interval_s)):
                raise ValueError(
                    f"must be at most {most}: commits are paradigm.interval_min_s = {interval_s:g} apart, "
                    f"in paradigm.check_period_s = {period_s:g}"
                )
        return commits

    @property
    def first_commit_s(self) -> float:
        """Seconds after which the first pushes are due."""
        return max(self.interval_min_s, self.check_period_s / (self.commits or 1))


# ---- without servers ----


class AllReduceOptions(Table):
    """All-reduce: each update uses the mean of all workers' gradients, which the workers sum themselves.

    Parameters
    ----------
    bucket_mb
        Size in MB of a bucket of the gradient, which is summed while the rest is still being computed.
    """

    name: Literal["allreduce"]
    bucket_mb: Positive = 25.0

    @property
    def bound(self) -> str:
        """Description of the synchronisation, for messages."""
        return "all workers wait for each other in every iteration"


class LocalSgdOptions(Table):
    """Local SGD: every `steps` iterations the workers' weights are replaced by their mean.

    Parameters
    ----------
    steps
        Local steps from one averaging to the next.
    outer_lr, outer_momentum
        Learning rate and Nesterov momentum of an outer SGD towards the mean (DiLoCo); with 1 and 0, the defaults, the
        step leads to the mean itself.
    """

    name: Literal["local-sgd"]
    steps: Count = Field(description="a whole number of at least 1: local steps from one averaging to the next")
    outer_lr: Positive = 1.0
    outer_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0

    @property
    def bound(self) -> str:
        """Description of the synchronisation, for messages."""
        return f"all workers wait for each other every {self.steps} iterations"


class GossipOptions(Table):
    """Gossip: a worker averages its weights with those of a peer.

    Parameters
    ----------
    mode
        "pull" reads the peer's weights, "push" sends the worker's own, "push-sum" sends half of them and half of a
        weight; these are asynchronous. "permutation" is synchronous: all exchange at once, and each worker is drawn
        once.
    topology
        Peers to draw from. With "exponential" they are not drawn but visited in turn, at distances 1, 2, 4, ...
    include_self
        True if a worker may draw itself, and then keeps its weights. The default, except with the exponential topology.
    period
        Iterations from one exchange to the next.
    """

    name: Literal["gossip"]
    mode: Literal["pull", "push", "push-sum", "permutation"] = Field(
        description='one of "pull", "push", "push-sum", "permutation"'
    )
    topology: Literal["complete", "ring", "exponential"] = "complete"
    include_self: bool = Field(default_factory=lambda data: data.get("topology") != "exponential")
    period: Count = 1

    @field_validator("include_self")
    @classmethod
    def _visits_others(cls, include_self: bool, info: ValidationInfo) -> bool:
        if include_self and info.data.get("topology") == "exponential":
            raise ValueError('must be false with paradigm.topology = "exponential", which visits the others in turn')
        return include_self

    @property
    def bound(self) -> str:
        """Description of the synchronisation, for messages."""
        if self.mode == "permutation":
            return f"all workers wait for each other every {self.period} iterations"
        return "no worker waits for another"


ParadigmOptions = Annotated[
    BspOptions
    | AspOptions
    | SspOptions
    | DsspOptions
    | KSyncOptions
    | KBatchSyncOptions
    | KAsyncOptions
    | KBatchAsyncOptions
    | EasgdOptions
    | AshlOptions
    | AdspOptions
    | AllReduceOptions
    | LocalSgdOptions
    | GossipOptions
    | StanzaOptions,
    Discriminator("name"),
]

WITHOUT_SERVER = (AllReduceOptions, LocalSgdOptions, GossipOptions, StanzaOptions)
