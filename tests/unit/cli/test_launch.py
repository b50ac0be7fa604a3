"""`hpcsync launch`: any program on ranks. What a launch does otherwise is in system/test_launcher.py."""

import sys

import pytest

from hpcsync.cli.app import main
from hpcsync.system import launcher
from hpcsync.system.launcher import Ended


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


def status(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    monkeypatch.setattr(sys, "argv", ["hpcsync", "launch", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    return caught.value.code


def test_a_program_keeps_its_own_options(
    launches: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = ["python", "train.py", "-n", "7", "--lr", "3"]
    assert status(monkeypatch, "-n", "4", "--", *program) == 4
    assert status(monkeypatch, "-n", "4", "--timeout", "0.5", *program) == 124
    assert launches == [(4, program, None), (4, program, 0.5)]
    assert capsys.readouterr().err == "hpcsync: ended the ranks, which still ran after 0.5 s\n"


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
