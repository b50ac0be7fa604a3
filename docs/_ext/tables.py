"""Sphinx extension: classes for tables, so that the style sheet can lay them out on every width.

Long code in a cell gets the class `long` and may wrap; short code stays on one line. A table of prose gets the class
`prose`: on a narrow screen its cells stand below each other. Tables of numbers scroll within their own box.
"""

from __future__ import annotations

from typing import Any

from docutils import nodes

LONG = 28  # characters
PROSE = 40


def classify(app: Any, doctree: nodes.document) -> None:
    for table in doctree.findall(nodes.table):
        for code in table.findall(nodes.literal):
            if len(code.astext()) > LONG:
                code["classes"].append("long")
        rows = [row for body in table.findall(nodes.tbody) for row in body.findall(nodes.row)]
        cells = [cell.astext() for row in rows for cell in list(row)[1:]]
        if "entries" not in table["classes"] and any(len(text) > PROSE and mostly_words(text) for text in cells):
            table["classes"].append("prose")


def mostly_words(text: str) -> bool:
    return sum(c.isalpha() for c in text) > len(text) / 2


def setup(app: Any) -> dict[str, bool]:
    app.connect("doctree-read", classify)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
