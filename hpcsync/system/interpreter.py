"""Further processes of this Python."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def python(*arguments: str) -> list[str]:
    """Return the command that starts this Python.

    It finds nothing in the current folder, where a file such as types.py would take the place of a module of Python;
    unless hpcsync itself is there, which then need not be installed.
    """
    with suppress(OSError):
        if Path(PACKAGE.name).samefile(PACKAGE):
            return [sys.executable, *arguments]
    return [sys.executable, "-P", *arguments]
