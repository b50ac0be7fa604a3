"""The `[paradigm]` of the job file: the options that `hpcsync.paradigms` declares, checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import pydantic
from pydantic import AfterValidator, AllowInfNan, BeforeValidator, Discriminator, PlainSerializer, SerializationInfo
from pydantic_core import PydanticCustomError

from hpcsync.config.base import Table
from hpcsync.config.errors import JobError, shown
from hpcsync.paradigms import OPTIONS
from hpcsync.paradigms.options import FINITE, Allowed, Computed, OptionError, ParadigmOptions


def table_of(kind: type[ParadigmOptions]) -> type[Table]:
    """Return the table of the job file that holds these options, with their types, limits and defaults."""
    hints = get_type_hints(kind, include_extras=True)
    keys: dict[str, Any] = {each.name: _key(hints[each.name], each) for each in fields(kind)}
    return pydantic.create_model(kind.__name__, __base__=Table, __doc__=kind.__doc__, **keys)


def _key(hint: Any, option: Field[Any]) -> tuple[Any, Any]:
    """Return type and field of a key for pydantic."""
    found: dict[str, Any] = {}
    if option.name != "name" and option.default is not MISSING:
        is_computed = isinstance(option.default, Computed)
        found = {"default_factory": lambda: option.default} if is_computed else {"default": option.default}
    allowed = next((limit for limit in getattr(hint, "__metadata__", ()) if isinstance(limit, Allowed)), None)
    if allowed is not None:
        found["description"] = allowed.words
    return _checked(hint), pydantic.Field(**found)


def _checked(hint: Any) -> Any:
    """Return a type with the limits of `hpcsync.paradigms.options` as those of pydantic."""
    if hint is ParadigmOptions:
        return _one_of(PLAIN)
    if not hasattr(hint, "__metadata__"):
        parts = get_args(hint)
        return reduce(or_, map(_checked, parts)) if any(hasattr(part, "__metadata__") for part in parts) else hint
    limits: list[Any] = []
    for limit in hint.__metadata__:
        if isinstance(limit, Allowed):
            limits += [] if limit.test is None else [_validator(limit)]
        else:
            limits.append(AllowInfNan(False) if limit is FINITE else limit)
    kind = _checked(hint.__origin__)
    return Annotated[kind, *limits] if limits else kind


def _validator(allowed: Allowed) -> BeforeValidator:
    def check(value: Any) -> Any:
        assert allowed.test is not None
        if not allowed.test(value):
            raise ValueError(f"must be {allowed.words}")
        return value

    return BeforeValidator(check)


def _options(table: Any) -> ParadigmOptions:
    """Return the options of a valid table."""
    try:
        return OPTIONS[table.name](**dict(table))
    except OptionError as error:
        context = {"key": error.key.removeprefix("paradigm."), "value": error.value, "must": error.must}
        raise PydanticCustomError("option", "", context) from None


def _table(options: ParadigmOptions, info: SerializationInfo) -> dict[str, Any]:
    table = {each.name: getattr(options, each.name) for each in fields(options)}
    if info.exclude_defaults:
        at_default = {each.name for each in fields(options) if table[each.name] == each.default} - {"name"}
        table = {key: value for key, value in table.items() if key not in at_default}
    table = {key: _table(value, info) if isinstance(value, ParadigmOptions) else value for key, value in table.items()}
    return {key: value for key, value in table.items() if not (info.exclude_none and value is None)}


def _one_of(tables: Mapping[str, type[Table]]) -> Any:
    """Return the type of a table that is one of these, by its name, and becomes the options."""
    union = reduce(or_, tables.values())
    return Annotated[union, Discriminator("name"), AfterValidator(_options), PlainSerializer(_table)]


def _contains_another(kind: type[ParadigmOptions]) -> bool:
    """Return whether an option is itself a [paradigm]."""
    hints = get_type_hints(kind)
    return any(hints[each.name] is ParadigmOptions for each in fields(kind))


PLAIN = {name: table_of(kind) for name, kind in OPTIONS.items() if not _contains_another(kind)}
TABLES = {name: PLAIN.get(name) or table_of(kind) for name, kind in OPTIONS.items()}


if TYPE_CHECKING:
    ParadigmTable = ParadigmOptions
else:
    ParadigmTable = _one_of(TABLES)


@contextmanager
def options_suit() -> Iterator[None]:
    """Report an OptionError as a JobError."""
    try:
        yield
    except OptionError as error:
        value = "missing;" if error.value is None else f"= {shown(error.value)}:"
        separator = ": " if error.value is None else " "
        raise JobError(f"{error.key}{separator}{value} {error.must}") from None


def kind_of(paradigm: Any) -> type[ParadigmOptions] | None:
    """Return the kind of a [paradigm], which need not be valid."""
    return OPTIONS.get(str(paradigm.get("name"))) if isinstance(paradigm, dict) else None
