"""Command line: functions and arguments of the commands, and how errors end."""

import errno
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import Result
from typer.testing import CliRunner

import hpcsync.cli
from hpcsync import __version__
from hpcsync.cli import app, figure
from hpcsync.cli import run as commands
from hpcsync.config.errors import JobError
from hpcsync.system.atomic_files import NotWritten
from hpcsync.system.launcher import LaunchError


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Calls of the functions behind the commands."""
    calls: list[tuple] = []

    def stand_in(name: str, status: int) -> object:
        def function(*arguments: object, **options: object) -> int:
            calls.append((name, *arguments, *options.values()))
            return status

        return function

    rank = SimpleNamespace(main=stand_in("rank", 4))
    monkeypatch.setitem(sys.modules, "hpcsync.cli.rank_main", rank)  # the real one would initialise MPI
    monkeypatch.setattr(hpcsync.cli, "rank_main", rank, raising=False)  # another test may have loaded it
    monkeypatch.setattr(commands, "run", stand_in("run", 3))
    monkeypatch.setattr(commands, "show", stand_in("show", 0))
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    return calls


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app.app, arguments)


def test_a_plain_run_starts_ranks(calls: list[tuple]) -> None:
    assert run("run", "job.toml").exit_code == 3
    assert (
        run("run", "job.toml", "-n", "5", "--set", "a=1", "--set", "b.c=x y", "--out", "o", "--resume").exit_code == 3
    )
    assert run("run", "job.toml", "--oversubscribe", "--log", "wandb").exit_code == 3
    assert calls == [
        ("run", Path("job.toml"), [], None, None, False, False, None),
        ("run", Path("job.toml"), ["a=1", "b.c=x y"], 5, Path("o"), True, False, None),
        ("run", Path("job.toml"), [], None, None, False, True, "wandb"),
    ]


def test_a_run_under_a_launcher_is_a_rank(calls: list[tuple], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_SIZE", "3")
    assert run("run", "job.toml", "--set", "a=1", "-n", "3", "--out", "o", "--log", "mlflow").exit_code == 4
    assert calls == [("rank", Path("job.toml"), ["a=1"], 3, Path("o"), False, "", "mlflow")]


def test_show(calls: list[tuple]) -> None:
    assert run("show", "job.toml", "--set", "a=1").exit_code == 0
    assert run("show", "job.toml", "--load").exit_code == 0
    assert calls == [("show", Path("job.toml"), ["a=1"], False), ("show", Path("job.toml"), [], True)]


@pytest.mark.parametrize("mistake", [JobError("seed = -1: must be at least 0"), LaunchError("mpiexec: not found")])
def test_user_errors_are_one_line_and_status_2(mistake: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **options: object) -> None:
        raise mistake

    monkeypatch.setattr(commands, "show", fail)
    result = run("show", "job.toml")
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"hpcsync: {mistake}\n")
    monkeypatch.setenv("PMI_SIZE", "3")
    monkeypatch.setenv("PMI_RANK", "1")
    assert (run("show", "job.toml").exit_code, run("show", "job.toml").stderr) == (2, "")  # rank 0 prints it


def test_a_full_disk_is_one_line_and_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **options: object) -> None:
        raise NotWritten(errno.ENOSPC, "No space left on device", "out/x.log")

    monkeypatch.setattr(commands, "show", fail)
    result = run("show", "job.toml")
    assert (result.exit_code, result.stderr) == (1, "hpcsync: failed: out/x.log: No space left on device\n")


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("run", "--workers", "4"), "--set cluster.workers=4, or -n RANKS (servers and workers)"),
        (("simulate", "--workers=4"), "--set cluster.workers=4"),
        (("show", "--seed", "2"), "--set seed=2"),
        (("slurm", "--workers", "4"), "--set cluster.workers=4"),
        (("run", "--lr"), "--set optimizer.lr=VALUE"),
    ],
)
def test_an_unknown_option_that_is_a_key_of_the_job_is_pointed_at_it(arguments: tuple[str, ...], hint: str) -> None:
    command, *rest = arguments
    result = run(command, "job.toml", *rest)
    option = rest[0].partition("=")[0]
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].endswith(f"No such option: {option}. Use {hint}")
    assert "Use" not in run(command, "job.toml", "--wrkers").stderr


def test_other_errors_are_not_the_user_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "show", lambda *_, **options: 1 / 0)
    result = run("show", "job.toml")
    assert (result.exit_code, type(result.exception)) == (1, ZeroDivisionError)


def test_a_mistake_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")  # which the shell has kept of another launch
    result = run("show", str(tmp_path / "no.toml"))
    assert (result.exit_code, result.stderr) == (2, f"hpcsync: {tmp_path}/no.toml: No such file or directory\n")


def test_usage() -> None:
    assert run("--version").stdout == f"hpcsync {__version__}\n"
    assert run("run").exit_code == 2
    commands = run("--help").stdout.split("Commands:")[1]
    names = [line.split()[0] for line in commands.splitlines() if line.startswith("  ") and line[2] != " "]
    expected = [
        "run",
        "launch",
        "watch",
        "simulate",
        "show",
        "audit",
        "compare",
        "advise",
        "report",
        "explain",
        "export",
        "figure",
        "cite",
        "doctor",
        "bench",
        "slurm",
        "plan",
    ]
    assert names == expected


def test_an_interrupt_while_the_commands_are_set_up_is_one_line(monkeypatch, capsys):
    def interrupted(**options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "app", interrupted)
    with pytest.raises(SystemExit) as ended:
        app.main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == "hpcsync: interrupted\n"


@pytest.mark.parametrize("module", ["audit", "figure", "report"])
def test_an_interrupt_while_a_command_is_loaded_or_runs_is_one_line(module, monkeypatch, capsys):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    if module == "figure":  # loaded already
        monkeypatch.setattr(figure, "main", interrupted)
    else:
        monkeypatch.delitem(sys.modules, f"hpcsync.cli.{module}", raising=False)
        monkeypatch.delattr(hpcsync.cli, module, raising=False)
        monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(find_spec=interrupted), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        app.app([module, "waiting"], prog_name="hpcsync")
    assert (ended.value.code, capsys.readouterr().err) == (1, "hpcsync: interrupted\n")


def test_help_of_80_columns_shows_whole_summaries_and_dots_only_where_arguments_repeat(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for arguments in ((), ("plan",)):
        assert "..." not in run(*arguments, "--help").stdout.split("Commands:")[1]
    assert max(map(len, run("figure", "--help").stdout.splitlines())) <= 80
    for command in ("launch", "compare", "report", "export", "figure", "bench"):
        assert run(command, "--help").stdout.count("...") == 1 + (command == "compare") * 2  # KEY=[VALUE, ...]
