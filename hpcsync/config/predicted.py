"""The `[predicted]` of the job file: what `hpcsync advise` expects of the job that it has written."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from hpcsync.config.base import NotNegative, Positive, Table
from hpcsync.config.errors import JobError


class Prediction(Table):
    """Expected time to the target, which the summary and the report put beside the run's. It changes nothing else.

    Parameters
    ----------
    seconds
        Mean time to the target in virtual time.
    low_s, high_s
        Interval in which one further run should lie with a probability of 80 %.
    samples_per_s
        Samples trained a second.
    """

    seconds: Positive = Field(description="a number greater than 0")
    low_s: NotNegative | None = None
    high_s: Positive | None = None
    samples_per_s: Positive | None = None

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if (self.low_s is None) != (self.high_s is None):
            raise JobError("predicted.low_s: must come with predicted.high_s")
        if self.low_s is not None and self.high_s is not None and not self.low_s <= self.seconds <= self.high_s:
            raise JobError(f"predicted.seconds = {self.seconds:g}: must be from {self.low_s:g} to {self.high_s:g}")
        return self
