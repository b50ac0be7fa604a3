"""Arguments of the scripts: a wrong one is refused in a line that names it, before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import typer

from hpcsync.system.atomic_files import NotWritten, naming, try_to_write

PLAIN: dict[str, Any] = {"add_completion": False, "pretty_exceptions_enable": False, "rich_markup_mode": None}


def run(main: Callable[..., None]) -> None:
    """Call a function with the arguments of the command line."""
    app = typer.Typer(**PLAIN)
    app.command()(main)
    app()


def among(allowed: Collection[str]) -> Callable[[Sequence[str] | None], Sequence[str] | None]:
    """Return a callback that refuses values which are not allowed."""

    def check(given: Sequence[str] | None) -> Sequence[str] | None:
        for value in given or ():
            if value not in allowed:
                raise typer.BadParameter(f"{value}: must be one of {'; '.join(allowed)}")
        return given

    return check


def at_most_one(**given: bool) -> None:
    """Refuse more than one of options that exclude each other."""
    names = [f"--{name}" for name, chosen in given.items() if chosen]
    if len(names) > 1:
        raise typer.BadParameter(f"must come without {' and '.join(names[1:])}", param_hint=names[0])


def new(path: Path) -> Path:
    """Refuse an output that exists, or that cannot be written."""
    try:
        with naming(path):
            exists = path.exists()
    except NotWritten as error:
        raise typer.BadParameter(str(error), param_hint="-o") from None
    if exists:
        raise typer.BadParameter(f"{path}: exists; must be another folder", param_hint="-o")
    return writable(path)


def writable(path: Path) -> Path:
    """Refuse an output that cannot be written."""
    try:
        try_to_write(path)
    except NotWritten as error:
        raise typer.BadParameter(str(error), param_hint="-o") from None
    return path
