"""Base class and number types of the tables of the job file."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
LEAST, MOST = 1e-9, 1e15  # of times, rates and factors in virtual time, whose products and sums are finite then
Time = Annotated[float, Field(ge=0, le=MOST)]
Amount = Annotated[float, Field(ge=LEAST, le=MOST)]
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, le=1)]


def matching(pattern: str, what: str) -> AfterValidator:
    """Return a validator of strings that must match the whole pattern; `what` describes it in messages."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"must be {what}")
        return text

    return AfterValidator(check)


def one_or_each(kind: type[int] | type[float], allowed: Callable[[float], bool], what: str) -> BeforeValidator:
    """Return a validator of a number of this kind, or of a list of them; `what` describes them in messages."""

    def check(value: Any) -> Any:
        is_list = isinstance(value, list | tuple)
        each = value if is_list else [value]
        if not each or not all(type(x) in (int, kind) and allowed(x) for x in each):
            raise ValueError(f"must be {what}")
        return tuple(map(kind, each)) if is_list else kind(value)

    return BeforeValidator(check)


class Table(BaseModel):
    """A table of the job file. It reports unknown and missing keys, with those that are allowed."""

    model_config = ConfigDict(defer_build=True, extra="forbid", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _keys(cls, table: Any) -> Any:
        if not isinstance(table, dict):
            return table
        if cls.model_config.get("extra") == "forbid":
            for key in table:
                if key not in cls.model_fields:
                    raise PydanticCustomError("unknown_key", "", {"key": key, "allowed": list(cls.model_fields)})
        for key, field in cls.model_fields.items():
            if field.is_required() and key not in table:
                raise missing(key, field.description)
        return table


def missing(key: str, must_be: str | None) -> PydanticCustomError:
    """Return the error of a table without this key, to be raised during validation."""
    return PydanticCustomError("missing_key", "", {"key": key, "must_be": must_be})
