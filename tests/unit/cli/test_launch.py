"""`hpcsync launch`: any program on ranks. What a launch does otherwise is in system/test_launcher.py."""

import sys
from pathlib import Path

import pytest

from hpcsync.cli.app import main
from hpcsync.run_dir import layout
from hpcsync.run_dir.checkpoint import RUN, Checkpoints
from hpcsync.system import launcher
from hpcsync.system.launcher import Ended
from hpcsync.trace import reader
from hpcsync.trace.provenance import provenance
from hpcsync.trace.writer import TraceWriter
from tests.unit.jobs import make_job
from tests.unit.run_states import run_state


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """In place of the ranks: what would be launched."""
    found: list[tuple[object, ...]] = []

    def launch(n: int, argv: list[str], *, timeout_s: float | None = None) -> Ended:
        found.append((n, list(argv), timeout_s))
        return Ended(124, timed_out=True) if timeout_s else Ended(4)

    monkeypatch.setattr(launcher, "launch", launch)
    monkeypatch.setattr(launcher, "under_launcher", lambda environ=None: False)
    monkeypatch.setattr(launcher, "on_this_node", lambda environ: True)
    return found


@pytest.mark.parametrize("seconds", ["0", "-5", "nan"])
def test_a_time_limit_is_greater_than_0(
    seconds: str,
    launches: list[tuple[object, ...]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert status(monkeypatch, "-n", "2", f"--timeout={seconds}", "--", "true") == 2
    message = f"hpcsync: --timeout {seconds}: must be a number of seconds greater than 0\n"
    assert (capsys.readouterr().err, launches) == (message, [])


def status(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    monkeypatch.setattr(sys, "argv", ["hpcsync", "launch", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    return caught.value.code


@pytest.mark.parametrize(
    ("program", "hint"),
    [
        ("train.py", "; start a script with hpcsync launch -n 2 -- python train.py"),
        ("no-such-program", ""),
        ("/tmp", ""),
    ],
)
def test_what_cannot_be_started_is_refused_before_the_ranks(
    program: str,
    hint: str,
    launches: list[tuple[object, ...]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert status(monkeypatch, "-n", "2", program) == 2
    message = f"hpcsync: {program}: must be a program that can be started{hint}\n"
    assert (capsys.readouterr().err, launches) == (message, [])


def test_a_program_in_the_working_directory_is_started(
    launches: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch(0o755)
    status(monkeypatch, "-n", "2", "train.py")
    assert len(launches) == 1


def test_a_program_keeps_its_own_options(
    launches: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = ["python", "train.py", "-n", "7", "--lr", "3"]
    assert status(monkeypatch, "-n", "4", "--", *program) == 4
    assert status(monkeypatch, "-n", "4", "--timeout", "0.5", *program) == 124
    assert launches == [(4, program, None), (4, program, 0.5)]
    assert capsys.readouterr().err == "hpcsync: the ranks still ran after 0.5 s (--timeout) and were ended\n"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["-n", "0"], "hpcsync: -n 0: must be at least 1\n"),
        (["-n", "99999"], "hpcsync: -n 99999: must be at most "),
    ],
)
def test_an_invalid_number_of_ranks_is_refused(
    options: list[str],
    line: str,
    launches: list[tuple[object, ...]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert status(monkeypatch, *options, "--", "true") == 2
    captured = capsys.readouterr()
    assert (captured.err.startswith(line), captured.err.count("\n"), captured.out, launches) == (True, 1, "", [])


def test_more_ranks_start_when_they_are_asked_for(
    launches: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert status(monkeypatch, "-n", "99999", "--oversubscribe", "--", "true") == 4
    assert launches == [(99999, ["true"], None)]


def unfinished(folder: Path) -> None:
    """Write what killed ranks leave: a trace that is still open, and a checkpoint."""
    folder.mkdir()
    TraceWriter(folder / layout.TRACE, provenance(make_job(), engine="mpi", mpi_library="", hosts=["h"])).flush()
    store = Checkpoints(folder, 2, None, shared=True)
    store.begin(3)
    store.write(3, RUN, run_state(make_job()))
    store.commit(3)


@pytest.mark.parametrize(
    ("ended", "left"),
    [
        (Ended(1, 2), "interrupted"),  # Ctrl-C
        (Ended(124, timed_out=True), "interrupted"),
        (Ended(137), "failed"),  # a rank was killed
        (Ended(75, 2), "running"),  # rank 0 has printed it itself
        (Ended(75, 1), "running"),  # the terminal was closed
        (Ended(0), "running"),
    ],
)
def test_what_is_left_of_a_run_is_printed_with_how_to_resume_it(
    ended: Ended, left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    unfinished(tmp_path / "o")
    (tmp_path / "done").mkdir()
    (tmp_path / "done" / layout.SUMMARY).touch()  # an earlier run of the script, which has finished
    runs = (tmp_path / "done", tmp_path / "o")
    monkeypatch.setattr(launcher, "launch", lambda *given, **how: ended._replace(runs=runs))
    expected = 1 if ended.status == 75 else ended.status
    assert status(monkeypatch, "-n", "3", "--oversubscribe", "--timeout", "9", "--", "true") == expected
    printed = (
        f"hpcsync: {left}; the trace so far is o/trace.h5\n"
        'hpcsync: use connect(..., out="o", resume=True) to resume from o/checkpoints/3\n'
    )
    found = "".join(line for line in capsys.readouterr().err.splitlines(True) if "still ran" not in line)
    assert found == ("" if left == "running" else printed)
    assert reader.load("o/trace.h5").status == left


def test_an_interrupted_program_without_a_run_is_said_to_be(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launcher, "launch", lambda *given, **how: Ended(130, 2))
    assert status(monkeypatch, "-n", "3", "--oversubscribe", "--", "true") == 130
    assert capsys.readouterr().err == "hpcsync: interrupted\n"
