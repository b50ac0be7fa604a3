"""Errors in a job file, as one line: the key, the value and what is allowed."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError


def printable(text: str) -> str:
    """Return the text with escape sequences in place of characters that a terminal would obey, such as line ends."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class JobError(Exception):
    """Error of the user; the message is one line. It is not a ValueError, so pydantic does not wrap it.

    Words of more than 400 characters, such as keys and values of a damaged file, are shortened.

    Parameters
    ----------
    message : str
        The line.
    details : str
        Lines to print below it, such as the user's part of a traceback.
    """

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(re.sub(r"\S{400,}", lambda word: word[0][:60] + "...", printable(message)))
        self.details = details


def below(error: BaseException) -> str:
    """Return what is to be printed below the line of an error: a line end and its details, if it has any."""
    details = error.details.rstrip() if isinstance(error, JobError) else ""
    return details and f"\n{details}"


def refuse_empty(option: str, path: Any) -> None:
    """Raise JobError for an empty path, which would be the current folder."""
    if path == "":
        raise JobError(f'{option} "": must not be empty')


# Words of pydantic, and their replacements.
_WORDS = {
    "Value error, ": "",
    "Input should be": "must be",
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid string": "a string",
    "a valid boolean": "true or false",
    "a valid dictionary": "a table",
}
# Its kinds of errors of numbers beyond a limit: the limit's name, and words before it.
_LIMITS = {
    "greater_than": ("gt", "greater than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


def in_one_line(error: ValidationError, table: dict[str, Any], kinds: dict[str, list[str]]) -> str:
    """Return the first error as `key = value: what is allowed`.

    Parameters
    ----------
    error : ValidationError
        Errors of pydantic.
    table : dict
        Table that was validated.
    kinds : dict
        Allowed kinds of each table that is one of several kinds.
    """
    first = error.errors(include_url=False)[0]
    context = first.get("ctx", {})
    path, value = _follow(first["loc"], table, kinds)
    if first["type"] == "missing_key":
        return f"{'.'.join([*path, context['key']])}: missing; must be {context['must_be']}"
    if first["type"] == "unknown_key":
        path, value = [*path, context["key"]], value[context["key"]]
        must = f"unknown key; must be one of {', '.join(context['allowed'])}"
        must += did_you_mean(context["key"], context["allowed"])
    elif first["type"] == "option":
        must = context["must"].replace("paradigm.", f"{'.'.join(path)}.")  # it may be a table within [paradigm]
        path, value = [*path, context["key"]], value.get(context["key"], context["value"])
    elif first["type"].startswith("union_tag"):
        path, value, must = _tag(path, value, kinds[path[-1]])
    elif first["type"] in ("model_type", "model_attributes_type"):
        must = "must be a table"
    elif first["type"] in _LIMITS:
        name, words = _LIMITS[first["type"]]
        limit = context[name]
        must = f"must be {words} {limit:g}" if isinstance(limit, float) else f"must be {words} {limit}"
    else:
        must = first["msg"]
        for word, replacement in _WORDS.items():
            must = must.replace(word, replacement)
    key = ".".join(map(_short, path))
    return f"{key}: missing; {must}" if value is None else f"{key} = {shown(value)}: {must}"


def _tag(path: list[str], table: Any, allowed: list[str]) -> tuple[list[str], Any, str]:
    """Return path and value of the key that names the kind of a table, and the allowed kinds in words."""
    if not isinstance(table, dict):
        return path, table, "must be a table"
    key = "model" if path[-1] == "compute" else "name"
    must = f"must be one of {', '.join(allowed)}"
    return [*path, key], table.get(key), must + did_you_mean(table.get(key), allowed)


def _follow(loc: tuple[int | str, ...], table: Any, kinds: Collection[str]) -> tuple[list[str], Any]:
    """Return the key as the user wrote it, without the kinds of tables in pydantic's location, and its value.

    A kind follows the key of its table; other keys of that table may have the same name.
    """
    path: list[str] = []
    value, is_kind = table, False
    for part in loc:
        if isinstance(part, int):
            value = value[part]
            path[-1] += f"[{part}]"
        elif not is_kind and isinstance(value, dict) and part in value:
            value = value[part]
            path.append(part)
        is_kind = not is_kind and part in kinds
    return path, value


def did_you_mean(word: Any, words: Iterable[str]) -> str:
    """Return "; did you mean ...?" with the word most similar to this one; "" if none is similar."""
    close = difflib.get_close_matches(word, list(words), n=1) if isinstance(word, str) else []
    return f"; did you mean {close[0]}?" if close else ""


def shown(value: Any) -> str:
    """Return a value as in a job file, of at most 80 characters."""
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return _short(json.dumps(value, default=str, ensure_ascii=False))


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
