"""The user's mistakes: status 2 and one line, before any rank starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from hpcsync.cli import app
from hpcsync.system import launcher

JOB = Path(__file__).parents[3] / "jobs" / "digits-dssp.toml"
SIMULATED = """
name = "both"
seed = 1
workload = {name = "linear", batch_size = 4, samples = 96, features = 7}
optimizer = {name = "sgd", lr = 0.05, momentum = 0.9}
stop.updates = 120
paradigm = {name = "bsp"}
cluster = {servers = 1, workers = 2, compute = {model = "lognormal", seconds = [0.004, 0.008]}}
"""


@pytest.fixture(autouse=True)
def no_rank_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def launch(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(launcher, "launch", launch)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)


def hpcsync(*arguments: object) -> Result:
    return CliRunner().invoke(app.app, [*map(str, arguments)])


def is_refused(result: Result, line: str) -> None:
    """Return nothing: status 2, nothing on standard output, and one line that begins so."""
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith(f"hpcsync: {line}")


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "paradigm.staleness_max=1",
            "paradigm.staleness_max = 1: must be at least paradigm.staleness_min = 3",
        ),
        ("stop.samples=0", "stop.samples = 0: must be "),
    ],
)
def test_a_bad_job_is_told_in_one_line_and_nothing_starts(tmp_path: Path, override: str, line: str) -> None:
    is_refused(hpcsync("run", JOB, "--set", override, "--out", tmp_path / "out"), line)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["run", "simulate"])
@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("visdom", "--log visdom: must be one of tensorboard, wandb, mlflow\n"),
        ("wandb", "--log wandb: needs wandb, which is not installed: pip install 'hpcsync[wandb]'\n"),
    ],
)
def test_a_log_that_is_not_there_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, log: str, line: str
) -> None:
    monkeypatch.setattr("hpcsync.export.loggers.find_spec", lambda _: None)
    is_refused(hpcsync(command, JOB, "--log", log, "--out", tmp_path / "out"), line)


def test_a_good_job_starts_ranks(tmp_path: Path) -> None:
    """Negative control."""
    result = hpcsync("run", JOB, "--out", tmp_path / "out")
    assert isinstance(result.exception, AssertionError) and str(result.exception) == "ranks were started"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("device=cuda", 'cluster.device = "cuda": must be "auto" or "cpu" here'),
        ("window=ipc", 'cluster.window = "ipc": must be "auto" or "host" here'),
    ],
)
def test_a_gpu_that_is_not_there_is_told_in_one_line(tmp_path: Path, override: str, line: str) -> None:
    result = hpcsync("run", JOB, "--set", f"cluster.{override}", "--out", tmp_path / "out")
    why = "torch sees no GPU" if torch.version.cuda else "torch is built without CUDA"
    is_refused(result, f"{line}: {why}\n")
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_no_trace_gives_no_times(tmp_path: Path) -> None:
    (tmp_path / "both.toml").write_text(SIMULATED)
    result = hpcsync("simulate", "both.toml", "--times-from", "both.toml")
    is_refused(result, "")
    assert "both.toml: not a trace" in result.stderr
    assert not (tmp_path / "runs").exists()


def test_a_real_run_takes_its_own_times(tmp_path: Path) -> None:
    (tmp_path / "both.toml").write_text(SIMULATED)
    result = hpcsync("run", "both.toml", "--set", "cluster.times_from=both.toml")
    is_refused(result, "cluster.times_from")


@pytest.mark.parametrize("options", [(), ("--recompute",)])
def test_an_audit_of_no_trace_is_told_in_one_line(options: tuple[str, ...]) -> None:
    result = hpcsync("audit", "absent", *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "hpcsync: absent: no such file\n"


@pytest.mark.parametrize(
    "command", ["audit", "show", "watch", "explain", "report", "compare", "figure waiting", "export -o a.csv"]
)
def test_a_run_that_the_system_refuses_to_look_for_is_told_in_one_line(command: str) -> None:
    """As in a folder of another user; a name that is too long is refused to root too."""
    result = hpcsync(*command.split(), "x" * 300)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"hpcsync: {'watch: ' * (command == 'watch')}{'x' * 300}: File name too long\n"


def test_a_folder_that_the_system_refuses_to_look_for_is_not_resumed() -> None:
    is_refused(hpcsync("run", JOB, "--out", "x" * 300, "--resume"), f"out {'x' * 300}: File name too long\n")


def test_times_that_the_system_refuses_to_look_for_are_told_in_one_line() -> None:
    result = hpcsync("simulate", JOB, "--times-from", "x" * 300)
    is_refused(result, "cluster.times_from = ")
    assert result.stderr.endswith(": must be a trace, or a run's folder; File name too long\n")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_trace_that_must_not_be_read_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "trace.h5").touch(mode=0)
    is_refused(hpcsync("audit", tmp_path), f"{tmp_path}/trace.h5: Permission denied\n")


def test_a_current_folder_that_was_removed_is_told_in_one_line(tmp_path: Path) -> None:
    script = f'cd {tmp_path} && rmdir {tmp_path} && exec "$@"'
    argv = ["sh", "-c", script, "sh", sys.executable, "-m", "hpcsync", "show", str(JOB)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("hpcsync: the current folder: No such file or directory; change to one that exists\n")


@pytest.mark.parametrize("command", ["figure waiting", "report", "export --format parquet"])
def test_an_empty_out_is_refused(command: str, tmp_path: Path) -> None:
    is_refused(hpcsync(*command.split(), tmp_path, "--out", ""), '--out "": must not be empty\n')


@pytest.mark.parametrize("command", ["run", "simulate", "compare --vary optimizer.lr=[0.1] --simulate", "advise"])
def test_an_out_without_a_name_is_refused_as_is_the_folder_of_a_run_for_several(command: str, tmp_path: Path) -> None:
    name, *options = command.split()
    is_refused(hpcsync(name, JOB, *options, "--out", ""), '--out "": must not be empty\n')
    (tmp_path / "trace.h5").touch()
    result = hpcsync(name, JOB, *options, "--out", ".")
    assert (result.exit_code, result.stdout.removesuffix("\n")) == (2, "")
    assert result.stderr.endswith("out .: must not hold a trace.h5 already: runs are never overwritten\n")
