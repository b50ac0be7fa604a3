"""Comparison of two traces: a run and its simulation, or the same job twice."""

from __future__ import annotations

import numpy as np
from pydantic import BaseModel, ConfigDict
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hpcsync.report.between import Between
from hpcsync.trace.reader import Trace
from hpcsync.trace.schema import Rows


class Side(BaseModel):
    """One trace up to the first update at which a given number of samples has been trained on.

    Attributes
    ----------
    time_s
        Time of that update, in seconds.
    wait_share, comm_share
        Shares of the workers' time until then; None if no time has passed.
    """

    model_config = ConfigDict(frozen=True)

    engine: str
    paradigm: str
    time_s: float
    wait_share: float | None
    comm_share: float | None


class Comparison(BaseModel):
    """Two traces up to the number of samples that both have reached; their updates need not be the same.

    Attributes
    ----------
    samples
        Number of samples.
    sides
        The two traces.
    common_grants
        Number of grants that both traces have; 0 without servers.
    same_grants
        Number of grants from the first on that go to the same worker for the same iteration in both traces.
    same_order
        Share of the pairs of common grants that are in the same order: 1 is the same order, 0.5 is chance. None for
        fewer than two common grants.
    """

    model_config = ConfigDict(frozen=True)

    samples: int
    sides: tuple[Side, Side]
    common_grants: int
    same_grants: int
    same_order: float | None

    @property
    def time_ratio(self) -> float | None:
        """Time of the second trace divided by the time of the first."""
        first, second = self.sides
        return second.time_s / first.time_s if first.time_s else None


def compare(first: Trace, second: Trace) -> Comparison:
    """Compare two traces up to the number of samples that both have reached."""
    samples = min(int(trace.tables["updates"]["samples"].max(initial=0)) for trace in (first, second))
    n_workers = max(first.n_workers, second.n_workers)
    granted_a, granted_b = _granted(first, n_workers), _granted(second, n_workers)
    common, places_a, places_b = np.intersect1d(granted_a, granted_b, assume_unique=True, return_indices=True)
    n = min(len(granted_a), len(granted_b))
    differ = np.flatnonzero(granted_a[:n] != granted_b[:n])
    return Comparison(
        samples=samples,
        sides=(side(first, samples), side(second, samples)),
        common_grants=len(common),
        same_grants=int(differ[0]) if len(differ) else n,
        same_order=_same_order(places_a, places_b),
    )


def side(trace: Trace, samples: int) -> Side:
    """Return a trace up to the update at which this number of samples has been trained on."""
    rows, updates = trace.tables["pushes" if trace.job.has_servers else "exchanges"], trace.tables["updates"]
    time_s = float(updates["now_s"][np.searchsorted(updates["samples"], samples)]) if samples else 0.0
    rows = rows[rows["now_s"] <= time_s]
    wait_s, comm_s = (float(rows[column].sum()) for column in ("wait_s", "comm_s"))
    between = Between.of(trace)
    between.add(rows)
    others_s = sum(float(rows[column].sum()) for column in ("load_s", "compute_s")) + float(between.seconds.sum())
    total_s = others_s + wait_s + comm_s
    return Side(
        engine=str(trace.attributes.get("engine")),
        paradigm=trace.job.paradigm.name,
        time_s=time_s,
        wait_share=wait_s / total_s if total_s else None,
        comm_share=comm_s / total_s if total_s else None,
    )


def _granted(trace: Trace, n_workers: int) -> Rows:
    """Return a number for the worker and the iteration of each grant, in the order of the grants, without stops.

    The grant that answers a worker's return may repeat one from before, which counts.
    """
    grants = trace.tables["grants"]
    grants = grants[grants["local_steps"] != 0]
    granted = grants["iteration"] * n_workers + grants["worker"]
    _, first = np.unique(granted, return_index=True)
    return granted[np.sort(first)]


def _same_order(a: Rows, b: Rows) -> float | None:
    if len(a) < 2:
        return None
    from scipy.stats import kendalltau

    return round(float((kendalltau(a, b).statistic + 1.0) / 2.0), 12)  # without rounding error at 1


def table(comparison: Comparison) -> RenderableType:
    """Return a table with a column for each trace and one for the ratio of the second to the first."""
    a, b = comparison.sides
    result = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("", "recorded" if a.engine == b.engine else a.engine, b.engine, "ratio"):
        result.add_column(name, justify="left" if name == "" else "right", no_wrap=True)
    result.add_row("paradigm", a.paradigm, b.paradigm, "")
    ratio = "" if comparison.time_ratio is None else f"{comparison.time_ratio:.3f}"
    result.add_row(f"time of {comparison.samples:,} samples", f"{a.time_s:.3f} s", f"{b.time_s:.3f} s", ratio)
    for name, share_a, share_b in (
        ("waiting", a.wait_share, b.wait_share),
        ("transfers", a.comm_share, b.comm_share),
    ):
        result.add_row(name, _percent(share_a), _percent(share_b), "")
    if comparison.same_order is None:
        return result
    order = f"{comparison.common_grants:,} common grants: {_percent(comparison.same_order)} of the pairs are in the "
    order += f"same order, the first {comparison.same_grants:,} grants are the same"
    return Group(result, Text(order, "dim"))


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f} %"
