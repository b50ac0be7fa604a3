"""Checks of the squared norms of gradients: which rows have one, and that a mean fits to what it is the mean of."""

from __future__ import annotations

import numpy as np

from hpcsync.audit.check import Check, check_all, check_rows, describe_columns
from hpcsync.config.workloads import Timing
from hpcsync.trace.iteration_counts import running_count
from hpcsync.trace.reader import Trace
from hpcsync.trace.schema import ADDED, Outcome, Rows

ROUNDING = 1e-3  # of a norm, as many numbers of 32 bits are summed
HUGE = 1e19  # less than the norm of a vector whose square is too large for float32
NORM, MEAN = "gradient_sq", "mean_gradient_sq"


def check_norms(trace: Trace) -> list[Check]:
    """Return the checks; none for a trace of a format version without norms."""
    if trace.attributes["format_version"] < ADDED[NORM]:
        return []
    known = norms_are_known(trace)
    if not known.passed:
        return [known]
    if trace.job.has_servers:
        return [known, means_fit_to_contributions(trace)]
    return [known, means_fit_to_workers(trace) if trace.job.paradigm.one_model else steps_are_along_own(trace)]


def norms_are_known(trace: Trace) -> Check:
    """Check that norms are not negative, that there is none where no gradient was computed, and that others are there.

    Gradients from before the run was resumed may be those of an older format, whose pushes may have been handled
    afterwards. A loop that was only recorded (`hpcsync.record`) has no norms.
    """
    job, table = trace.job, "pushes" if trace.job.has_servers else "exchanges"
    rows, updates = trace.tables[table], trace.tables["updates"]
    norm, since_s = rows[NORM], trace.tables["starts"]["now_s"].max(initial=0.0)
    none = isinstance(job.workload, Timing) or job.paradigm.separates_layers
    none |= job.has_servers and job.paradigm.contribution != "gradient"
    absent = (rows["share"] < 1 if job.has_servers else rows["batch_size"] == 0) | none
    needed = ~absent & (rows["end_s"] >= since_s)
    some = (needed & ~np.isnan(norm)).any() or not np.isnan(updates[NORM]).all()
    lacks = needed & np.isnan(norm) & some
    return check_all(
        "norms of gradients are known where there are gradients",
        ((norm < 0) | (absent & ~np.isnan(norm)) | lacks, describe_columns(f"/{table}", rows, NORM)),
        ((updates[NORM] < 0) | (none & ~np.isnan(updates[NORM])), describe_columns("/updates", updates, NORM)),
    )


def means_fit_to_contributions(trace: Trace) -> Check:
    """Check the norm of every update by those of its contributions.

    Several servers on real ranks may not know it. Where gradients are decoded, or corrected for their delay, they are
    others than those whose norms are recorded, and there is no bound.
    """
    job, updates, pushes = trace.job, trace.tables["updates"], trace.tables["pushes"]
    applied = pushes[pushes["outcome"] == Outcome.APPLIED]
    others = job.compresses or job.paradigm.delay_correction is not None
    sure = not others and (trace.attributes["n_servers"] == 1 or trace.attributes.get("engine") == "simulator")
    at = np.clip(applied["version_read"] + applied["staleness"], 0, max(0, len(updates) - 1))
    low, high = _bounds(at, applied["weight"], applied[NORM], len(updates))
    if others:
        low, high = np.zeros(len(updates)), np.where(np.isnan(high), np.nan, np.inf)
    return _within("the norm of an update fits to those of its contributions", "/updates", updates, low, high, sure)


def means_fit_to_workers(trace: Trace) -> Check:
    """Check that all workers state the same norm of a common step, and that it fits to those of their gradients."""
    job, updates = trace.job, trace.tables["updates"]
    rows = trace.tables["exchanges"]
    rows = rows[rows["batch_size"] > 0]
    at = running_count(rows["worker"]) - 1
    rows, at = rows[at < len(updates)], at[at < len(updates)]
    weight = rows["batch_size"].astype(float) if job.batches.policy != "equal" else np.ones(len(rows))
    weight /= np.bincount(at, weight, len(updates))[at]
    low, high = _bounds(at, weight, rows[NORM], len(updates))
    if job.compresses:
        low, high = np.zeros(len(updates)), np.where(np.isnan(high), np.nan, np.inf)
    name = "the norm of a common step fits to those of the workers' gradients"
    common = updates[NORM][at]
    same = np.isclose(rows[MEAN], common, rtol=ROUNDING, atol=0.0, equal_nan=True)
    same |= ~np.isin(rows["worker"], job.takers)
    agreed = check_rows(name, ~same, describe_columns("/exchanges", rows, "iteration", MEAN))
    return agreed if not agreed.passed else _within(name, "/updates", updates, low, high, sure=False)


def steps_are_along_own(trace: Trace) -> Check:
    """Check that the norm of each update is that of the step of which it was made."""
    updates, rows = trace.tables["updates"], trace.tables["exchanges"]
    steps = rows[rows["batch_size"] > 0]
    n = min(len(updates), len(steps))
    same = np.isclose(updates[NORM][:n], steps[NORM][:n], rtol=0.0, atol=0.0, equal_nan=True)
    name = "the norm of an update is that of its step's gradient"
    return check_rows(name, ~same, describe_columns("/updates", updates[:n], "version", NORM))


def _bounds(at: Rows, weight: Rows, square: Rows, n: int) -> tuple[Rows, Rows]:
    """Return the smallest and largest norm of each of n weighted sums, by the triangle inequality.

    Parameters
    ----------
    at
        Sum that each vector is part of, from 0 to n - 1.
    weight, square
        Its weight, and the square of its norm; infinite also if it is finite but too large for float32.
    """
    length, infinite = weight * np.sqrt(square), np.isinf(square)
    high, largest = np.bincount(at, length, n), np.zeros(n)
    np.fmax.at(largest, at, length)
    others = np.bincount(at, np.where(infinite, 0.0, length), n)
    huge = np.bincount(at, np.where(infinite, weight * HUGE, 0.0), n)
    with np.errstate(invalid="ignore"):  # no lower bound where several norms are infinite
        low = np.where(np.bincount(at, infinite, n) == 1, huge - others, 2 * largest - high)
    return low, high


def _within(name: str, table: str, rows: Rows, low: Rows, high: Rows, sure: bool) -> Check:
    """Check norms by their bounds; if `sure`, they must be known where the upper bound is."""
    norm = np.sqrt(rows[NORM])
    with np.errstate(invalid="ignore"):
        slack = np.where(np.isfinite(high), ROUNDING * high, 0.0)
        wrong = (norm > high + slack) | (norm < low - slack)
    wrong |= sure & np.isnan(norm) & np.isfinite(high) & (high > 0)
    return check_rows(
        name, wrong, lambda i: f"{table} row {i}: the norm {norm[i]:.6g} is not in {low[i]:.6g} to {high[i]:.6g}"
    )
