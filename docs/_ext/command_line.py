"""Reference of the command line, generated from the typer application: usage, arguments and options."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from hpcsync.cli.app import app


def pages() -> dict[str, str]:
    """Return the Markdown of the command line's reference, by the name of the generated file."""
    return {"command-line.md": "\n".join(_commands(typer.main.get_command(app), "hpcsync"))}


def _commands(command: Any, name: str) -> Iterator[str]:
    if hasattr(command, "commands"):
        for below, found in command.commands.items():
            yield from _commands(found, f"{name} {below}")
        return
    summary, _, rest = (command.help or "").partition("\n\n")
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
    usage = " ".join([name, *(["[OPTIONS]"] if options else []), *map(_usage, arguments)])
    yield f"## `{name}`\n\n{_joined(summary)}\n\n```text\n{usage}\n```\n"
    if rest:
        yield _paragraphs(rest)
    rows = [_row(parameter, name) for parameter in (*arguments, *options)]
    if rows:
        yield "\n".join(["{.entries}", "| argument or option | default | description |", "|---|---|---|", *rows]) + "\n"


def _metavar(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name.upper()) + ("..." if parameter.nargs == -1 else "")


def _usage(argument: Any) -> str:
    return _metavar(argument) if argument.required else f"[{_metavar(argument)}]"


def _row(parameter: Any, name: str) -> str:
    if not parameter.help:
        raise ValueError(f"{name}: {parameter.name} has no help text")
    shown = _metavar(parameter)
    if parameter.param_type_name == "option":
        flags = ", ".join([*sorted(parameter.opts, key=len), *parameter.secondary_opts])
        shown = flags if parameter.is_flag else f"{flags} {shown}" + (" ..." if parameter.multiple else "")
    shown = shown.replace("|", "\\|")
    return f"| `{shown}` | {_default(parameter)} | {_joined(parameter.help)} |"


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    value = parameter.default
    if getattr(parameter, "is_flag", False):
        return "automatic" if value is None and parameter.secondary_opts else "on" if value else "off"
    if value is None or value is False or value in ((), [], "") or callable(value):
        return "none"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _joined(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _paragraphs(text: str) -> str:
    """The rest of a help text; a block that click does not wrap stays as it is."""
    blocks = []
    for block in text.split("\n\n"):
        if block.lstrip().startswith("\b"):
            blocks.append("```text\n" + block.replace("\b\n", "").replace("\b", "").strip("\n") + "\n```")
        else:
            blocks.append(_joined(block))
    return "\n\n".join(blocks) + "\n"
