"""Command `hpcsync plan`: the predicted cost of a training layout on another cluster. Nothing is trained."""

from __future__ import annotations

import json
import math
import textwrap
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field, ValidationError
from rich.console import Console
from rich.table import Table as Shown

from hpcsync.bench.machine import machine
from hpcsync.config.base import NotNegative, Table
from hpcsync.config.errors import JobError, in_one_line, shown
from hpcsync.planning.split_cost import Shape, Times
from hpcsync.planning.stanza_planner import Link, Plan, SplitProfile, StanzaLayout, choose, faster, without_separation
from hpcsync.system.standard_output import at_least_80_columns
from hpcsync.training.split_profile import measured
from hpcsync.workloads import torchvision_models
from hpcsync.workloads.registry import cross_entropy

MILLISECONDS = "milliseconds of a batch"
LEAST, MOST = 1e-6, 1e9  # of a given number; beyond them times and speeds may be no finite numbers
RANGE = f"a number from {LEAST:g} to {MOST:g}"
Milliseconds = Annotated[float, Field(ge=LEAST, le=MOST, allow_inf_nan=False)]


class Recorded(Table):
    """Contents of the file that --profile names."""

    conv_forward_ms: Milliseconds = Field(description=f"{RANGE}: {MILLISECONDS} below the cut, forward")
    conv_backward_ms: Milliseconds = Field(description=f"{RANGE}: {MILLISECONDS} below the cut, backward")
    fc_ms: Milliseconds = Field(description=f"{RANGE}: {MILLISECONDS} above the cut, forward and backward")
    fc_fixed_ms: NotNegative = 0.0


class Asked(NamedTuple):
    """Options of `hpcsync plan stanza`."""

    model: str
    nodes: int
    bandwidth_gbit: float
    batch: int
    latency_us: float = 50.0
    micro_batches: int = 1
    profile: Path | None = None
    samples_per_second: float | None = None
    json: Path | None = None


def stanza(asked: Asked) -> None:
    """Print a table of layouts: every number of fully-connected workers, and the layouts that do not separate layers.

    The layout with the most samples per second is marked.

    Raises
    ------
    JobError
        If an option is not allowed, or a file cannot be read or written.
    """
    _check(asked)
    console = at_least_80_columns(Console(highlight=False))
    times, source = _times(asked, console)
    shape = torchvision_models.shape(asked.model)
    profile = SplitProfile(times, shape, asked.batch)
    link = Link(asked.bandwidth_gbit * 1e9 / 8, asked.latency_us * 1e-6)
    plan = choose(profile, link, asked.nodes, micro_batches=asked.micro_batches)
    others = without_separation(profile, link, asked.nodes)
    _print(console, _about(asked, shape, times, source))
    console.print(_table(plan, others))
    _print(console, _conclusion(plan, others))
    if asked.json is not None:
        asked.json.write_text(json.dumps(_numbers(asked, shape, times, source, plan, others), indent=2) + "\n")


# ---- options ----


def _check(asked: Asked) -> None:
    """Raise JobError for options that are not allowed."""
    for option, value, right, must in (
        ("nodes", asked.nodes, asked.nodes >= 2, "a whole number of at least 2"),
        ("bandwidth-gbit", asked.bandwidth_gbit, LEAST <= asked.bandwidth_gbit <= MOST, RANGE),
        (
            "batch",
            asked.batch,
            1 <= asked.batch <= MOST,
            f"a whole number from 1 to {MOST:g}: samples of a worker's batch",
        ),
        ("latency-us", asked.latency_us, 0 <= asked.latency_us <= MOST, f"a number from 0 to {MOST:g}"),
        (
            "micro-batches",
            asked.micro_batches,
            asked.micro_batches >= 1 and asked.batch % asked.micro_batches == 0,
            f"a divisor of --batch {asked.batch}",
        ),
    ):
        if not right:
            raise JobError(f"--{option} {value}: must be {must}")
    rate = asked.samples_per_second
    if rate is not None and not LEAST <= rate <= MOST:
        raise JobError(f"--samples-per-second {rate}: must be {RANGE}")
    if rate is not None and asked.profile is not None:
        raise JobError(f"--samples-per-second {rate}: must be left out with --profile {asked.profile}")
    torchvision_models.shape(asked.model)
    if asked.json is not None:
        try:
            asked.json.open("a").close()
        except OSError as error:
            raise JobError(f"--json {asked.json}: {error.strerror}") from None


def _times(asked: Asked, console: Console) -> tuple[Times, str]:
    """Return the times of a batch, and a phrase that names their source."""
    if asked.profile is not None:
        return _read(asked.profile), f"from {asked.profile}"
    if asked.samples_per_second is not None:
        times = Times.of(asked.batch / asked.samples_per_second, torchvision_models.shape(asked.model).fc_share)
        how = "divided in proportion to floating-point operations, with backward passes counted twice"
        return times, f"from {asked.samples_per_second:g} samples/s, {how}"
    console.print(f"measuring {asked.model} ...", markup=False)
    halves = torchvision_models.build(asked.model, "cpu")
    images = torch.randn(asked.batch, *torchvision_models.ARCHITECTURES[asked.model].image)
    times = measured(halves, cross_entropy, (images, torch.zeros(asked.batch, dtype=torch.long)))
    return times, f"measured on this machine: {machine()}, one thread"


def _read(path: Path) -> Times:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        read = Recorded.model_validate(table)
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(f"--profile {path}: {getattr(error, 'strerror', None) or 'must be text in UTF-8'}") from None
    except tomllib.TOMLDecodeError as error:
        raise JobError(f"--profile {path}: must be TOML: {str(error).splitlines()[0]}") from None
    except ValidationError as error:
        raise JobError(f"--profile {path}: {in_one_line(error, table, {})}") from None
    if read.fc_fixed_ms > read.fc_ms:
        most = f"must be at most fc_ms = {shown(read.fc_ms)}, of which it is a part"
        raise JobError(f"--profile {path}: fc_fixed_ms = {shown(read.fc_fixed_ms)}: {most}")
    in_ms = read.conv_forward_ms, read.conv_backward_ms, read.fc_ms, read.fc_fixed_ms
    return Times(*(ms / 1e3 for ms in in_ms))


# ---- output ----


def _print(console: Console, lines: Sequence[str]) -> None:
    """Print lines, wrapped with an indent where they are wider than the console."""
    for line in lines:
        for part in textwrap.wrap(line, console.width, subsequent_indent="  ", break_on_hyphens=False):
            console.print(part, markup=False, soft_wrap=True)


def _about(asked: Asked, shape: Shape, times: Times, source: str) -> list[str]:
    pieces = f", in {asked.micro_batches} pieces" if asked.micro_batches > 1 else ""
    fixed = f" (including {_ms(times.fc_fixed_s)} for any number of samples)" if times.fc_fixed_s else ""
    return [
        f"{asked.model}: {shape.conv_parameters:,} parameters below the cut and {shape.fc_parameters:,} above it; "
        f"{shape.activations:,} activations per sample cross it",
        f"batch of {asked.batch}{pieces}: forward {_ms(times.conv_forward_s)}, backward "
        f"{_ms(times.conv_backward_s)} below the cut, {_ms(times.fc_s)} above it{fixed}",
        f"  {source}",
        f"{asked.nodes} nodes, links of {asked.bandwidth_gbit:g} Gbit/s, {asked.latency_us:g} us per message",
    ]


def _table(plan: Plan, others: Sequence[StanzaLayout]) -> Shown:
    result = Shown(box=None, pad_edge=False)
    best = _best(plan, others)
    result.add_column("layout", no_wrap=True)
    for column in ("batches", "iteration", "samples/s", "MB sent", "MB per link"):
        result.add_column(column, justify="right", no_wrap=True)
    for row in (*plan.rows, *others):
        chosen = row is best
        result.add_row(
            f"{_in_words(row)}{' *' if chosen else ''}",
            str(row.batches),
            _ms(row.seconds),
            f"{row.samples_per_s:,.0f}" if row.samples_per_s >= 100 else f"{row.samples_per_s:.3g}",
            f"{row.n_bytes / 1e6:,.1f}",
            f"{row.link_bytes / 1e6:,.1f}",
            style="bold" if chosen else "",
        )
    return result


def _best(plan: Plan, others: Sequence[StanzaLayout]) -> StanzaLayout:
    """Return the layout with the most samples per second; among equals, one that separates layers."""
    return max([plan.best, *others], key=lambda row: row.samples_per_s)


def _in_words(row: StanzaLayout) -> str:
    return f"stanza, {row.n_fc} FC" if row.n_fc else row.name


def _conclusion(plan: Plan, others: Sequence[StanzaLayout]) -> list[str]:
    best, fastest = plan.best, _best(plan, others)
    workers = "1 fully-connected worker" if best.n_fc == 1 else f"{best.n_fc} fully-connected workers"
    convolution = "1 convolution worker" if best.batches == 1 else f"{best.batches} convolution workers"
    next_best = ""
    if plan.second is not None:
        next_best = f", {100 * plan.margin:.1f} % more samples/s than with {plan.second.n_fc}"
    ratios = ", ".join(f"{1 + faster(best, row):.2f} times {row.name}" for row in others)
    lines = [f"{workers} (FC) and {convolution}{next_best}", f"  samples/s: {ratios}"]
    if fastest is best:
        return [f"* {lines[0]}", lines[1]]
    gain = 1 + faster(fastest, best)
    beside = f"{gain:.2f} times the samples/s of the best layout that separates layers, which is"
    return [f"* {fastest.name}: {beside} {lines[0]}", lines[1]]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms"


def _numbers(
    asked: Asked, shape: Shape, times: Times, source: str, plan: Plan, others: Sequence[StanzaLayout]
) -> dict[str, Any]:
    paths = {"profile", "json"}
    return {
        "asked": {key: value for key, value in asked._asdict().items() if key not in paths},
        "shape": {**shape._asdict(), "fc_share": shape.fc_share},
        "times": {**times._asdict(), "source": source},
        "stanza": [row._asdict() for row in plan.rows],
        "others": [row._asdict() for row in others],
        "best": _in_words(_best(plan, others)),
        "best_n_fc": plan.best.n_fc,
        "margin": plan.margin if math.isfinite(plan.margin) else None,
        "faster_than": {row.name: faster(plan.best, row) for row in others},
    }
