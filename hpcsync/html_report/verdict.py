"""Verdict of a report: three or four sentences that say what the numbers show, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from hpcsync.html_report.run_data import PARTS, RunData
from hpcsync.html_report.svg import number
from hpcsync.report.between import WORDS as BETWEEN
from hpcsync.report.explanation import STRAGGLES
from hpcsync.report.variants import LEAST_SEEDS, Row, Variants
from hpcsync.report.wording import plural


def of_variants(result: Variants, runs: Mapping[str, Sequence[RunData]]) -> list[str]:
    """Return three sentences on the variants under one condition, and one on losses that are not finite if any are."""
    return [*_of_variants(result, runs), *_diverged(runs)]


def _of_variants(result: Variants, runs: Mapping[str, Sequence[RunData]]) -> list[str]:
    every = [run for each in runs.values() for run in each]
    if len(result.rows) == 1:
        return [_arrival(result.rows[0], result, every), _time(every), checked(every)]
    fastest = next((row for row in result.rows if row.label == result.fastest), None)
    if fastest is None:
        return [_no_fastest(result), _quality(result, None), checked(every)]
    seeds = f"on average over {fastest.runs} seeds" if fastest.runs > 1 else "with one seed"
    assert fastest.time_s is not None
    first = f"{fastest.label} reached {result.target or 'its target'} soonest, after {_mean(fastest)} {seeds}"
    if fastest.fastest is not None:
        first += f"; its probability of being the fastest is {fastest.fastest:.2f}"
    last = checked(every) if any(map(_failed, every)) else _quality(result, fastest)
    return [f"{first}.", _behind(result, fastest), last]


def _diverged(runs: Mapping[str, Sequence[RunData]]) -> list[str]:
    n_lost = {label: sum(run.summary.diverged_at is not None for run in each) for label, each in runs.items()}
    lost = [f"{n} of {plural(len(runs[label]), 'run')} of {label}" for label, n in n_lost.items() if n]
    return [f"No loss was finite at the end of {listed(lost)}."] if lost else []


def _failed(run: RunData) -> bool:
    return not all(check.passed for check in run.checks or ())


def _mean(row: Row) -> str:
    assert row.time_s is not None
    words = f"{number(row.time_s.mean, 3)} s"
    if row.time_s.half_width is None:
        return words
    low, high = row.time_s.mean - row.time_s.half_width, row.time_s.mean + row.time_s.half_width
    return f"{words} (95 % interval {number(low, 3)} to {number(high, 3)} s)"


def _no_fastest(result: Variants) -> str:
    if result.target is None:
        rates = [row for row in result.rows if row.samples_per_s is not None]
        best = max(rates, key=lambda row: row.samples_per_s or 0.0, default=None)
        words = "The jobs have no common target, so no variant is the fastest"
        rate = "" if best is None else f"; {best.label} processed most samples per second ({best.samples_per_s:,.0f})"
        return f"{words}{rate}."
    best = max(result.rows, key=lambda row: row.arrived / row.runs)
    if not best.arrived:
        return f"No run reached {result.target}."
    return (
        f"No variant reached {result.target} in all of its runs, so none is the fastest; {best.label} did in "
        f"{best.arrived} of {best.runs}."
    )


def _behind(result: Variants, fastest: Row) -> str:
    sure: list[str] = []
    unsure: list[str] = []
    absent: list[str] = []
    apart: list[str] = []  # without a common seed
    sooner: list[str] = []  # at the common seeds
    for row in result.rows:
        if row is fastest:
            continue
        if row.behind_s is None:
            (absent if row.arrived < row.runs else apart).append(row.label)
        elif row.behind_s.mean < 0:
            sooner.append(f"{row.label} (by {number(-row.behind_s.mean, 3)} s)")
        elif row.behind_s.half_width is not None and row.behind_s.mean > row.behind_s.half_width:
            sure.append(f"{row.label} (by {number(row.behind_s.mean, 3)} s)")
        else:
            unsure.append(f"{row.label} (by {number(row.behind_s.mean, 3)} s)")
    parts = []
    if sure:
        parts.append(f"it is ahead of {listed(sure)} by more than the seeds explain")
    if unsure:
        few = f", since an interval needs {LEAST_SEEDS} common seeds" if not _has_intervals(result) else ""
        parts.append(f"its lead over {listed(unsure)} may be chance{few}")
    if sooner:
        parts.append(f"at the common seeds it is behind {listed(sooner)}")
    if absent:
        parts.append(f"no mean difference is known to {listed(absent)}, because not all runs reached the target")
    if apart:
        parts.append(f"no difference is known to {listed(apart)}, because there is no common seed")
    words = "; ".join(parts)
    return f"{words[:1].upper()}{words[1:]}."


def _has_intervals(result: Variants) -> bool:
    return any(row.behind_s is not None and row.behind_s.half_width is not None for row in result.rows)


def _quality(result: Variants, fastest: Row | None) -> str:
    waits = sorted((row.wait_share, row.label) for row in result.rows if row.wait_share is not None)
    parts = []
    if len(waits) > 1:
        (low, least), (high, most) = waits[0], waits[-1]
        parts.append(f"Workers waited {_percent(low)} of their time under {least} and {_percent(high)} under {most}")
    accurate = [row for row in result.rows if row.accuracy is not None]
    if accurate:
        best = max(accurate, key=lambda row: row.accuracy or 0.0)
        parts.append(f"{best.label} ended with the best accuracy ({best.accuracy:.4g})")
        if fastest is not None and fastest is not best and fastest.accuracy is not None:
            parts[-1] += f", {fastest.label} with {fastest.accuracy:.4g}"
    else:
        known = [row for row in result.rows if row.loss is not None and math.isfinite(row.loss)]
        if known:
            best = min(known, key=lambda row: row.loss or 0.0)
            parts.append(f"{best.label} ended with the smallest loss ({best.loss:.4g})")
    return (", and ".join(parts) or "No evaluation has a result") + "."


def _arrival(row: Row, result: Variants, runs: Sequence[RunData]) -> str:
    run = runs[0].summary
    engines = {"simulator": "in virtual time", "ddp": "with DistributedDataParallel"}
    where = engines.get(run.engine or "", "on MPI ranks")
    crew = f"{plural(run.n_workers, 'worker')}" + (f" and {plural(run.n_servers, 'server')}" if run.n_servers else "")
    who = f"{run.name} ({run.paradigm}, {crew}, {where})"
    if run.status != "finished":
        return f"{who} did not finish: its status is {run.status}, after {number(run.duration_s)} s."
    duration_s, samples = (
        float(np.mean([getattr(r.summary, name) for r in runs])) for name in ("duration_s", "samples")
    )
    ended = f"ended after {number(duration_s)} s and {samples:,.0f} samples"
    ended += f" on average over {len(runs)} seeds" if len(runs) > 1 else ""
    if result.target is None:
        return f"{who} {ended}; it has no target."
    if not row.arrived:
        return f"{who} did not reach {result.target}: it {ended}."
    if row.time_s is None:
        return f"{who} reached {result.target} in {row.arrived} of {plural(row.runs, 'run')}."
    over = f", the mean of {row.runs} seeds" if row.runs > 1 else ""
    return f"{who} reached {result.target} after {_mean(row)}{over}."


def _time(runs: Sequence[RunData]) -> str:
    sums_s = sum((run.parts_s.sum(axis=0) for run in runs), np.zeros(len(PARTS)))
    if not sums_s.sum():
        return "No iteration was recorded."
    load, compute, wait, comm, between = sums_s / sums_s.sum()
    words = f"Workers computed {_percent(compute)} of their time, waited {_percent(wait)}"
    words += f", and communicated {_percent(comm)}"
    words += f"; {_percent(load)} was loading" if load >= 0.01 else ""
    words += f"; {_percent(between)} was {BETWEEN}" if between >= 0.01 else ""
    return words + _slowest(runs[0]) + "."


def _slowest(run: RunData) -> str:
    if len(run.slowness) < 2 or np.isnan(run.slowness).any():
        return ""
    worker = int(run.slowness.argmax())
    if run.slowness[worker] < STRAGGLES:
        return ""
    host = f" on {run.hosts[worker]}" if len(set(run.hosts)) > 1 else ""
    among = " of those that train the same layers" if run.job.paradigm.separates_layers else ""
    times = f"its iterations take {run.slowness[worker]:.2g} times the median"
    return f"; worker {worker}{host} is the slowest{among}, {times}"


def checked(runs: Sequence[RunData]) -> str:
    """Return the result of the audits in a sentence, with the deaths and stalls."""
    audited = [run for run in runs if run.checks is not None]
    failed = list(filter(_failed, audited))
    if failed:
        result = f"The audit found a failure in {len(failed)} of {plural(len(audited), 'run')}"
    elif len(audited) == len(runs) == 1:
        result = "The run passes every check of its audit"
    elif audited:
        result = f"Every audited run ({len(audited)} of {len(runs)}) passes every check"
    else:
        result = "No run was audited"
    n_deaths, n_stalls = sum(len(run.summary.deaths) for run in runs), sum(run.n_stalls for run in runs)
    happened = [plural(n, word) for n, word in ((n_deaths, "death"), (n_stalls, "report of a stall")) if n]
    verb = "was" if n_deaths + n_stalls == 1 else "were"
    return f"{result}; there {verb} {listed(happened)}." if happened else f"{result}."


# ---- words ----


def listed(words: Sequence[str]) -> str:
    """Return ``a, b and c``."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if 0.0005 <= share < 0.1 else f"{100 * share:.0f} %"
