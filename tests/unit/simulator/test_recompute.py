"""Recomputation of runs from their traces: all bits again, and what differs is found."""

import dataclasses
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from hpcsync.audit.trace_audit import audit
from hpcsync.cli.app import app
from hpcsync.config.job import Job
from hpcsync.simulator.recompute import EVALUATIONS, LOSSES, WEIGHTS, NotRecomputed, recompute
from hpcsync.simulator.simulate import simulate
from hpcsync.simulator.simulated_again import ROWS, simulated_again
from hpcsync.trace.reader import Trace, load
from hpcsync.training.parameter_store import Store
from tests.unit.jobs import make_job
from tests.unit.simulator.running import PARADIGMS, WITHOUT_SERVER
from tests.unit.trace.recorder import attributes, edit, with_rows

FINE = {"name": "ashl", "warmup": 0, "profiled": 2, "steps_coarse": 1, "loss_preset": 1e9, "staleness": 0}
SERVED: list[dict[str, Any]] = [
    *PARADIGMS,
    {"name": "asp", "compensation": "constant"},
    {"name": "k-sync", "k": 2, "cancel": "abort"},
    {"name": "k-batch-sync", "k": 2},
    {"name": "k-async", "k": "min", "staleness_max": 2},
    {"name": "async-diloco", "steps": 3, "quorum": 2, "grace_s": 0.5},
    {"name": "sync-switch", "share": 0.5, "then": {"name": "asp"}},
    {"name": "adsp", "check_period_s": 3.0, "interval_min_s": 0.5, "search_every_s": 10.0},
    {"name": "adsp", "check_period_s": 3.0, "interval_min_s": 0.5, "search_every_s": 10.0, "loss": "evaluation"},
    {**FINE, "commit": "on-arrival"},
    {**FINE, "commit": "after-gate"},
]
IN_STEP = [
    *(each for each in WITHOUT_SERVER if each["name"] in ("allreduce", "local-sgd")),
    *(each for each in WITHOUT_SERVER if each.get("mode") == "permutation" or each.get("synchronous")),
    {"name": "gossip", "mode": "pull", "synchronous": True},
]


def job(paradigm: dict[str, Any], **tables: Any) -> Job:
    """Return a job of three workers, the slowest of which takes twice as long as the fastest."""
    compute = {"model": "lognormal", "seconds": [1.0, 1.3, 2.1], "jitter": 0.2}
    return make_job(
        **{
            "workload": {"name": "linear", "batch_size": 8, "features": 11, "samples": 200},
            "optimizer": {"name": "sgd", "lr": 0.02, "momentum": 0.5},
            "stop": {"samples": 800},
            "evaluation": {"every_samples": 100},
            "paradigm": paradigm,
            "cluster": {"workers": 3, "compute": compute},
            **tables,
        }
    )


def trained(folder: Path, this: Job) -> Trace:
    assert simulate(this, folder / "run", Console(quiet=True)) == 0
    trace = load(folder / "run")
    assert [check.name for check in audit(trace) if not check.passed] == []
    return trace


def found(trace: Trace) -> dict[str, str]:
    """Return the names of all checks, with "bit by bit" or another detail."""
    return {check.name: check.detail if check.passed else f"FAILED: {check.detail}" for check in recompute(trace)}


ALL_BITS = dict.fromkeys((LOSSES, EVALUATIONS, WEIGHTS), "bit by bit")


@pytest.mark.parametrize("paradigm", [*SERVED, *IN_STEP], ids=str)
def test_every_bit_follows_from_the_trace(tmp_path: Path, paradigm: dict[str, Any]) -> None:
    optimizer = {} if paradigm["name"] != "asp" else {"optimizer": {"name": "sgd", "lr": 0.02}}
    assert found(trained(tmp_path, job(paradigm, **optimizer))) == ALL_BITS


@pytest.mark.parametrize(
    "tables",
    [
        {"stop": {"seconds": 21.7}},
        {"stop": {"samples": 10**6, "target_loss": 1.0}},
        {"compression": {"name": "top-k", "ratio": 0.3}},
        {"batches": {"policy": "equal-finish", "interval": 2, "predictor": "last"}},
        {"cluster": {"workers": 3, "servers": 2, "compute": {"model": "constant", "seconds": [1.0, 1.3, 2.1]}}},
        {"workload": {"name": "digits", "batch_size": 16}, "stop": {"samples": 500}},
    ],
    ids=str,
)
def test_however_the_run_is_set(tmp_path: Path, tables: dict[str, Any]) -> None:
    assert found(trained(tmp_path, job({"name": "ssp", "staleness": 1}, **tables))) == ALL_BITS


@pytest.mark.parametrize("paradigm", [{"name": "ssp", "staleness": 1}, {"name": "allreduce"}], ids=str)
def test_a_trace_whose_target_no_evaluation_could_reach(tmp_path: Path, paradigm: dict[str, Any]) -> None:
    """Such runs, of a workload without an accuracy, were made before they were refused."""
    trace = trained(tmp_path, job(paradigm))
    began = job(paradigm, stop={"samples": 800, "target_accuracy": 0.9})
    trace = dataclasses.replace(trace, attributes={**trace.attributes, "job": began.to_toml()})
    assert trace.job.stop.target_accuracy == 0.9
    assert found(trace) == ALL_BITS
    assert all(check.passed for check in simulated_again(trace))


def test_a_worker_that_leaves(tmp_path: Path) -> None:
    events = [{"change": "leave", "worker": 1, "at_s": 9.0}]
    compute = {"model": "constant", "seconds": [1.0, 1.3, 2.1]}
    this = job({"name": "bsp"}, cluster={"workers": 3, "compute": compute, "events": events})
    assert found(trained(tmp_path, this)) == ALL_BITS


@pytest.mark.parametrize(
    "paradigm",
    [
        {"name": "local-sgd", "steps": 3, "outer_lr": 0.7, "outer_momentum": 0.9},
        {"name": "gossip", "mode": "pull", "synchronous": True, "period": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("stop", [{"samples": 800}, {"samples": 8 * 3 * 8}], ids=str)
def test_workers_that_all_leave_between_exchanges_exchange_once_more(
    tmp_path: Path, paradigm: dict[str, Any], stop: dict[str, Any]
) -> None:
    """Unless the rule ends them after the same iteration."""
    leave = [{"worker": worker, "change": "leave", "at_iteration": 9} for worker in range(3)]
    cluster = {"workers": 3, "compute": {"model": "constant", "seconds": 1.0}, "events": leave}
    assert found(trained(tmp_path, job(paradigm, cluster=cluster, stop=stop))) == ALL_BITS


def test_evaluations_that_take_time_are_all_recomputed(tmp_path: Path) -> None:
    """In the recomputation an iteration takes 1 s, in which some of them would be left out."""
    long = {"evaluation": {"every_samples": 24, "seconds": 3.0}}
    compute = {"model": "constant", "seconds": 4.0}
    trace = trained(tmp_path, job({"name": "allreduce"}, cluster={"workers": 3, "compute": compute}, **long))
    evaluations = {check.name: check.n_checked for check in recompute(trace)}[EVALUATIONS]
    assert evaluations == 2 * len(trace.tables["evaluations"]) > 60


def test_weights_that_are_not_finite(tmp_path: Path) -> None:
    this = job({"name": "asp"}, optimizer={"name": "sgd", "lr": 1e200})
    assert simulate(this, tmp_path / "run", Console(quiet=True)) == 0
    trace = load(tmp_path / "run")
    assert found(trace)[WEIGHTS] == "bit by bit"
    weights = load_file(tmp_path / "run" / "weights.safetensors")
    assert any(each.isnan().any() for each in weights.values())
    for each in weights.values():
        each.nan_to_num_(0.0)
    save_file(weights, tmp_path / "run" / "weights.safetensors")
    assert found(trace)[WEIGHTS].startswith("FAILED: ")


# ---- controls ----


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return trained(tmp_path_factory.mktemp("asp"), job({"name": "asp"}))


def test_another_loss_is_found(trace: Trace) -> None:
    loss = trace.tables["pushes"]["loss"][20]
    changed = found(edit(trace, "pushes", 20, loss=1.01 * loss))
    row = trace.tables["pushes"][20]
    assert changed[LOSSES].startswith(
        f"FAILED: loss of worker {row['worker']}, iteration {row['iteration']} is {1.01 * loss}, recomputed {loss} "
    )
    assert changed[EVALUATIONS] == changed[WEIGHTS] == "bit by bit"
    assert found(edit(trace, "pushes", 20, loss=loss * (1 + 1e-9)))[LOSSES] == "1 of 102 differ by rounding"


def test_another_evaluation_is_found(trace: Trace) -> None:
    loss = trace.tables["evaluations"]["loss"][3]
    assert found(edit(trace, "evaluations", 3, loss=0.5 * loss))[EVALUATIONS].startswith("FAILED: loss of version ")


def test_other_weights_are_found(trace: Trace, tmp_path: Path) -> None:
    weights = load_file(trace.path.parent / "weights.safetensors")
    folder = tmp_path / "other"
    folder.mkdir()
    moved = dataclasses.replace(trace, path=folder / "trace.h5")
    name = next(iter(weights))
    for factor, expected in ((1.01, f"FAILED: {name}: differs by up to "), (1 + 1e-6, "1 of 11 differ by rounding")):
        weights[name].view(-1)[0] *= factor
        save_file(weights, folder / "weights.safetensors")
        assert found(moved)[WEIGHTS].startswith(expected)
        weights[name].view(-1)[0] /= factor
    del weights[name]
    save_file(weights, folder / "weights.safetensors")
    assert found(moved)[WEIGHTS] == f"FAILED: weights.safetensors: {name}: missing"
    file = folder / "weights.safetensors"
    file.write_bytes(file.read_bytes()[:20])
    assert found(moved)[WEIGHTS].startswith("FAILED: weights.safetensors: ")


def test_another_order_of_updates_is_found(trace: Trace) -> None:
    """Two pushes of different workers in each other's place: the audit's counts agree, the arithmetic does not."""
    rows = trace.tables["pushes"].copy()
    applied = next(i for i in range(10, 40) if rows["worker"][i] != rows["worker"][i + 1])
    for column in ("worker", "iteration", "loss"):
        rows[column][[applied, applied + 1]] = rows[column][[applied + 1, applied]]
    assert found(with_rows(trace, "pushes", rows))[LOSSES].startswith("FAILED")


def test_a_server_that_computes_otherwise_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every decision is right, and so every other check passes."""
    apply = Store.apply

    def half(self: Store, workers: Any, lr: float, *others: Any) -> float:
        return apply(self, workers, 0.5 * lr, *others)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "apply", half)
        wrong = trained(tmp_path, job({"name": "asp"}))
    assert all(text.startswith("FAILED") for text in found(wrong).values())


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ({"paradigm": {"name": "gossip", "mode": "pull"}}, "it depends on when models arrived"),
        ({"workload": {"name": "timing", "batch_size": 8}}, "its workload has no arithmetic"),
        ({"paradigm": {"name": "allreduce"}, "batches": {"policy": "equal-finish"}}, "batches are allocated"),
    ],
    ids=str,
)
def test_what_does_not_follow_is_refused(tmp_path: Path, tables: dict[str, Any], says: str) -> None:
    this = job(**{"paradigm": {"name": "bsp"}, **tables})
    with pytest.raises(NotRecomputed, match=says):
        recompute(trained(tmp_path, this))


@pytest.mark.parametrize("options", [{"mode": "permutation"}, {"mode": "pull", "synchronous": True}], ids=str)
def test_beta_shows_in_what_is_recomputed_alone(tmp_path: Path, options: dict[str, Any]) -> None:
    """No column holds it, so the rows of a trace are right under any beta."""
    gossip = {"name": "gossip", **options}
    trace = trained(tmp_path, job({**gossip, "beta": 0.3}))
    other = dataclasses.replace(trace, attributes={**trace.attributes, **attributes(job({**gossip, "beta": 0.9}))})
    assert [check.name for check in audit(other) if not check.passed] == []
    assert all(not check.passed for check in recompute(other))
    assert [check.passed for check in simulated_again(other)] == [False, False]


def test_a_simulated_pull_shows_its_beta(tmp_path: Path) -> None:
    pull = {"name": "gossip", "mode": "pull"}
    trace = trained(tmp_path, job({**pull, "beta": 0.3}))
    assert all(check.passed for check in simulated_again(trace))
    other = dataclasses.replace(trace, attributes={**trace.attributes, **attributes(job({**pull, "beta": 0.9}))})
    assert not any(check.passed for check in simulated_again(other))


def test_a_run_without_an_iteration_is_refused(tmp_path: Path) -> None:
    whole = trained(tmp_path, job({"name": "allreduce"}))
    empty = dataclasses.replace(whole, tables={**whole.tables, "exchanges": whole.tables["exchanges"][:0]})
    with pytest.raises(NotRecomputed, match="it has no iteration"):
        recompute(empty)


def test_the_command(trace: Trace, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["audit", str(trace.path.parent), "--recompute"])
    assert result.exit_code == 0
    assert all(name in result.stdout for name in (ROWS, WEIGHTS))
    assert "all 40 checks passed" in result.stdout
    gossip = trained(tmp_path, job({"name": "gossip", "mode": "pull"}))
    assert CliRunner().invoke(app, ["audit", str(gossip.path), "--recompute"]).exit_code == 0, "simulated again"
    with h5py.File(gossip.path, "r+") as file:
        file.attrs["engine"] = "mpi"
    result = CliRunner().invoke(app, ["audit", str(gossip.path), "--recompute"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"hpcsync: {gossip.path}: cannot be recomputed: under gossip")
    assert torch.get_num_threads() == 1


def test_a_job_without_arithmetic_is_simulated_again(tmp_path: Path) -> None:
    this = job({"name": "asp"}, workload={"name": "timing"}, evaluation={})
    again = trained(tmp_path, this)
    assert [(check.passed, check.detail) for check in simulated_again(again)] == [(True, "bit by bit")]
    computed_s = again.tables["pushes"]["compute_s"][4]
    rounded = edit(again, "pushes", 4, compute_s=computed_s * (1 + 1e-9))
    assert simulated_again(rounded)[0].detail == "1 values differ by rounding"
    other = edit(again, "pushes", 4, compute_s=computed_s * 1.001)
    fewer = with_rows(again, "grants", again.tables["grants"][:-1])
    assert [simulated_again(each)[0].passed for each in (rounded, other, fewer)] == [True, False, False]
