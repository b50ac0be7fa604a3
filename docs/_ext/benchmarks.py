"""Tables of the page about benchmarks.

They are generated from docs/benchmarks.json, which `make benchmarks` writes, and docs/benchmarks-gpu.json, of a GPU.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hpcsync.bench import TARGETS
from hpcsync.bench.figures import Figure

FILE = Path(__file__).parents[1] / "benchmarks.json"
GPU_FILE = FILE.with_stem("benchmarks-gpu")


class Column(NamedTuple):
    """Figures that one MPI library has given, and its name; that of a target without ranks is empty."""

    library: str
    figures: list[Figure]


def pages() -> dict[str, str]:
    """Return the Markdown of the machine and of each target's table, by the name of the generated file.

    Raises
    ------
    ValueError
        If the file lacks a target that can be measured without a GPU.
    """
    measured = json.loads(FILE.read_text(encoding="utf-8"))
    found = {"benchmarks-machine.md": "\n".join(dict.fromkeys(map(_machine, measured))) + "\n"}
    for target in (name for name, target in TARGETS.items() if "cpu" in target.devices):
        columns = [_column(each["targets"][target]) for each in measured if target in each["targets"]]
        if not columns:
            raise ValueError(f"{FILE.name}: nothing about {target}; run make benchmarks")
        found[f"benchmarks-{target}.md"] = table(columns)
    on_a_gpu = json.loads(GPU_FILE.read_text(encoding="utf-8"))
    found["benchmarks-gpu-machine.md"] = _machine(on_a_gpu) + "\n"
    for target, figures in on_a_gpu["targets"].items():
        found[f"benchmarks-gpu-{target}.md"] = table([_column(figures)])
    return found


def _machine(measured: dict[str, Any]) -> str:
    return f"hpcsync {measured['hpcsync']} on {measured['machine']}; {measured['versions']}."


def _column(target: dict[str, Any]) -> Column:
    names = Figure.__dataclass_fields__
    return Column(target["library"], [Figure(**{name: each[name] for name in names}) for each in target["figures"]])


def table(columns: Sequence[Column]) -> str:
    """Return the table of a target: a row for each figure and reference, with three cells for each library."""
    head = ["measured", "reference", "unit"]
    for library, _ in columns:
        head += [library.replace(" Version:", "") or "measured", "reference", "ratio"]
    aims = any(figure.aim is not None for _, figures in columns for figure in figures)
    rows = list(_rows([figures for _, figures in columns]))
    cells = [[*head, "aim"], *rows] if aims else [head, *(row[:-1] for row in rows)]
    cells.insert(1, ["---", "---", "---", *["---:"] * (len(cells[0]) - 3)])
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


def _rows(columns: Sequence[Sequence[Figure]]) -> Iterator[list[str]]:
    """Yield the cells of each row; a figure's name and value appear once, in the row of its first reference."""
    named = [{(figure.what, figure.unit, figure.limit): figure for figure in figures} for figures in columns]
    before = ("", "")
    for key in dict.fromkeys(key for column in named for key in column):
        what, unit, limit = key
        again, before = (what, unit) == before, (what, unit)
        row = ["" if again else what, limit, unit]
        aim = ""
        for column in named:
            figure = column.get(key)
            row += ["", "", ""] if figure is None else _cells(figure, again)
            if figure is not None and figure.aim is not None:
                aim = f"{'≥' if figure.is_rate else '≤'}\N{NO-BREAK SPACE}{figure.aim:g}"
        yield [*row, aim]


def _cells(figure: Figure, again: bool) -> list[str]:
    ratio = "" if figure.ratio is None else f"{figure.ratio:.2f}"
    shown = f"**{ratio}**" if figure.reached is False else ratio
    return ["" if again else _median(figure.values), _median(figure.limits), shown]


def _median(values: Sequence[float]) -> str:
    """Format the median with three significant digits."""
    if not values:
        return ""
    value = statistics.median(values)
    return f"{value:,.{2 if abs(value) < 10 else 1 if abs(value) < 100 else 0}f}"
