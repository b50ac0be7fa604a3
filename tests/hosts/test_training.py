"""A run with its server on one host and its workers on two others, which meet over TCP alone."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from hpcsync.audit.trace_audit import audit
from hpcsync.config.job import load as load_job
from hpcsync.simulator.simulate import simulate
from hpcsync.system import launcher
from hpcsync.system.namespaces import Hosts
from hpcsync.trace.reader import Trace, load
from tests.hosts.processes import PAUSES, left

LINEAR = """
name = "apart"
seed = 1
workload = {{name = "linear", features = 101, samples = 400, batch_size = 8}}
optimizer = {{name = "sgd", lr = 0.02, momentum = 0.9}}
stop = {{updates = 60}}
paradigm = {{name = "{paradigm}"}}
cluster = {{workers = 2}}
"""
TIMING = """
name = "heavy"
workload = {name = "timing", parameters = 1_000_000, batch_size = 1}
optimizer = {name = "sgd", lr = 0.1}
stop = {updates = 4}
paradigm = {name = "asp"}
cluster = {workers = 2}
"""
GOSSIP = """
name = "heavy-gossip"
seed = 1
workload = {name = "timing", parameters = 1_000_000, batch_size = 1}
optimizer = {name = "sgd", lr = 0.1}
stop = {updates = 12}
paradigm = {name = "gossip", mode = "pull", include_self = false}
cluster = {workers = 3, compute = {model = "constant", seconds = 1.0}}
"""
SEPARATED = """
name = "separated"
seed = 1
optimizer = {{name = "sgd", lr = 0.1}}
stop = {{updates = {updates}}}
evaluation = {{every_samples = 0}}
paradigm = {paradigm}
cluster = {{workers = 3}}

[workload]
name = "tests.mpi.network:convolutional"
batch_size = 32
options = {{hidden = 20_000}}
"""
FAILING = """
import torch
import hpcsync

model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with hpcsync.connect(model, optimizer, "{paradigm}", out="out") as sync:
    for n, (x,) in enumerate(sync.shard(torch.utils.data.TensorDataset(torch.ones(400, 1)), 1, epochs=None)):
        optimizer.zero_grad()
        model(x).sum().backward()
        sync.step()
        if sync.rank == 2 and n == 20:
            raise ValueError
"""
FC_BYTES = 8 * 800_003
UPDATES = 120  # so many that what a run begins with is a small part
WIRE_S = 0.3  # a push and a read of 4 MB each at 1 Gbit/s for two workers at once take half of it
SLOW_S = 0.5
SLACK_S = 0.5  # the machine's other business

HOSTS = 3

pytestmark = pytest.mark.hosts


def environ(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **more}


def run(hosts: Hosts, folder: Path, line: list[str], **more: str) -> subprocess.CompletedProcess[str]:
    result = hosts.run(line, cwd=folder, environ=environ(**more))
    assert result.returncode == 0, f"{shlex.join(line)}\n{result.stdout}\n{result.stderr}"
    return result


def trace_of(folder: Path) -> Trace:
    trace = load(folder / "trace.h5")
    assert trace.status == "finished"
    assert [found for found in audit(trace) if not found.passed] == []
    return trace


def weights_on_one_host(job: Path, out: Path) -> bytes:
    """Those of the job's simulation, which are to the bit those of a run on one host: see tests/mpi/test_smoke.py."""
    simulated = load_job(job, ['cluster.compute={model = "constant", seconds = 0.001}'])
    assert simulate(simulated, out, Console(quiet=True)) == 0
    return (out / "weights.safetensors").read_bytes()


def test_hosts_are_apart_and_empty(hosts: Hosts, tmp_path: Path) -> None:
    line = [
        *hosts.mpiexec([1, 2, 3]),
        "-n",
        "3",
        "sh",
        "-c",
        "hostname; ls /dev/shm | grep -c seen; touch /dev/shm/seen",
    ]
    words = hosts.run(line, cwd=tmp_path, environ=launcher.environment()).stdout.split()
    assert sorted(words) == ["0", "0", "0", "n1", "n2", "n3"]


@pytest.mark.parametrize("paradigm", [pytest.param("bsp", marks=pytest.mark.once), "asp"])
def test_hpcsync_run_works_between_hosts_and_loses_nothing(hosts: Hosts, tmp_path: Path, paradigm: str) -> None:
    job = tmp_path / "job.toml"
    job.write_text(LINEAR.format(paradigm=paradigm))
    program = [sys.executable, "-m", "hpcsync", "run", str(job), "--out"]
    run(hosts, tmp_path, [*program, "apart"], MPIEXEC=shlex.join(hosts.mpiexec([1, 2, 3])))
    trace = trace_of(tmp_path / "apart")
    assert hosts_of(trace) == ["n1", "n2", "n3"]
    for worker in (0, 1):
        pushes = trace.tables["pushes"][trace.tables["pushes"]["worker"] == worker]
        assert pushes["iteration"].tolist() == list(range(1, 1 + len(pushes)))
        assert len(pushes)
    assert len(trace.tables["pushes"]) >= 60
    if paradigm == "bsp":
        weights = (tmp_path / "apart" / "weights.safetensors").read_bytes()
        assert weights == weights_on_one_host(job, tmp_path / "together"), "bit for bit what one host computes"


@pytest.mark.once
def test_a_server_and_a_worker_on_every_host(hosts: Hosts, tmp_path: Path) -> None:
    """The same bits as with all ranks on one host. A launcher that starts one rank a host is refused: see
    tests/unit/mpi/transport/test_node_topology.py."""
    job = tmp_path / "job.toml"
    job.write_text(LINEAR.format(paradigm="bsp").replace("workers = 2", "workers = 2, servers = 2, colocated = true"))
    program = [sys.executable, "-m", "hpcsync", "run", str(job), "--out"]
    run(hosts, tmp_path, [*program, "shared"], MPIEXEC=shlex.join(hosts.mpiexec([1, 2], per_host=2)))
    assert hosts_of(trace_of(tmp_path / "shared")) == ["n1", "n2", "n1", "n2"]
    weights = (tmp_path / "shared" / "weights.safetensors").read_bytes()
    assert weights == weights_on_one_host(job, tmp_path / "together")


@PAUSES
def test_a_peer_that_computes_is_read_meanwhile(hosts: Hosts, tmp_path: Path) -> None:
    """Between hosts a read waits until its target makes MPI calls; in iterations of a second reads take a few tenths,
    and none waits for the end of one.

    What happens without help is in test_gossip_reads.py.
    """
    job = tmp_path / "job.toml"
    job.write_text(GOSSIP)
    program = [sys.executable, "-m", "hpcsync", "run", str(job), "--out", "out"]
    run(hosts, tmp_path, program, MPIEXEC=shlex.join(hosts.mpiexec([1, 2, 3])))
    trace = trace_of(tmp_path / "out")
    exchanges = trace.tables["exchanges"]
    assert set(exchanges["wire_bytes"]) == {4_000_000}
    assert trace.attributes["progression"] in ("thread", "hooks")
    print(f"{trace.attributes['progression']}: reads took {np.sort(exchanges['comm_s'])} s")
    assert np.median(exchanges["comm_s"]) < WIRE_S
    assert exchanges["comm_s"].max() < 0.9


@PAUSES
@pytest.mark.parametrize("paradigm", ["asp", "allreduce"])
def test_rank_0_hears_of_a_rank_that_fails(hosts: Hosts, tmp_path: Path, paradigm: str) -> None:
    """Also where what a rank sends needs calls of that rank, which then does nothing else."""
    (tmp_path / "failing.py").write_text(FAILING.format(paradigm=paradigm))
    line = [*hosts.mpiexec([1, 2, 3]), "-n", "3", sys.executable, "failing.py"]
    result = hosts.run(line, tmp_path, environ(**launcher.environment({"MPIEXEC": shlex.join(line)})))
    assert result.returncode != 0
    assert "hpcsync: failed: rank 2 failed; the trace so far is out/trace.h5" in result.stderr, result.stderr
    assert load(tmp_path / "out" / "trace.h5").status == "failed"


@pytest.mark.once
def test_only_activations_and_their_own_sums_come_to_a_convolution_worker(hosts: Hosts, tmp_path: Path) -> None:
    """As the last one's cable counts it, in whose part of a run nothing is tried at its start: no fully-connected
    parameter, and an iteration brings what the formula says. Under all-reduce, the control, all parameters come."""
    received = {}
    for name, updates, paradigm in (
        ("separated", UPDATES, '{name = "stanza", cut = "classifier"}'),
        ("all", 2, '{name = "allreduce"}'),
    ):
        job = tmp_path / f"{name}.toml"
        job.write_text(SEPARATED.format(paradigm=paradigm, updates=updates))
        before = hosts.received_bytes(3)
        program = [sys.executable, "-m", "hpcsync", "run", str(job), "--out", name]
        run(hosts, tmp_path, program, MPIEXEC=shlex.join(hosts.mpiexec([1, 2, 3])))
        trace_of(tmp_path / name)
        received[name] = hosts.received_bytes(3) - before
    gradients, ring = 32 * 36 * 8, 76 * 8  # of activations; and in a ring of two each gives the other as much as it has
    print(received, received["separated"] / UPDATES, gradients + ring)
    assert received["separated"] < FC_BYTES / 2
    assert received["all"] > FC_BYTES
    assert gradients + ring < received["separated"] / UPDATES < 1.3 * (gradients + ring)  # what TCP and MPI add


def hosts_of(trace: Trace) -> list[str]:
    return [host.decode() for host in trace.tables["clocks"]["host"]]


def longest_transfers(hosts: Hosts, folder: Path, *server: str) -> tuple[float, float]:
    """(longest read and push of an iteration together, the server's longest update), in seconds."""
    job = folder / "job.toml"
    job.write_text(TIMING)
    out = folder / "out"
    slowed = str(Path(__file__).with_name("slowed.py"))
    line = [*hosts.mpiexec([1, 2, 3]), "-n", "3", sys.executable, "-m", "mpi4py", slowed, str(job), str(out), *server]
    run(hosts, folder, line, **launcher.environment({"MPIEXEC": shlex.join(line)}))
    seen = json.loads((out / "seen.json").read_text())
    assert seen["equal_weights"]
    pushes = trace_of(out).tables["pushes"]
    assert set(pushes["wire_bytes"]) == {8_000_000}
    print(f"read and push: {np.sort(pushes['comm_s']).round(3)} s; longest update {seen['longest_update_s']:.3f} s")
    return float(pushes["comm_s"].max()), float(seen["longest_update_s"])


def limit_s(update_s: float) -> float:
    """What an iteration's two transfers may take, each of which may wait for one update."""
    return 2 * update_s + WIRE_S + SLACK_S


@PAUSES
def test_no_transfer_waits_longer_than_the_longest_update(hosts: Hosts, tmp_path: Path) -> None:
    """On a server that is nearly always in an update."""
    comm_s, update_s = longest_transfers(hosts, tmp_path, str(SLOW_S))
    assert comm_s < limit_s(update_s)
    assert comm_s > SLOW_S / 2, "they did meet a busy server"


@pytest.mark.once
@PAUSES
def test_transfers_wait_for_a_server_that_is_deaf_while_it_waits(hosts: Hosts, tmp_path: Path) -> None:
    """The negative control of the test above: its updates are short, but transfers wait beyond the same limit."""
    comm_s, update_s = longest_transfers(hosts, tmp_path, "0", "deaf")
    assert comm_s > limit_s(update_s)


def test_nothing_is_left_on_the_hosts(hosts: Hosts) -> None:
    assert left(hosts) == []


def test_a_process_that_is_left_on_a_host_is_seen(hosts: Hosts) -> None:
    """The negative control of the test above."""
    line = hosts.inside("n2", Path.cwd(), ["sh", "-c", "echo up; exec sleep 60"])
    with subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None and started.stdout.readline() == "up\n"
        found = {process.name(): process for process in left(hosts, 0.5)}
        for process in found.values():
            process.kill()
    assert list(found) == ["sleep"]
