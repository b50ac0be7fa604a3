"""Checks of the file as a whole: it describes the job that it holds, and its rows are those that were written."""

from __future__ import annotations

import math

import numpy as np

from hpcsync.audit.check import Check, Part, check_all, describe_columns, repeated
from hpcsync.config.job import Script
from hpcsync.paradigms.records import Problem
from hpcsync.trace.reader import Trace
from hpcsync.trace.schema import ADDED, Change, Rows

ENGINES = ("mpi", "simulator", "ddp")


def check_job(trace: Trace) -> Check:
    """Check that the attributes that repeat the job agree with it, and that the engine is known."""
    job, engine = trace.job, trace.attributes.get("engine")
    expected = {
        "paradigm": job.paradigm.name,
        "n_workers": job.cluster.workers,
        "n_servers": job.cluster.servers,
        "seed": job.seed,
    }
    given = {name: trace.attributes.get(name) for name in expected}
    others = [(name, value) for name, value in given.items() if value != expected[name]]
    wrong = [f"{name} is {value!r}, in the job {expected[name]!r}" for name, value in others]
    wrong += [f"engine is {engine!r}, not one of {', '.join(ENGINES)}"] * (engine not in ENGINES)
    return Check("attributes agree with the job", not wrong, len(given), "; ".join(wrong))


def check_rows(trace: Trace) -> list[Check]:
    """Check the rows of all tables by their checksums; no check for a trace of a format without them."""
    if trace.attributes["format_version"] < 8 and not trace.altered:
        return []
    n_rows = sum(map(len, trace.tables.values()))
    detail = f"/{', /'.join(trace.altered)}: changed since" if trace.altered else ""
    return [Check("rows are those that were written", not trace.altered, n_rows, detail)]


def check_clocks(trace: Trace) -> list[Check]:
    """Check that /clocks has each rank once for each start, with possible errors; in virtual time none.

    The starts are numbered, and follow each other. A start may lack ranks of workers that are away. Only simulations
    have no starts.
    """
    clocks, starts, job = trace.tables["clocks"], trace.tables["starts"], trace.job
    simulated = trace.attributes["engine"] == "simulator"
    exist = (clocks["rank"] >= 0) & (clocks["rank"] < job.cluster.ranks)
    exist &= (clocks["start"] >= 0) & (clocks["start"] < max(1, len(starts)))
    ordered = starts["start"] == np.arange(len(starts))
    for name in ("now_s", "seq"):
        ordered &= np.diff(starts[name], prepend=0) >= 0
        ordered[:1] &= starts[name][:1] == 0  # the first one is before everything
    known = np.isfinite(clocks["offset_s"]) & np.isfinite(clocks["uncertainty_s"]) & (clocks["uncertainty_s"] >= 0)
    exact = clocks["rank"] == 0 if trace.attributes["engine"] == "mpi" else np.full(len(clocks), simulated)
    known &= ~exact | ((clocks["offset_s"] == 0) & (clocks["uncertainty_s"] == 0))
    absent = [] if simulated else np.argwhere(_absent(trace)).tolist()
    workers = [(start, rank, rank - job.cluster.servers) for start, rank in absent]
    missing = [(start, rank) for start, rank, worker in workers if worker < 0 or not _is_away(trace, start, worker)]
    describe = describe_columns("/clocks", clocks, "start", "rank", "offset_s", "uncertainty_s")
    return [
        check_all(
            "clocks are those of the ranks",
            (~exist | repeated(clocks[["start", "rank"]]), describe),
            (~known, describe),
            (~ordered, describe_columns("/starts", starts, "start", "now_s", "seq")),
            (np.array([not simulated and not len(starts)]), lambda _: "/starts has no row"),
            (
                np.ones(len(missing), bool),
                lambda i: f"/clocks has no row of start {missing[i][0]} and rank {missing[i][1]}",
            ),
        )
    ]


def _absent(trace: Trace) -> Rows:
    """Return which ranks each start has no row of in /clocks, bool of shape (n_starts, n_ranks)."""
    clocks, starts, n_ranks = trace.tables["clocks"], trace.tables["starts"], trace.job.cluster.ranks
    absent = np.ones((len(starts), n_ranks), bool)
    known = (clocks["start"] >= 0) & (clocks["start"] < len(starts)) & (clocks["rank"] >= 0)
    known &= clocks["rank"] < n_ranks
    absent[clocks["start"][known], clocks["rank"][known]] = False
    return absent


def _is_away(trace: Trace, start: int, worker: int) -> bool:
    """Return whether a worker has left before a start, or dies after it without a push or an exchange."""
    changes, start_row = trace.tables["membership"], trace.tables["starts"][start]
    rows = trace.tables["pushes" if trace.job.has_servers else "exchanges"]
    own = changes[changes["worker"] == worker]
    before, after = own[own["seq"] <= start_row["seq"]], own[own["seq"] > start_row["seq"]]
    acts_s = rows["now_s"][(rows["worker"] == worker) & (rows["now_s"] > start_row["now_s"])]
    dies = after["change"][:1].tolist() == [Change.DIED] and not (acts_s <= after["now_s"][0]).any()
    return dies or before["change"][-1:].tolist() not in ([], [Change.JOINED])


def check_absences(trace: Trace) -> Check:
    """Check that there are no rows and values that the job cannot have.

    Only runs without servers have exchanges and distances of replicas, only all-reduce has a mean gradient of all
    workers, and only scripts state rates and have steps without a gradient. Workers die only where the others continue,
    or between two starts; before a resume `on_death` may have been another. A trace has no values of columns that came
    with a later format version.
    """
    job, unfilled = trace.job, list[tuple[str, str]]()
    steps = "pushes" if job.has_servers else "exchanges"
    if job.has_servers:
        unfilled += [("exchanges", "worker"), ("evaluations", "consensus_distance")]
    if not job.paradigm.one_model or job.paradigm.separates_layers:
        unfilled += [("exchanges", "mean_gradient_sq")]
    if not isinstance(job.workload, Script):
        unfilled += [("rates", "worker"), (steps, "lr")]
    parts = list[Part]()
    for table, column in unfilled:
        rows = trace.tables[table]
        parts.append((~np.isnan(rows[column]), describe_columns(f"/{table}", rows, column)))
    possible = list(Problem) if isinstance(job.workload, Script) else [Problem.NONE, Problem.LOSS_NOT_FINITE]
    rows = trace.tables[steps]
    parts.append((~np.isin(rows["problem"], possible), describe_columns(f"/{steps}", rows, "problem")))
    changes = trace.tables["membership"]
    dies = changes["change"] == Change.DIED
    absent = np.flatnonzero(_absent(trace)[:, job.cluster.servers :].any(axis=0))
    dies &= ~np.isin(changes["worker"], absent) & (job.cluster.on_death != "continue")
    dies &= changes["seq"] > trace.tables["starts"]["seq"].max(initial=0)  # before a resume, under another on_death
    parts.append((dies, describe_columns("/membership", changes, "worker", "change")))
    later = {column for column, version in ADDED.items() if version > trace.attributes["format_version"]}
    for table, rows in trace.tables.items():
        for column in later & set(rows.dtype.names or ()):
            known = ~np.isnan(rows[column]) if rows.dtype[column].kind == "f" else rows[column] != 0
            parts.append((known, describe_columns(f"/{table}", rows, column)))
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
