"""Stanza on real hosts: it continues where it was interrupted. Hosts are replaced by simulations of their runs."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from hpcsync.config.job import Job
from hpcsync.simulator.simulate import simulate
from reproductions import stanza_real
from reproductions.simulating import finished

QUIET = Console(quiet=True)
LINK = {"latency_us": 120.0, "bandwidth_gbit": 0.2, "both_ways_gbit": 0.2}
SMALL = {"name": "images", "batch_size": 4, "samples": 64, "size": 8, "width": 1, "hidden": 4}
BETWEEN, WITHIN = "between a run and its cables", "within a run"


class Machine:
    """What all hosts have done: the runs that were begun, and bytes at their cables; `cut` is where they stop."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.sent = 0
        self.cut: tuple[str, int] | None = None  # where, and in which run

    def hosts(self, n: int, rate: str) -> "Machine":
        return self

    def __enter__(self) -> "Machine":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def mpiexec(self, hosts: object, per_host: int = 1) -> list[str]:
        return ["mpiexec"]

    def run(self, line: list[str], *_: object) -> SimpleNamespace:
        if line[0] == "cat":
            if self.cut == (BETWEEN, len(self.begun)):
                raise KeyboardInterrupt
            return SimpleNamespace(returncode=0, stdout=f"  to-n1: {self.sent} 0\n")
        *_, last = line
        if "mpi4py" in line:
            Path(last).write_text(json.dumps(LINK))
        else:
            self._train(Path(last), Path(line[line.index("run") + 1]))
        return SimpleNamespace(returncode=0, stdout="")

    def _train(self, folder: Path, asked: Path) -> None:
        self.begun.append(folder.parts[-2])
        if self.cut == (WITHIN, len(self.begun)):
            (folder / "trace.h5").write_bytes(b"the beginning of a trace")
            (folder / "checkpoints" / "1").mkdir(parents=True)
            raise KeyboardInterrupt
        assert simulate(Job.from_toml(asked.read_text()), folder, QUIET) == 0
        self.sent += 1000


@pytest.fixture
def machine(monkeypatch):
    found = Machine()
    monkeypatch.setattr(stanza_real, "Hosts", found.hosts)
    monkeypatch.setattr(stanza_real, "RATES", {"200mbit": "200 Mbit/s"})
    monkeypatch.setattr(stanza_real, "WORKLOAD", SMALL)
    return found


def names(methods):
    return [stanza_real.path_of("", "", method, 0).split("/")[-2] for method in methods]


ALL = names(stanza_real.METHODS)


def test_every_run_is_made_once(machine, tmp_path):
    stanza_real.reproduce(tmp_path, 1, QUIET)
    assert machine.begun == ALL
    verdicts = stanza_real.reproduce(tmp_path, 1, QUIET)
    assert machine.begun == ALL
    assert (verdicts["unknown"] == 0).all()


@pytest.mark.parametrize("where", [BETWEEN, WITHIN])
def test_what_was_interrupted_is_made_again(machine, tmp_path, where):
    machine.cut = where, 3
    with pytest.raises(KeyboardInterrupt):
        stanza_real.reproduce(tmp_path, 1, QUIET)
    machine.cut = None
    stanza_real.reproduce(tmp_path, 1, QUIET)
    assert machine.begun == [*ALL[:3], *ALL[2:]]
    bytes_of = [json.loads(file.read_text()) for file in tmp_path.glob(f"**/{stanza_real.CABLES}")]
    assert bytes_of == [1000] * len(ALL)


def test_without_a_look_at_the_cables_an_interruption_would_stay(machine, tmp_path, monkeypatch):
    machine.cut = BETWEEN, 3
    with pytest.raises(KeyboardInterrupt):
        stanza_real.reproduce(tmp_path, 1, QUIET)
    machine.cut = None
    monkeypatch.setattr(stanza_real, "counted", finished)
    with pytest.raises(FileNotFoundError):
        stanza_real.reproduce(tmp_path, 1, QUIET)


def test_the_bytes_of_another_run_are_not_kept(machine, tmp_path, monkeypatch):
    """A run of another job replaces one that was finished, and is interrupted before its cables are read."""
    stanza_real.reproduce(tmp_path, 1, QUIET)
    monkeypatch.setattr(stanza_real, "UPDATES", stanza_real.UPDATES + 1)
    machine.cut = BETWEEN, len(ALL) + 1
    with pytest.raises(KeyboardInterrupt):
        stanza_real.reproduce(tmp_path, 1, QUIET)
    assert len([*tmp_path.glob(f"**/{stanza_real.CABLES}")]) == len(ALL) - 1
