"""The `[paradigm]` of the job file: who waits for whom, or exchanges what with whom."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, ValidationInfo, field_validator

from hpcsync.job_table import Count, NotNegative, Positive, Table

# ---- with a parameter server ----


class Served(Table):
    @property
    def options(self) -> dict[str, Any]:
        """What `paradigms.create` is given besides the name and the workers."""
        return self.model_dump(exclude={"name"})


class Bsp(Served):
    name: Literal["bsp"]


class Asp(Served):
    name: Literal["asp"]


class Ssp(Served):
    name: Literal["ssp"]
    staleness: int | float = Field(description="a whole number of at least 0, or inf")

    @field_validator("staleness", mode="before")
    @classmethod
    def _whole_or_inf(cls, staleness: Any) -> Any:
        if staleness != math.inf and (type(staleness) is not int or staleness < 0):
            raise ValueError("must be a whole number of at least 0, or inf")
        return staleness


class Dssp(Served):
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


class Easgd(Served):
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

    def moving_rate(self, n_workers: int) -> float:
        """alpha, whichever way it was given."""
        return self.alpha if self.alpha is not None else (0.9 if self.beta is None else self.beta) / n_workers


# ---- without ----


class AllReduce(Table):
    """Every update is the mean of all workers' gradients, which the workers sum among themselves.

    bucket_mb: megabytes of the gradient that are summed at a time, while the rest is still computed.
    """

    name: Literal["allreduce"]
    bucket_mb: Positive = 25.0


class LocalSgd(Table):
    """Every `steps` iterations the workers' weights are replaced by their mean.

    With another outer learning rate than 1, or a momentum, the mean is where an outer SGD with Nesterov's momentum
    steps to (DiLoCo).
    """

    name: Literal["local-sgd"]
    steps: Count = Field(description="a whole number of at least 1: local steps from one averaging to the next")
    outer_lr: Positive = 1.0
    outer_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0


class Gossip(Table):
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


Paradigm = Annotated[Bsp | Asp | Ssp | Dssp | Easgd | AllReduce | LocalSgd | Gossip, Discriminator("name")]

WITHOUT_SERVER = (AllReduce, LocalSgd, Gossip)
