"""Checks of the file as a whole: it describes the job that it holds, and its rows are those that were written."""

from __future__ import annotations

import math

import numpy as np

from hpcsync.audit.check import Check, Part, check_all, describe_columns
from hpcsync.config.job import Script
from hpcsync.trace.reader import Trace


def check_job(trace: Trace) -> Check:
    """Check that the attributes that repeat the job agree with it."""
    job = trace.job
    expected = {
        "paradigm": job.paradigm.name,
        "n_workers": job.cluster.workers,
        "n_servers": job.cluster.servers,
        "seed": job.seed,
    }
    given = {name: trace.attributes[name] for name in expected if name in trace.attributes}
    others = [(name, value) for name, value in given.items() if value != expected[name]]
    wrong = [f"{name} is {value!r}, in the job {expected[name]!r}" for name, value in others]
    return Check("attributes agree with the job", not wrong, len(given), "; ".join(wrong))


def check_rows(trace: Trace) -> list[Check]:
    """Check the rows of all tables by their checksums; no check for a trace of a format without them."""
    if trace.attributes["format_version"] < 8:
        return []
    n_rows = sum(map(len, trace.tables.values()))
    detail = f"/{', /'.join(trace.altered)}: changed since" if trace.altered else ""
    return [Check("rows are those that were written", not trace.altered, n_rows, detail)]


def check_clocks(trace: Trace) -> list[Check]:
    """Check that /clocks has each rank at most once for each start, with possible errors; in virtual time none.

    The starts are numbered, and follow each other. Traces in memory may lack the rows of both tables.
    """
    clocks, starts, job = trace.tables["clocks"], trace.tables["starts"], trace.job
    exist = (clocks["rank"] >= 0) & (clocks["rank"] < job.cluster.ranks)
    exist &= (clocks["start"] >= 0) & (clocks["start"] < max(1, len(starts)))
    ordered = starts["start"] == np.arange(len(starts))
    for name in ("now_s", "seq"):
        ordered &= np.diff(starts[name], prepend=0) >= 0
        ordered[:1] &= starts[name][:1] == 0  # the first one is before everything
    known = np.isfinite(clocks["offset_s"]) & np.isfinite(clocks["uncertainty_s"]) & (clocks["uncertainty_s"] >= 0)
    if trace.attributes.get("engine") == "simulator":
        known &= (clocks["offset_s"] == 0) & (clocks["uncertainty_s"] == 0)
    again = np.ones(len(clocks), bool)
    again[np.unique(clocks[["start", "rank"]], return_index=True)[1]] = False
    describe = describe_columns("/clocks", clocks, "start", "rank", "offset_s", "uncertainty_s")
    return [
        check_all(
            "clocks are those of the ranks",
            (~exist | again, describe),
            (~known, describe),
            (~ordered, describe_columns("/starts", starts, "start", "now_s", "seq")),
        )
    ]


def check_absences(trace: Trace) -> Check:
    """Check that there are no rows and values that the job cannot have.

    Only runs without servers have exchanges and distances of replicas, only all-reduce has a mean gradient of all
    workers, and only scripts state rates.
    """
    job, unfilled = trace.job, list[tuple[str, str]]()
    if job.has_servers:
        unfilled += [("exchanges", "worker"), ("evaluations", "consensus_distance")]
    if not job.one_model or job.paradigm.separates_layers:
        unfilled += [("exchanges", "mean_gradient_sq")]
    if not isinstance(job.workload, Script):
        unfilled += [("rates", "worker"), ("pushes", "lr"), ("exchanges", "lr")]
    parts = list[Part]()
    for table, column in unfilled:
        rows = trace.tables[table]
        if column in (rows.dtype.names or ()):  # some are not in traces of earlier releases
            parts.append((~np.isnan(rows[column]), describe_columns(f"/{table}", rows, column)))
    return check_all("only what the job can have is recorded", *parts)


def check_link(trace: Trace) -> list[Check]:
    """Check the times of the link that `hpcsync.record` measured; no check for a trace without them.

    Both are at most the longest sum of gradients, by which `hpcsync.record` limits what it measures. Between hosts the
    time of a gradient follows from the mean sum of gradients; on one host it is that of a copy in the memory.
    """
    given = {name: trace.attributes[name] for name in ("message_s", "gradient_s") if name in trace.attributes}
    if not given:
        return []
    exchanges, n = trace.tables["exchanges"], trace.job.cluster.workers
    sums_s = exchanges["comm_s"]
    message_s, gradient_s = (given.get(name, math.nan) for name in ("message_s", "gradient_s"))
    numbers_s = 2 * (n - 1) * message_s
    longest_s = sums_s.max(initial=0.0)
    right = 0 <= numbers_s <= longest_s * (1 + 1e-12) and 0 <= gradient_s <= longest_s
    if right and "," in trace.attributes["hosts"]:
        expected_s = max(0.0, float(sums_s.mean()) - numbers_s) * n / (2 * (n - 1))
        right = math.isclose(gradient_s, expected_s, rel_tol=1e-6, abs_tol=1e-9)
    detail = f"message_s {message_s}, gradient_s {gradient_s}, longest sum of gradients {longest_s} s"
    return [Check("times of the link fit to the sums of gradients", right, len(given), "" if right else detail)]
