"""Table and list of the pages of the paradigms, generated from their declarations; descriptions of their options."""

from __future__ import annotations

import inspect
import re

from hpcsync.paradigms import OPTIONS
from hpcsync.paradigms.options import ParadigmOptions

CONTROLLERS = ("adaptive-k", "batch-allocation", "dc-asgd")  # pages about what several paradigms have in common


def pages() -> dict[str, str]:
    """Return the Markdown of the table and of the list, by the name of the generated file."""
    head = ["| paradigm | servers | waiting | update | source |", "|---|---|---|---|---|"]
    listed = dict.fromkeys(options.page or name for name, options in OPTIONS.items())
    return {
        "paradigms.md": "\n".join([*head, *map(_row, OPTIONS.values())]) + "\n",
        "paradigms-toctree.md": "\n".join(["```{toctree}", ":hidden:", "", *listed, *CONTROLLERS, "```"]) + "\n",
    }


def _row(options: type[ParadigmOptions]) -> str:
    name = vars(options)["name"]
    if not (options.waiting and options.update):
        raise ValueError(f"{options.__module__}: {options.__name__} does not say who waits and what an update is")
    link = f"[`{name}`](../paradigms/{options.page or name}.md)"
    servers = "yes" if options.policy else "no"
    return f"| {link} | {servers} | {options.waiting} | {options.update} | {options.source} |"


def described(options: type[ParadigmOptions]) -> dict[str, str]:
    """Return the description of each option, from the sections Parameters of the class and its bases."""
    found: dict[str, str] = {}
    for kind in reversed(options.__mro__):
        if "__doc__" in vars(kind) and issubclass(kind, ParadigmOptions) and kind is not ParadigmOptions:
            section = re.search(
                r"^Parameters\n-+\n(.*?)(?=^\w[^\n]*\n-+\n|\Z)", inspect.getdoc(kind) or "", re.S | re.M
            )
            entries = re.findall(r"^(\w+)\n((?:    .*\n?)+)", section[1] if section else "", re.M)
            found.update({key: " ".join(text.split()) for key, text in entries})
    return found
