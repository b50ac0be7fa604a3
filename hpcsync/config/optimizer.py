"""The `[optimizer]` of the job file: optimizer, learning rate and schedule."""

from __future__ import annotations

import itertools
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, ValidationInfo, field_validator

from hpcsync.config.base import Count, Positive, Table

INCREASING = "a list of whole numbers of at least 1, each greater than the one before"


def _increasing(milestones: Any) -> Any:
    numbers = list(milestones) if isinstance(milestones, list | tuple) else []
    whole = all(type(number) is int for number in numbers)
    if not numbers or not whole or any(b <= a for a, b in itertools.pairwise([0, *numbers])):
        raise ValueError(f"must be {INCREASING}")
    return tuple(numbers)


class MultiStep(Table):
    """The learning rate times gamma from every milestone on. Milestones and warm-up are in units of `lr_clock`."""

    name: Literal["multistep"]
    milestones: Annotated[tuple[int, ...], BeforeValidator(_increasing)] = Field(description=INCREASING)
    gamma: Positive = 0.1
    warmup: Annotated[int, Field(ge=0)] = 0


class Cosine(Table):
    """The learning rate falls to zero along half a cosine; `total` and warm-up are in units of `lr_clock`."""

    name: Literal["cosine"]
    total: Count = Field(description="a whole number of at least 1")
    warmup: Annotated[int, Field(ge=0)] = 0

    @field_validator("warmup")
    @classmethod
    def _shorter(cls, warmup: int, info: ValidationInfo) -> int:
        if "total" in info.data and warmup >= info.data["total"]:
            raise ValueError(f"must be less than optimizer.schedule.total = {info.data['total']}")
        return warmup


Schedule = Annotated[MultiStep | Cosine, Discriminator("name")]


class Optimizer(Table):
    """An optimizer of torch.optim. Further keys are options of its class.

    Parameters
    ----------
    name
        Lower-case name of the class.
    lr
        Initial learning rate; 0 only of a training script, which may set it in its loop.
    lr_clock
        Unit of the schedule.
    async_lr_scale
        Factor of the learning rate of each update: 1, or "1/workers", the share of workers that contribute to it.
    schedule
        Learning rate schedule; by default the rate is constant.
    clip_norm
        Largest norm of the gradient that the optimizer gets; only of a training script.
    groups
        Options of all parameter groups of a training script, if there are several.
    """

    model_config = ConfigDict(extra="allow")

    name: str = Field(description='the lower-case name of a torch.optim class, such as "sgd"')
    lr: Annotated[float, Field(allow_inf_nan=False, description="a number greater than 0")]  # `Job` has its limit
    lr_clock: Literal["samples", "updates"] = "samples"
    async_lr_scale: float | Literal["1/workers"] = 1.0
    schedule: Schedule | None = None
    clip_norm: Positive | None = None
    groups: list[dict[str, Any]] | None = None

    @field_validator("async_lr_scale", mode="before")
    @classmethod
    def _one_or_share(cls, scale: Any) -> Any:
        if isinstance(scale, bool) or scale not in (1, "1/workers"):
            raise ValueError('must be 1.0 or "1/workers"')
        return scale if isinstance(scale, str) else 1.0

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the torch.optim class besides the parameters and `lr`."""
        return dict(self.model_extra or {})
