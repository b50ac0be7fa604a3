"""Altered traces whose checksums have been written anew: what the audit finds, for each kind of alteration.

The table in docs/how-to/audit.md says the same: of each kind whether an audit finds it, or only a recomputation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from hpcsync.audit.trace_audit import audit
from hpcsync.config.job import Job
from hpcsync.report.summary import summarize
from hpcsync.simulator.simulate import simulate
from hpcsync.simulator.simulated_again import simulated_again
from hpcsync.trace.reader import Trace, load
from hpcsync.trace.schema import Change
from tests.unit.jobs import make_job
from tests.unit.trace.recorder import with_rows

PARADIGMS: list[dict[str, Any]] = [
    {"name": "bsp"},
    {"name": "ssp", "staleness": 2},
    {"name": "k-sync", "k": 2},
    {"name": "easgd", "period": 3},
    {"name": "allreduce"},
    {"name": "local-sgd", "steps": 3},
    {"name": "gossip", "mode": "pull"},
]
Alter = Callable[[Trace], Trace]


def column(table: str, name: str, change: Callable[[Any], Any], rows: slice | int = slice(None)) -> Alter:
    """Return the alteration of a column, in some rows of a table."""

    def alter(trace: Trace) -> Trace:
        of = {"steps": "pushes" if trace.job.has_servers else "exchanges"}.get(table, table)
        altered = trace.tables[of].copy()
        altered[name][rows] = change(altered[name][rows])
        return with_rows(trace, of, altered)

    return alter


def without(table: str, row: int) -> Alter:
    return lambda trace: with_rows(trace, table, np.delete(trace.tables[table], row))


def job(**tables: dict[str, Any]) -> Alter:
    """Return the alteration of keys of the job, and of the attributes that repeat them."""

    def alter(trace: Trace) -> Trace:
        changed = trace.job
        for name, keys in tables.items():
            options = getattr(changed, name).model_copy(update=keys) if keys else getattr(changed, name)
            changed = changed.model_copy(update={name: options})
        return dataclasses.replace(trace, attributes={**trace.attributes, "job": changed.to_toml()})

    return alter


def twice(values: Any) -> Any:
    return 2 * values


def lost(values: Any) -> Any:
    return np.nan * values


def norms_doubled(trace: Trace) -> Trace:
    for table in ("pushes", "exchanges", "updates"):
        for name in {"gradient_sq", "mean_gradient_sq"} & set(trace.tables[table].dtype.names):
            trace = column(table, name, twice)(trace)
    return trace


MIDDLE, LAST = 5, -1
AUDIT: dict[str, Alter] = {
    "times of computing": column("steps", "compute_s", twice),
    "a time of computing": column("steps", "compute_s", twice, MIDDLE),
    "longer waits": column("steps", "wait_s", lambda s: s + 100.0),
    "longer transfers": column("steps", "comm_s", lambda s: s + 100.0),
    "a time that is lost": column("steps", "wait_s", lost, MIDDLE),
    "begins": column("steps", "begin_s", lambda s: s - 100.0),
    "a batch size": column("steps", "batch_size", twice, MIDDLE),
    "a lost loss": column("steps", "loss", lost, MIDDLE),
    "all losses lost": column("steps", "loss", lost),
    "an impossible number of bytes": column("steps", "wire_bytes", lambda n: n * 0 - 1),
    "a lost evaluation": column("evaluations", "loss", lost, 1),
    "the start of a clock": column("clocks", "start", lambda n: n + 1),
    "a removed step": lambda trace: without("pushes" if trace.job.has_servers else "exchanges", MIDDLE)(trace),
    "a learning rate": column("updates", "lr", twice, MIDDLE),
    "samples": column("updates", "samples", twice),
    "times of updates": column("updates", "now_s", twice),
    "a removed update": without("updates", MIDDLE),
    "later evaluations": column("evaluations", "now_s", lambda s: s + 100.0),
    "earlier evaluations": column("evaluations", "now_s", lambda s: s - 100.0),
    "samples of an evaluation": column("evaluations", "samples", twice, 1),
    "an impossible accuracy": column("evaluations", "accuracy", lambda a: np.full_like(a, 1.5)),
    "no last evaluation": without("evaluations", LAST),
    "uncertain clocks": column("clocks", "uncertainty_s", lambda s: s + 100.0),
    "clock offsets": column("clocks", "offset_s", lambda s: s + 1.0),
    "a removed departure": without("membership", 0),
    "the last departure removed": without("membership", LAST),
    "all evaluations removed": lambda trace: with_rows(trace, "evaluations", trace.tables["evaluations"][:0]),
    "another problem of a step": column("steps", "problem", lambda code: code + 1, MIDDLE),
    "a departure as a death": column("membership", "change", lambda change: np.full_like(change, Change.DIED), 0),
    "rate of the job": job(optimizer={"lr": 0.04}),
    "stopping rule of the job": job(stop={"samples": 4000}),
    "target of the job": job(stop={"target_loss": 1e9}),
    "smaller norms of gradients": column("steps", "gradient_sq", lambda square: 0.01 * square),
    "larger norms of updates": column("updates", "gradient_sq", lambda square: 100.0 * square),
    "a lost norm": column("steps", "gradient_sq", lost, MIDDLE),
    "all norms of workers lost": column("steps", "gradient_sq", lost),
}
OF_GRADIENTS = (
    *("rate of the job", "smaller norms of gradients", "larger norms of updates"),
    *("a lost norm", "all norms of workers lost"),
)
RECOMPUTED: dict[str, Alter] = {
    "evaluations of the job": job(evaluation={"every_samples": 70}),
    "seed of the job": lambda trace: dataclasses.replace(
        trace,
        attributes={
            **trace.attributes,
            "seed": 7,
            "job": trace.job.model_copy(update={"seed": 7}).to_toml(),
        },
    ),
    "losses": column("steps", "loss", twice),
    "a loss": column("steps", "loss", twice, MIDDLE),
    "loss of an evaluation": column("evaluations", "loss", lambda loss: 0.9 * loss, 1),
    "shorter waits": column("steps", "wait_s", lambda s: 0.5 * s),
    "shorter transfers": column("steps", "comm_s", lambda s: 0.5 * s),
    "bytes": column("steps", "wire_bytes", twice),
    "all norms": norms_doubled,
}


@pytest.fixture(scope="module", params=PARADIGMS, ids=lambda paradigm: paradigm["name"])
def trace(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    folder = tmp_path_factory.mktemp("altered") / "run"
    assert simulate(of(request.param), folder, Console(quiet=True)) == 0
    return load(folder)


def of(paradigm: dict[str, Any]) -> Job:
    return make_job(
        workload={"name": "linear", "batch_size": 8, "features": 11, "samples": 200},
        optimizer={"name": "sgd", "lr": 0.02},
        stop={"samples": 800},
        evaluation={"every_samples": 100},
        paradigm=paradigm,
        cluster={
            "workers": 3,
            "compute": {"model": "lognormal", "seconds": [1.0, 1.3, 2.1], "jitter": 0.2},
            "network": {"bandwidth_gbit": 1e-5, "latency_us": 5000},
        },
    )


def passes(trace: Trace) -> bool:
    return all(check.passed for check in audit(trace))


def test_the_trace_itself_passes(trace: Trace) -> None:
    assert passes(trace)
    assert all(check.passed for check in simulated_again(trace))


def test_every_kind_that_the_audit_finds(trace: Trace) -> None:
    without_gradients = trace.job.paradigm.name == "easgd"  # its workers push positions
    kinds = {name: alter for name, alter in AUDIT.items() if not (without_gradients and name in OF_GRADIENTS)}
    assert [name for name, alter in kinds.items() if passes(alter(trace))] == []


def test_what_the_job_cannot_have_is_found(trace: Trace) -> None:
    forged = {"rates": with_rows(trace, "rates", np.zeros(1, trace.tables["rates"].dtype))}
    forged["lr"] = column("steps", "lr", lambda lr: 0.1, MIDDLE)(trace)
    if trace.job.has_servers:
        forged["exchanges"] = with_rows(trace, "exchanges", np.zeros(1, trace.tables["exchanges"].dtype))
        forged["distance"] = column("evaluations", "consensus_distance", lambda distance: 1.0, 1)(trace)
    elif not trace.job.paradigm.one_model:
        forged["mean"] = column("exchanges", "mean_gradient_sq", lambda square: 1.0, MIDDLE)(trace)
    name = "only what the job can have is recorded"
    found = {key: [check.name for check in audit(other) if not check.passed] for key, other in forged.items()}
    assert found == {key: [name] for key in forged}


def test_every_kind_that_a_recomputation_finds(trace: Trace) -> None:
    altered = {name: alter(trace) for name, alter in RECOMPUTED.items()}
    if trace.job.paradigm.name == "easgd":
        del altered["all norms"]
    if not trace.tables["exchanges"]["wait_s"].any() and not trace.job.has_servers:
        del altered["shorter waits"]  # nothing is altered
    assert [name for name, other in altered.items() if all(check.passed for check in simulated_again(other))] == []


def test_these_kinds_change_what_is_said(trace: Trace) -> None:
    """Without effect on a summary their discovery would show nothing."""
    before = summarize(trace).as_dict()
    for name in ("shorter transfers", "bytes"):
        assert summarize(RECOMPUTED[name](trace)).as_dict() != before, name


def test_the_documentation_lists_every_kind() -> None:
    text = (Path(__file__).parents[3] / "docs" / "how-to" / "audit.md").read_text()
    table = text.partition("## Altered on purpose")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    found = {cells[0]: cells[2] for cells in rows[2:]}
    assert {name for name, by in found.items() if by == "audit"} == AUDIT.keys()
    assert {name for name, by in found.items() if by != "audit"} == RECOMPUTED.keys()
