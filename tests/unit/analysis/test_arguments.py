"""Wrong arguments of the scripts are refused in one line that names them, before anything runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import arguments
import beside_hosts
import beside_real
import beside_recording
import extrapolation
import failures
import reproduce
from hpcsync.system.namespaces import Unavailable

SCRIPTS = {module.__name__: module.main for module in (beside_real, beside_recording, extrapolation, failures)}


def nothing_runs(*_: object, **__: object) -> None:
    raise AssertionError("something ran")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("hpcsync", "beside", "beside_hosts.compare_on_hosts"):
        monkeypatch.setattr(f"beside_real.{name}", nothing_runs)
    monkeypatch.setattr("beside_recording.one_round", nothing_runs)
    monkeypatch.setattr("extrapolation.predictions", nothing_runs)
    monkeypatch.setattr("failures.durations", nothing_runs)
    for name in ("advice_regret", "dssp_map", "dssp_map_real", "first_k_real", "stanza_real", "law_of_delay"):
        monkeypatch.setattr(f"reproduce.{name}.reproduce", nothing_runs)
    return tmp_path


def refusal(line: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    script, *rest = line
    monkeypatch.setattr(sys, "argv", [script, *rest])
    with pytest.raises(SystemExit) as ended:
        reproduce.app() if script == "reproduce" else arguments.run(SCRIPTS[script])
    assert ended.value.code == 2
    *_, last = capsys.readouterr().err.splitlines()
    return last.removeprefix("Error: Invalid value for ").replace("'", "")


@pytest.mark.parametrize(
    ("line", "begin", "end"),
    [
        ("beside_real --seeds 0", "--seeds: Input should be greater than or equal to 1", ""),
        ("beside_real --hosts --only nope", "--only: nope: must be one of bsp; asp; ssp;", "; ad-psgd"),
        ("beside_real --hosts --rate nope", "--rate: nope: must be one of 1gbit; 200mbit", ""),
        ("beside_real --only bsp", "--only: must come with --hosts", ""),
        ("beside_real --rate 1gbit", "--rate: must come with --hosts", ""),
        ("beside_recording --rounds 0", "--rounds: Input should be greater than or equal to 1", ""),
        ("reproduce advise --only nope", "--only: nope: must be or match one of digits-equal-0;", "; text-1113-0.9"),
        ("reproduce advise --only digits-* --only nope-*", "--only: nope-*: must be or match one of", ""),
        ("reproduce dssp --map --real", "--map: must come without --real", ""),
        ("reproduce k-sync --real --long --load", "--real: must come without --long and --load", ""),
        ("reproduce ashl --searches --readings", "--searches: must come without --readings", ""),
        ("reproduce stanza --real --learning", "--real: must come without --learning", ""),
    ],
)
def test_a_wrong_argument(
    line: str, begin: str, end: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(line.split(), monkeypatch, capsys)
    assert said.startswith(begin) and said.endswith(end)


@pytest.mark.parametrize(
    ("line", "taken"),
    [
        ("beside_real", "out"),
        ("beside_recording", "out"),
        ("extrapolation --measured 2", "out/extrapolation-2.csv"),
        ("failures", "out/failures.csv"),
    ],
)
def test_what_exists_is_not_overwritten(
    line: str, taken: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / taken).mkdir(parents=True)
    said = refusal([*line.split(), "-o", "out"], monkeypatch, capsys)
    assert said == f"-o: {taken}: exists; must be another folder"
    with pytest.raises(AssertionError, match="something ran"):  # the control: a new folder
        refusal([*line.split(), "-o", "new"], monkeypatch, capsys)


@pytest.mark.parametrize("line", ["beside_real", "beside_real --hosts", *list(SCRIPTS)[1:], "reproduce law"])
@pytest.mark.parametrize(("out", "why"), [("file", "Not a directory"), ("x" * 300, "File name too long")])
def test_what_cannot_be_written_is_told_before(
    line: str, out: str, why: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "file").touch()
    said = refusal([*line.split(), "-o", f"{out}/new"], monkeypatch, capsys)
    assert said.startswith(f"-o: {out}/new") and said.endswith(f": {why}")


def test_hosts_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def without_root(*_: object) -> None:
        raise Unavailable("hosts cannot be made here: it needs root")

    monkeypatch.setattr(beside_hosts, "compare_on_hosts", without_root)
    said = refusal(["beside_real", "--hosts"], monkeypatch, capsys)
    assert said == "--hosts: hosts cannot be made here: it needs root"
