"""Comparison with hosts: its jobs, and the figures that it takes from two traces."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

import beside_hosts
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
