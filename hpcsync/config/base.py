"""Base class and number types of the tables of the job file."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, le=1)]


def matching(pattern: str, what: str) -> AfterValidator:
    """Return a validator of strings that must match the whole pattern; `what` describes it in messages."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"must be {what}")
        return text

    return AfterValidator(check)


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
