"""One simulated run: its outputs and its failures."""

import io
import json
import os
import re
import signal

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from hpcsync.audit.trace_audit import audit
from hpcsync.config.errors import JobError
from hpcsync.config.job import Job
from hpcsync.simulator.simulate import simulate
from hpcsync.trace.reader import load
from hpcsync.workloads import registry
from tests.unit.jobs import LINEAR, make_job
from tests.unit.run_dir.fake_logs import Fake
from tests.unit.simulator.running import WITHOUT_SERVER, timing_job


def job(**tables) -> Job:
    compute = {"model": "constant", "seconds": 1.0}
    return make_job(**{"workload": LINEAR, "cluster": {"workers": 2, "compute": compute}, **tables})


def run(job, out) -> tuple[int, str]:
    text = io.StringIO()
    return simulate(job, out, Console(file=text, width=100, highlight=False)), text.getvalue()


def test_outputs_are_those_of_a_real_run(tmp_path):
    status, text = run(job(), tmp_path / "out")
    assert status == 0
    names = ["job.toml", "summary.json", "trace.h5", "weights.safetensors"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["engine"], summary["status"], summary["updates"]) == ("simulator", "finished", 10)
    assert "paradigm  bsp, 1 server, 2 workers" in text
    assert Job.from_toml((tmp_path / "out" / "job.toml").read_text()) == job()
    trace = load(tmp_path / "out" / "trace.h5")
    assert trace.tables["clocks"]["host"].tolist() == [b"virtual"] * 3
    assert "mpi_library" not in trace.attributes


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_files_have_the_permissions_of_the_umask(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        run(job(), tmp_path / "out")
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "out").iterdir() if path.is_file()]
    assert len(files) == 4
    assert {path.name: path.stat().st_mode & 0o777 for path in files} == dict.fromkeys((p.name for p in files), mode)


def test_a_log_gets_every_evaluation(tmp_path, monkeypatch):
    fake = Fake()
    fake.mlflow(monkeypatch)
    this = job(evaluation={"every_samples": 8})
    assert simulate(this, tmp_path / "out", Console(file=io.StringIO()), "mlflow") == 0
    evaluations = load(tmp_path / "out" / "trace.h5").tables["evaluations"]
    logged = [update for scalars, update, _ in fake.points if "evaluation/loss" in scalars]
    assert logged == evaluations["version"].tolist() != []
    assert fake.ended == ["FINISHED"]


@pytest.mark.parametrize("paradigm", WITHOUT_SERVER, ids=str)
def test_outputs_are_the_same_without_servers(tmp_path, paradigm):
    status, text = run(job(paradigm=paradigm), tmp_path / "out")
    assert status == 0
    names = ["job.toml", "summary.json", "trace.h5", "weights.safetensors"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    assert f"paradigm  {paradigm['name']}" in text and "2 workers" in text
    trace = load(tmp_path / "out" / "trace.h5")
    assert trace.tables["clocks"]["host"].tolist() == [b"virtual"] * 2
    assert trace.attributes["engine"] == "simulator" and trace.finished


@pytest.mark.parametrize("paradigm", [{"name": "bsp"}, {"name": "allreduce"}, {"name": "gossip", "mode": "push"}])
def test_the_weights_are_the_final_ones(tmp_path, paradigm):
    run(job(paradigm=paradigm), tmp_path / "out")
    (weights,) = load_file(tmp_path / "out" / "weights.safetensors").values()
    workload = registry.build(job())
    assert not torch.equal(weights, next(workload.model.parameters()))
    with torch.no_grad():
        next(workload.model.parameters()).copy_(weights)
    evaluations = load(tmp_path / "out" / "trace.h5").tables["evaluations"]
    assert workload.evaluate(workload.model)[0] == evaluations["loss"][-1]


def test_a_run_is_never_overwritten(tmp_path):
    run(job(), tmp_path / "out")
    before = (tmp_path / "out" / "trace.h5").read_bytes()
    with pytest.raises(JobError, match="runs are never overwritten"):
        run(job(), tmp_path / "out")
    assert (tmp_path / "out" / "trace.h5").read_bytes() == before


def test_errors_in_the_job_leave_no_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for mistaken in (make_job(), job(optimizer={"name": "sgd", "lr": 0.1, "nesterovv": True})):
        with pytest.raises(JobError):
            run(mistaken, None)
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_compared_with_its_replay(tmp_path):
    first = timing_job(workers=3, seconds=[1.0, 1.0, 3.0], paradigm={"name": "asp"}, stop={"updates": 60})
    run(first, tmp_path / "asp")
    again = {"cluster": {"times_from": str(tmp_path / "asp" / "trace.h5")}, "stop": {"updates": 60}}
    _, text = run(timing_job(workers=3, paradigm={"name": "asp"}, **again), tmp_path / "same")
    assert "100.00 % of the pairs are in the same order" in text
    assert "1.000" in text
    _, text = run(timing_job(workers=3, paradigm={"name": "bsp"}, **again), tmp_path / "bsp")
    assert "asp" in text and "bsp" in text


def breaking(monkeypatch, loss):
    """The next workload has this loss."""
    build = registry.build

    def broken(job):
        workload = build(job)
        return registry.Workload(workload.model, loss, workload.train, None)

    monkeypatch.setattr("hpcsync.core.job_validation.build", broken)


@pytest.mark.parametrize(
    ("error", "whole", "reason"),
    [(KeyError("lost"), "KeyError: 'lost'", "'lost'"), (AssertionError(), "AssertionError", "AssertionError")],
)
def test_an_exception_of_the_workload_is_a_failure(tmp_path, monkeypatch, capsys, error, whole, reason):
    def loss(model, x, y):
        raise error

    breaking(monkeypatch, loss)
    status, _ = run(job(), tmp_path / "out")
    assert status == 1
    said = capsys.readouterr().err
    assert whole in said
    assert f"hpcsync: failed: {reason}; the trace so far is {tmp_path / 'out' / 'trace.h5'}" in said
    assert load(tmp_path / "out" / "trace.h5").status == "failed"


def test_a_run_that_diverges_is_stopped_with_one_line(tmp_path, capsys):
    diverging = job(optimizer={"name": "sgd", "lr": 1e200}, stop={"updates": 60, "on_nan": "stop"})
    status, _ = run(diverging, tmp_path / "out")
    assert status == 1
    printed = capsys.readouterr().err
    assert re.fullmatch(r"hpcsync: failed: worker \d, .*: the loss is not finite; the trace so far is \S+\n", printed)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_leaves_a_trace(tmp_path, monkeypatch, capsys, number):
    computed = 0

    def loss(model, x, y):
        nonlocal computed
        computed += 1
        if computed == 7:
            signal.raise_signal(number)
        return registry.half_squared_error(model, x, y)

    breaking(monkeypatch, loss)
    before = signal.getsignal(number)
    status, _ = run(job(stop={"updates": 10**6}), tmp_path / "out")
    assert status == 1
    assert capsys.readouterr().err.startswith(f"hpcsync: interrupted: {number.name}; the trace so far is")
    trace = load(tmp_path / "out" / "trace.h5")
    assert trace.status == "interrupted"
    assert len(trace.tables["pushes"]) == 7
    assert [check for check in audit(trace) if not check.passed] == []
    assert signal.getsignal(number) == before


def test_a_second_signal_ends_it_before_the_next_push(tmp_path, monkeypatch, capsys):
    computed = 0

    def loss(model, x, y):
        nonlocal computed
        computed += 1
        assert computed < 6, "a push is a thousand of them"
        if computed in (2, 5):
            signal.raise_signal(signal.SIGINT)
        return registry.half_squared_error(model, x, y)

    breaking(monkeypatch, loss)
    status, _ = run(job(paradigm={"name": "easgd", "period": 1000}), tmp_path / "out")
    assert status == 1 and computed == 5
    assert capsys.readouterr().err.startswith("hpcsync: interrupted: SIGINT; the trace so far is")
    assert load(tmp_path / "out" / "trace.h5").status == "interrupted"


def test_a_second_signal_is_no_error_of_the_workload_that_it_meets(tmp_path, monkeypatch, capsys):
    """Code of the user that it interrupts, and the control: an exception of that code."""
    (tmp_path / "of_user.py").write_text(
        "import signal, torch\n"
        "from hpcsync.workloads.registry import Workload\n"
        "def loss(model, x):\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "    return model(x).sum()\n"
        "def make(lost=False):\n"
        "    data = torch.utils.data.TensorDataset(torch.ones(8, 2))\n"
        "    return Workload(torch.nn.Linear(2, 1), (lambda *_: {}['lost']) if lost else loss, data, None)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for lost, words in ((False, "interrupted: SIGINT"), (True, "failed: workload.name")):
        workload = {"name": "of_user:make", "batch_size": 1, "options": {"lost": lost}}
        tables = {"paradigm": {"name": "easgd", "period": 1000}, "evaluation": {"every_samples": 0}}
        assert run(job(workload=workload, **tables), tmp_path / f"out-{lost}")[0] == 1
        assert capsys.readouterr().err.startswith(f"hpcsync: {words}")


@pytest.mark.parametrize("paradigm", ["bsp", "allreduce", "asp"])
@pytest.mark.parametrize("seconds", [None, 2.5])
def test_an_evaluation_takes_its_time_beside_training(tmp_path, paradigm, seconds):
    """One is due after every update, each a second after the one before; the control takes no time."""
    compute = {"compute": {"model": "constant", "seconds": 1.0}}
    evaluation = {"every_samples": 1} | ({} if seconds is None else {"seconds": seconds})
    tables = {"workload": LINEAR, "paradigm": {"name": paradigm}, "evaluation": evaluation}
    cluster = {"workers": 1 if paradigm == "asp" else 2, **compute}
    job = make_job(cluster=cluster, stop={"updates": 9}, **tables)
    assert simulate(job, tmp_path / "out", Console(quiet=True)) == 0
    evaluations = load(tmp_path / "out" / "trace.h5").tables["evaluations"]
    expected = [*range(1, 9)] if seconds is None else [1, 4, 7]
    assert evaluations["now_s"][:-1] == pytest.approx(expected)
    if seconds and paradigm == "bsp":  # the next one begins with the first push after it, before the update
        expected = [1, 3, 6]
    assert evaluations["version"][:-1].tolist() == expected
    target = make_job(cluster=cluster, stop={"updates": 9, "target_loss": 1e9}, **tables)
    assert simulate(target, tmp_path / "target", Console(quiet=True)) == 0
    n_updates = len(load(tmp_path / "target" / "trace.h5").tables["updates"])
    assert n_updates <= 2 if seconds is None else 3 <= n_updates <= 4
