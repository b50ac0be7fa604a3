"""The `[paradigm]` of the job file: who waits for whom, or exchanges what with whom."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, ValidationInfo, field_validator

from hpcsync.config.base import Count, NotNegative, Positive, Share, Table
from hpcsync.config.errors import JobError
from hpcsync.config.stanza import StanzaOptions
from hpcsync.planning.commit_rate_search import most_commits

# ---- with a parameter server ----


class ServedOptions(Table):
    @property
    def bound(self) -> str:
        """Who waits for whom."""
        return "nobody waits for anybody"

    @property
    def options(self) -> dict[str, Any]:
        """What `paradigms.create` is given besides the name and the workers."""
        return self.model_dump(exclude={"name"})


class BspOptions(ServedOptions):
    name: Literal["bsp"]

    @property
    def bound(self) -> str:
        return "in every iteration all wait for all"


class AspOptions(ServedOptions):
    name: Literal["asp"]


class SspOptions(ServedOptions):
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
        return f"who is more than {self.staleness} iterations ahead of the slowest waits for it"


class DsspOptions(ServedOptions):
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
        at_most = f"with credits {self.staleness_max}" if self.mode == "bounded" else "without credits"
        return f"who is more than {self.staleness_min}, {at_most}, iterations ahead of the slowest waits for it"


K = 'a whole number of at least 1, or one of "state", "loss", "min"'


class FirstKOptions(ServedOptions):
    """Every update is made of k contributions.

    k: how many, or what chooses it during the run: the workers' "state", the "loss", or the "min" of both.
    k_min, k_start: the least that is chosen, and what the run begins with; a k that does not change has neither.
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
            raise ValueError(f"must be left out beside paradigm.k = {k}, which stays what it is")
        return chosen

    @field_validator("k_start")
    @classmethod
    def _not_below(cls, k_start: int | None, info: ValidationInfo) -> int | None:
        if k_start is not None and (k_min := info.data.get("k_min")) is not None and k_start < k_min:
            raise ValueError(f"must be at least paradigm.k_min = {k_min}")
        return k_start

    @property
    def options(self) -> dict[str, Any]:
        """How a worker cuts its batch is not about who waits."""
        return self.model_dump(exclude={"name", "micro_batches"} | ({"k_min"} if self.k_min is None else set()))

    def k_at_first(self, n_workers: int) -> int:
        """Of the first update."""
        if isinstance(self.k, int):
            return self.k
        return self.k_start or (n_workers if self.k == "state" else self.k_min or 1)

    @property
    def bound(self) -> str:
        if "batch" in self.name:  # of which a worker may push several
            return super().bound
        return f"who has pushed waits until {self.k if isinstance(self.k, int) else 'k'} workers have"

    @property
    def smallest_k(self) -> int:
        return self.k if isinstance(self.k, int) else self.k_min or 1

    def check(self, n_workers: int) -> None:
        """Raises JobError where there are fewer workers than contributions to an update."""
        for key in ("k", "k_min", "k_start"):
            value = getattr(self, key)
            if isinstance(value, int) and value > n_workers:
                raise JobError(f"paradigm.{key} = {value}: must be at most cluster.workers = {n_workers}")


class FirstKOfAVersionOptions(FirstKOptions):
    """All contributions to an update were computed from the version before it; late ones are dropped.

    cancel: whether a worker whose version is over goes on to the end of its iteration ("drop") or stops at its next
    micro-batch ("abort"). micro_batches: how many pieces it computes its batch in, where it may stop.
    """

    cancel: Literal["drop", "abort"] = "drop"
    micro_batches: Count = 4


class KSyncOptions(FirstKOfAVersionOptions):
    """Of k workers, the first to contribute."""

    name: Literal["k-sync"]


class KBatchSyncOptions(FirstKOfAVersionOptions):
    """The first k contributions, of which a fast worker may give several."""

    name: Literal["k-batch-sync"]


class FirstKOfAnyOptions(FirstKOptions):
    """Nothing is cancelled: a contribution counts whatever version it was computed from.

    staleness_max: a contribution older than so many updates is dropped; inf: none is. Unless it is said, no bound with
    a k that stays, and with one that changes ceil(2 workers / k) of the k that holds (None here).
    staleness_weight: "inverse" is 1 / staleness, from 1 on; so it is, unless it is said, with a k that changes.
    """

    staleness_max: Annotated[float, Field(ge=0)] | None = Field(
        default_factory=lambda data: None if isinstance(data.get("k"), str) else math.inf
    )
    staleness_weight: Literal["none", "inverse"] = Field(
        default_factory=lambda data: "inverse" if isinstance(data.get("k"), str) else "none"
    )


class KAsyncOptions(FirstKOfAnyOptions):
    """Of k workers, which wait for the update; the others go on."""

    name: Literal["k-async"]


class KBatchAsyncOptions(FirstKOfAnyOptions):
    """Any k contributions; nobody waits."""

    name: Literal["k-batch-async"]


class EasgdOptions(ServedOptions):
    """Every `period` iterations a worker and the centre on the server move towards each other.

    alpha: the share of their distance by which each moves; beta = workers x alpha. One of them, or else beta = 0.9.
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
            raise ValueError(f"must be left out beside paradigm.alpha = {alpha}")
        return beta

    @property
    def options(self) -> dict[str, Any]:
        """How often and how far they move is not about who waits."""
        return {"synchronous": self.synchronous}

    @property
    def bound(self) -> str:
        return f"every {self.period} iterations all wait for all" if self.synchronous else super().bound

    def moving_rate(self, n_workers: int) -> float:
        """alpha, whichever way it was given."""
        return self.alpha if self.alpha is not None else (0.9 if self.beta is None else self.beta) / n_workers

    def check(self, n_workers: int) -> None:
        """Raises JobError for a rate at which so many workers and the centre do not come together."""
        limit = 2 / (n_workers + 1) if self.synchronous else 1.0
        if self.moving_rate(n_workers) > limit:
            key, factor = ("beta", n_workers) if self.alpha is None else ("alpha", 1)
            raise JobError(
                f"paradigm.{key} = {getattr(self, key)}: must be at most {limit * factor:g} with "
                f"cluster.workers = {n_workers}: beyond it workers and centre move away from each other"
            )


class AshlOptions(ServedOptions):
    """Workers make so many local steps that all are expected to push at once, first many (coarse), then few (fine).

    Before, each is timed one step at a time, `warmup` pushes and then `profiled` ones. steps_coarse, steps_fine: local
    steps of the slowest worker, from which those of the others follow. The fine stage begins when the average loss has
    come down to `loss_preset`, or without one when it has improved by less than `plateau` of itself over five rounds;
    in it a worker waits that is more than `staleness` pushes ahead of the slowest.
    ratio_coarse, ratio_fine: the share that is sent where all else is equal, if a compression takes one; workers that
    would wait for the others send more. share: whether a push counts as the data behind it, or all count the same.
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
        return f"in the fine stage who is more than {self.staleness} pushes ahead of the slowest waits for it"


class AdspOptions(ServedOptions):
    """Workers make local steps without waiting, and commit so often that all commit equally often.

    check_period_s: seconds of a period, in which each worker is to make `commits`; without it the number is searched
    for, every search_every_s seconds and whenever the average loss has risen by the share loss_rise over a period.
    interval_min_s: the least time between two commits of a worker. rule: "cumulative" makes up for commits that were
    missed, as the paper has it; "released" asks all for the same, as the authors' code does.
    loss_target: the loss that a search wants to reach soon; without it half of what the search began with.
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


# ---- without ----


class AllReduceOptions(Table):
    """Every update is the mean of all workers' gradients, which the workers sum among themselves.

    bucket_mb: megabytes of the gradient that are summed at a time, while the rest is still computed.
    """

    name: Literal["allreduce"]
    bucket_mb: Positive = 25.0

    @property
    def bound(self) -> str:
        return "in every iteration all wait for all"


class LocalSgdOptions(Table):
    """Every `steps` iterations the workers' weights are replaced by their mean.

    With another outer learning rate than 1, or a momentum, the mean is where an outer SGD with Nesterov's momentum
    steps to (DiLoCo).
    """

    name: Literal["local-sgd"]
    steps: Count = Field(description="a whole number of at least 1: local steps from one averaging to the next")
    outer_lr: Positive = 1.0
    outer_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0

    @property
    def bound(self) -> str:
        return f"every {self.steps} iterations all wait for all"


class GossipOptions(Table):
    """Every `period` iterations a worker averages its weights with those of a peer.

    mode: "pull" reads the peer's, "push" gives it one's own, "push-sum" half of one's own and of a weight, all of them
    when it suits the worker; "permutation" is synchronous: all exchange at once, and everybody is drawn once.
    topology: which peers are drawn from; of "exponential" they are not drawn but visited in turn, 1, 2, 4, ... on.
    include_self: whether a worker may draw itself, and then keeps what it has. Unless it is said, it may, but not with
    the exponential topology.
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
        in_step = self.mode == "permutation"
        return f"every {self.period} iterations all wait for all" if in_step else "nobody waits for anybody"


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
