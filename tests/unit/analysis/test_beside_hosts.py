"""Comparison with hosts: its jobs, and the figures that it takes from two traces."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import typer
from rich.console import Console

import beside_hosts
import beside_real
from hpcsync.config.job import Job
from hpcsync.run_dir import layout
from hpcsync.simulator.simulate import simulate

MEASURED = {"network": {"bandwidth_gbit": 0.9, "latency_us": 20.0}, "update_gbytes_per_s": 2.0}


@pytest.mark.parametrize("rate", beside_hosts.RATES)
@pytest.mark.parametrize("name", beside_hosts.METHODS)
def test_jobs_fill_the_hosts(name: str, rate: str) -> None:
    real, simulated = beside_hosts.job(name, rate, 1), beside_hosts.job(name, rate, 1, MEASURED)
    assert real.cluster.ranks % beside_hosts.HOSTS == 0
    assert real.cluster.network is None and simulated.cluster.network is not None
    assert simulated.cluster.compute == real.cluster.compute


def simulated(folder: Path, engine: str, job: Job) -> None:
    assert simulate(job, folder / engine, Console(quiet=True)) == 0
    assert (folder / engine / layout.TRACE).exists()


@pytest.mark.parametrize("name", ["bsp", "asp", "local-sgd", "gossip pull"])
def test_a_simulation_beside_itself_and_beside_a_slower_one(tmp_path: Path, name: str) -> None:
    """The control is a link at half of the rate, which the figures show."""
    job = beside_hosts.job(name, "1gbit", 1, MEASURED)
    half = beside_hosts.job(name, "1gbit", 1, {**MEASURED, "network": {"bandwidth_gbit": 0.45, "latency_us": 20.0}})
    simulated(tmp_path, "real", job)
    simulated(tmp_path, "simulated", job)
    same = beside_hosts.beside(tmp_path)
    assert same["ratio"] == 1.0 and same["wait_points"] == 0.0 and same["slowed"] == 1.0
    (tmp_path / "slower").mkdir()
    simulated(tmp_path / "slower", "real", job)
    simulated(tmp_path / "slower", "simulated", half)
    slower = beside_hosts.beside(tmp_path / "slower")
    assert 0.5 < slower["ratio"] < 0.9


def test_a_run_of_another_job_is_not_taken_for_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The link is measured anew in every call: its simulations are made again, and those with the same are not."""
    calls = []

    def simulated_at_once(line: list[str], **_: object) -> None:
        calls.append(line)
        (tmp_path / "run" / layout.SUMMARY).write_text("{}")

    monkeypatch.setattr(beside_hosts.subprocess, "run", simulated_at_once)
    asked = beside_hosts.job("bsp", "1gbit", 1, MEASURED)
    other = beside_hosts.job("bsp", "1gbit", 1, {**MEASURED, "update_gbytes_per_s": 1.0})
    for job, expected in ((asked, 1), (asked, 1), (other, 2), (asked, 3)):
        beside_hosts.hpcsync("simulate", job, tmp_path / "run")
        assert len(calls) == expected


def test_ranks_find_the_job_of_a_folder_that_is_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in the repository, whatever the folder is in which the script was started."""
    lines = []

    class Machine:
        def mpiexec(self, hosts: object, per_host: int) -> list[str]:
            return ["mpiexec"]

    monkeypatch.setattr(beside_hosts, "succeed", lambda hosts, line, environ: lines.append(line))
    monkeypatch.chdir(tmp_path)
    beside_hosts.hpcsync("run", beside_hosts.job("bsp", "1gbit", 1), Path("out/real"), Machine())  # type: ignore[arg-type]
    assert [lines[0][4], lines[0][6]] == [str(tmp_path / "out/real/asked.toml"), str(tmp_path / "out/real")]


@pytest.mark.parametrize(
    ("ratio", "points", "missed"),
    [(1.04, 2.9, 0), (0.94, 0.0, 1), (1.0, -3.1, 1), (np.nan, 0.0, 1), (1.0, np.nan, 1)],
)
def test_a_figure_beyond_an_aim_or_a_missing_one_misses_it(ratio: float, points: float, missed: int) -> None:
    frame = pd.DataFrame({"ratio": [1.0, ratio], "wait_points": [0.0, points]})
    assert len(beside_hosts.misses(frame)) == missed


@pytest.mark.parametrize(("ratio", "status"), [(1.04, 0), (1.06, 1), (np.nan, 1)])
def test_a_time_that_is_off_or_missing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ratio: float, status: int
) -> None:
    def beside(paradigm: str, seed: int, source: str, out: Path) -> dict[str, object]:
        own = ratio if paradigm == "ssp" else 1.0
        return {"paradigm": paradigm, "times_from": source, "ratio": own}

    monkeypatch.setattr(beside_real, "hpcsync", lambda *_: None)
    monkeypatch.setattr(beside_real, "beside", beside)
    monkeypatch.setattr(beside_real, "table", lambda *_: "")
    with pytest.raises(typer.Exit) as ended:
        beside_real.main(1, tmp_path / "new", False, None, None)
    assert ended.value.exit_code == status
