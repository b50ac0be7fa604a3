"""The same job and seed under BSP: the same bits, whatever the number of servers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hpcsync import launcher
from tests.runs.processes import ended, mpiexec

JOB = """
name = "repeated"
workload = {name = "linear", features = 101, samples = 400, batch_size = 8}
optimizer = {name = "sgd", lr = 0.02, momentum = 0.9}
stop = {updates = 60}
evaluation = {every_samples = 160}
paradigm = {name = "bsp"}
"""


def weights(job: Path, out: Path, servers: int, seed: int) -> bytes:
    settings = ("-n", 2 + servers, "--set", f"cluster.servers={servers}", "--set", f"seed={seed}", "--out", out)
    line = mpiexec(2 + servers, "-m", "mpi4py", "-m", "hpcsync", "run", job, *settings)
    program = ended(line, environ=launcher.environment())
    assert program.status == 0, program.err
    return (out / "weights.safetensors").read_bytes()


def test_bsp_gives_the_same_bits_again_and_with_two_servers(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(JOB)
    runs = {"first": (1, 1), "again": (1, 1), "two servers": (2, 1), "another seed": (1, 2)}
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda name: weights(job, tmp_path / name, *runs[name]), runs))
    assert found[1] == found[0]
    assert found[2] == found[0]
    assert found[3] != found[0], "the test can tell"
