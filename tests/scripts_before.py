"""The scripts in jobs/scripts, and what they were before hpcsync: a comment on every changed line says how it was.

import hpcsync  # hpcsync: new
for x, y in sync.shard(loader):  # hpcsync: was for x, y in loader:
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[1] / "jobs" / "scripts"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
CHANGED = re.compile(r"^( *)(.*?) *# hpcsync: (new|was (.*))$")


def source(name: str) -> str:
    return (FOLDER / f"{name}.py").read_text(encoding="utf-8")


def changes(text: str) -> list[str]:
    """The lines that were changed for hpcsync."""
    return [line for line in text.splitlines() if CHANGED.match(line)]


def without_hpcsync(text: str) -> str:
    """The script before it was changed. (A new `with` leaves its indentation behind.)"""
    lines = []
    for line in text.splitlines():
        if found := CHANGED.match(line):
            indent, code, _, before = found.groups()
            line = indent + (before or ("if True:" if code.startswith("with ") else "pass"))
        lines.append(line)
    return "\n".join(lines)


def module(name: str, text: str) -> ModuleType:
    """A script as a module, imported as `name`, so that other processes find its classes."""
    made = ModuleType(name)
    made.__file__ = str(FOLDER / f"{name}.py")
    sys.modules[name] = made
    exec(compile(text, name, "exec"), made.__dict__)
    return made
