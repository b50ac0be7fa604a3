"""Reference of the trace, generated from `hpcsync.trace.schema`: tables, columns, units, codes and decision inputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

import hpcsync.core.assignments  # noqa: F401  (it imports every paradigm)
from hpcsync.paradigms import base
from hpcsync.planning import batch_allocation, k_controller
from hpcsync.trace import schema


def pages() -> dict[str, str]:
    """Return the Markdown of the trace's reference, by the name of the generated file."""
    return {"trace-tables.md": _tables(), "trace-codes.md": _codes(), "trace-decisions.md": _decisions()}


def _tables() -> str:
    return "\n".join(
        f"### /{name}\n\n{table.description}\n\n{_columns(table.columns)}" for name, table in schema.SCHEMA.items()
    )


def _columns(columns: Iterable[schema.Column]) -> str:
    lines = ["{.entries .columns}", "| column | type | unit | description |", "|---|---|---|---|"]
    for name, dtype, unit, description in columns:
        kind = f"text ({dtype[1:]} bytes)" if dtype.startswith("S") else str(np.dtype(dtype))
        if name in schema.ENUMS:
            kind = f"enum ({kind})"
            description += f" {', '.join(f'{code.name.lower()} = {code.value}' for code in schema.ENUMS[name])}."
        lines.append(f"| `{name}` | {kind} | {unit} | {description} |")
    return "\n".join(lines) + "\n"


def _codes() -> str:
    rows = [
        f"| `{column}` | " + ", ".join(f"{code.value}: {code.name.lower()}" for code in codes) + " |"
        for column, codes in schema.ENUMS.items()
    ]
    return "\n".join(["| column | codes |", "|---|---|", *rows]) + "\n"


def _decisions() -> str:
    """The inputs of every controller."""
    kinds = [kind for kind in _subclasses(base.Paradigm) if "decision_fields" in vars(kind) and hasattr(kind, "name")]
    sources = [(f"`{kind.name}`", kind) for kind in sorted(kinds, key=lambda kind: kind.name)]
    for title, module in (("A k that is chosen", k_controller), ("Batch allocation", batch_allocation)):
        sources += [
            (title, kind) for kind in vars(module).values() if getattr(kind, "__module__", "") == module.__name__
        ]
    parts = []
    for title, kind in sources:
        fields: Any = vars(kind).get("decision_fields")
        if isinstance(fields, Mapping):
            rows = "\n".join(f"| `{name}` | {unit} | {about} |" for name, (unit, about) in fields.items())
            head = "{.entries .columns}\n| column | unit | description |\n|---|---|---|"
            parts.append(f"{title}:\n\n{head}\n{rows}\n")
        elif isinstance(fields, tuple) and fields:
            parts.append(f"{title}: " + ", ".join(f"`{name}`" for name in fields) + ".\n")
    return "\n".join(parts)


def _subclasses(kind: type) -> set[type]:
    found = set(kind.__subclasses__())
    return found | {below for one in found for below in _subclasses(one)}
