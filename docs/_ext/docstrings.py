"""Sphinx extension: renders docstrings that are not in NumPy style.

Such a docstring describes its parameters as `name:  text` with a hanging indent, and its examples as indented blocks.
They become field lists and literal blocks. Docstrings with NumPy sections are left to napoleon.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from typing import Any

ENTRY = re.compile(r"^([a-z_]\w*(?:, [a-z_]\w*)*):\s+(\S.*)$")
SECTION = re.compile(r"^-{4,}\s*$")


def convert(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    if not any(SECTION.match(line) for line in lines):
        lines[:] = _converted(lines, "param" if what in ("function", "method") else "ivar")


def _converted(lines: list[str], field: str) -> Iterator[str]:
    blocks = [list(block) for blank, block in groupby(lines, key=lambda line: not line.strip()) if not blank]
    for block in blocks:
        if all(line.startswith(" ") for line in block):  # an example, or the rest of one
            yield from ("::", "", *(f"   {line}" for line in block), "")
        elif ENTRY.match(block[0]):
            yield from _entries(block, field)
        else:
            yield from (*block, "")


def _entries(block: list[str], field: str) -> Iterator[str]:
    entry: list[str] = []
    for line in (*block, "end:"):
        found = ENTRY.match(line)
        if entry and (found or line == "end:"):
            yield from (" ".join(entry), "")
            entry = []
        if found:  # of several parameters the last one has the text
            *others, name = found[1].split(", ")
            yield from (f":{field} {other}: see `{name}`." for other in others)
            entry = [f":{field} {name}: {found[2]}"]
        elif line != "end:":
            entry.append(line.strip())


def setup(app: Any) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", convert, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
