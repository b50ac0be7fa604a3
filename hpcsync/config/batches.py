"""The `[batches]` of the job file: allocation of batch sizes to workers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from hpcsync.config.base import Count, Table, one_or_each
from hpcsync.config.errors import JobError, shown

SIZES = "a whole number of at least 1, or a list of them, one per worker"


class Batches(Table):
    """Allocation of batch sizes. Unless the policy is "equal", sizes follow the workers' speeds during the run.

    Parameters
    ----------
    policy
        "equal"; "proportional" to the predicted speeds; or "equal-finish", such that all workers are expected to take
        the same time, including the part that is independent of the batch size.
    predictor
        Predictor of the speeds.
    total
        Samples of one iteration of all workers together; by default as many as with equal batches.
    minimum, maximum
        Limits of a worker's batch size in samples; `maximum` may be a list, one per worker.
    interval
        Iterations of all workers from one allocation to the next.
    gain
        Smallest share by which a new allocation must shorten the slowest worker's iteration.
    """

    policy: Literal["equal", "proportional", "equal-finish"] = Field(
        description='one of "equal", "proportional", "equal-finish"'
    )
    predictor: Literal["last", "smoothing", "gru", "blend"] = "blend"
    total: Count | None = None
    minimum: Count = 1
    maximum: Annotated[int | tuple[int, ...], one_or_each(int, lambda size: size >= 1, SIZES)] | None = None
    interval: Count = 10
    gain: Annotated[float, Field(ge=0, lt=1)] = 0.05

    @field_validator("total")
    @classmethod
    def _unless_equal(cls, total: int | None, info: ValidationInfo) -> int | None:
        if total is not None and info.data.get("policy") == "equal":
            raise ValueError('must be omitted with batches.policy = "equal", where all have the same batch size')
        return total

    @field_validator("maximum")
    @classmethod
    def _not_below(cls, maximum: int | tuple[int, ...] | None, info: ValidationInfo) -> int | tuple[int, ...] | None:
        smallest = min(maximum) if isinstance(maximum, tuple) else maximum
        if smallest is not None and "minimum" in info.data and smallest < info.data["minimum"]:
            raise ValueError(f"must be at least batches.minimum = {shown(info.data['minimum'])}")
        return maximum

    def check(self, total: int | None, n_workers: int) -> None:
        """Raise JobError if `total` samples (None: unknown) cannot be allocated to so many workers."""
        workers = f"cluster.workers = {n_workers}"
        if isinstance(self.maximum, tuple) and len(self.maximum) != n_workers:
            raise JobError(
                f"batches.maximum = {shown(self.maximum)}: must be one whole number, or a list of {workers} of them"
            )
        if self.policy == "equal":
            return
        if total is None:
            raise JobError(
                f"batches.total: missing; must be a whole number of at least 1 with batches.policy = "
                f"{shown(self.policy)}, because the batch size of a script is unknown"
            )
        key = f"batches.total = {total}" + ("" if self.total else " (workload.batch_size times cluster.workers)")
        if total < (least := n_workers * self.minimum):
            raise JobError(f"{key}: must be at least {least}: {workers} have batches.minimum = {self.minimum} or more")
        if (maxima := self.maxima(n_workers)) is not None and total > sum(maxima):
            raise JobError(
                f"{key}: must be at most {sum(maxima)}: {workers} have batches.maximum = {shown(self.maximum)} or less"
            )

    def maxima(self, n_workers: int) -> list[int] | None:
        """Return the maximum of each worker; None if there is none."""
        if self.maximum is None:
            return None
        return list(self.maximum) if isinstance(self.maximum, tuple) else [self.maximum] * n_workers
