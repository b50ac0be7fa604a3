"""Reference of the trace, generated from `hpcsync.trace.schema`: tables, columns, units, codes and decision inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import hpcsync.core.assignments  # noqa: F401  (it imports every paradigm)
from hpcsync.paradigms import base
from hpcsync.planning import batch_allocation, k_controller
from hpcsync.trace import schema


def pages() -> dict[str, str]:
    """Return the Markdown of the trace's reference, by the name of the generated file."""
    return {"trace-tables.md": _tables(), "trace-codes.md": _codes(), "trace-decisions.md": _decisions()}


def _tables() -> str:
    if hasattr(schema, "tables_markdown"):
        return str(schema.tables_markdown("###")).replace("| column |", "{.entries .columns}\n| column |")
    parts = []
    for name, dtype in schema.TABLES.items():
        rows = "\n".join(f"| `{column}` | {dtype[column]} |" for column in dtype.names)
        parts.append(f"### /{name}\n\n| column | type |\n|---|---|\n{rows}\n")
    return "\n".join(parts)


def _codes() -> str:
    rows = [
        f"| `{column}` | " + ", ".join(f"{code.value}: {code.name.lower()}" for code in codes) + " |"
        for column, codes in schema.ENUMS.items()
    ]
    return "\n".join(["| column | codes |", "|---|---|", *rows]) + "\n"


def _decisions() -> str:
    """The inputs of every controller."""
    named = {kind.name: kind for kind in _subclasses(base.Paradigm) if getattr(kind, "name", None)}
    sources = [(f"`{name}`", kind) for name, kind in sorted(named.items())]
    for title, module in (("A k that is chosen", k_controller), ("Batch allocation", batch_allocation)):
        sources += [
            (title, kind) for kind in vars(module).values() if getattr(kind, "__module__", "") == module.__name__
        ]
    parts = []
    for title, kind in sources:
        fields: Any = vars(kind).get("decision_fields")
        if isinstance(fields, Mapping):
            rows = "\n".join(f"| `{name}` | {unit} | {about} |" for name, (unit, about) in fields.items())
            parts.append(
                f"{title}:\n\n| column | unit | description |\n|---|---|---|\n{rows}\n".replace(
                    "| column |", "{.entries .columns}\n| column |"
                )
            )
        elif isinstance(fields, tuple) and fields:
            parts.append(f"{title}: " + ", ".join(f"`{name}`" for name in fields) + ".\n")
    return "\n".join(parts)


def _subclasses(kind: type) -> set[type]:
    found = set(kind.__subclasses__())
    return found | {below for one in found for below in _subclasses(one)}
