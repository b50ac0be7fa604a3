"""Stanza, a parameter server and all-reduce on four hosts, compared with simulations of the same links.

The hosts are network namespaces of this machine with slowed links; iterations are padded. Needs root on Linux.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from hpcsync.config.job import Job
from hpcsync.core.stanza_resolution import resolved
from hpcsync.paradigms.stanza import StanzaOptions
from hpcsync.run_dir import layout
from hpcsync.system import launcher
from hpcsync.system.atomic_files import whole
from hpcsync.system.namespaces import Hosts
from hpcsync.trace.reader import load
from hpcsync.workloads.registry import build
from reproductions.claims import Claim, Of, conclude, of, ratio
from reproductions.simulating import finished, make_empty, simulate_all
from reproductions.stanza import LEAST, SHARDS, STANZA, measure, path_of

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]

HOSTS = 4
RATES = {"1gbit": "1 Gbit/s", "200mbit": "200 Mbit/s"}  # of every link, in tc's words and in ours
SERVER, RING, PIECES = "server", "ring", 4
IN_PIECES = f"{STANZA}, {PIECES} pieces"
WITHOUT = {"workers": HOSTS, "servers": 0}
METHODS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # the tables of paradigm and cluster that differ
    SERVER: ({"name": "bsp"}, {"workers": HOSTS - 1, "servers": 1}),
    SHARDS: ({"name": "bsp"}, {"workers": HOSTS, "servers": HOSTS, "colocated": True}),
    RING: ({"name": "allreduce"}, WITHOUT),
    STANZA: ({"name": "stanza", "cut": "classifier"}, WITHOUT),
    IN_PIECES: ({"name": "stanza", "cut": "classifier", "micro_batches": PIECES}, WITHOUT),
}
FIRST_SEED = 1
CABLES = "cables.json"  # in a run's folder: bytes that all hosts have sent
UPDATES, LEFT_OUT = 12, 3  # of a run; of these, at the beginning
TIMEOUT_S = 300.0

# A small VGG, nine tenths of which are fully connected, as of VGG-16. It is 13.7 MB; at 200 Mbit/s they take 2.7
# times what an iteration computes, and so do VGG-16's at 10 Gbit/s beside a V100.
WORKLOAD = {"name": "images", "batch_size": 8, "size": 32, "width": 32, "hidden": 1024}
SECONDS = 0.2


def job(method: str, seed: int, network: dict[str, float] | None = None) -> Job:
    """network: only of a simulation."""
    paradigm, own = METHODS[method]
    cluster: dict[str, Any] = own | {"compute": {"model": "constant", "seconds": SECONDS}}
    asked = Job.from_table(
        {
            "name": f"{method}-real".replace(", ", "-").replace(" ", "-"),
            "seed": seed,
            "workload": WORKLOAD,
            "optimizer": {"name": "sgd", "lr": 0.01},
            "stop": {"updates": UPDATES},
            "paradigm": paradigm,
            "cluster": cluster | ({} if network is None else {"network": network}),
        }
    )
    return resolved(asked, build(asked))


def run_all(rate: str, seeds: Sequence[int], out: Path, console: Console) -> dict[str, float]:
    """Run what is missing in the folder, on hosts with links of this rate; how fast these are."""
    link = out / f"{rate}.json"
    todo = {path_of(rate, "real", method, seed): job(method, seed) for seed in seeds for method in METHODS}
    missing = {name: asked for name, asked in todo.items() if not counted(out / name, asked)}
    if missing or not link.exists():
        with Hosts(HOSTS, rate=rate) as hosts:
            if not link.exists():
                with whole(link.resolve()) as file:
                    line = [sys.executable, "-m", "mpi4py", str(FOLDER / "link_speed.py"), str(file)]
                    succeed(hosts, [*hosts.mpiexec([1, 2]), "-n", "2", *line], launcher.environment())
            for n, (name, asked) in enumerate(missing.items(), 1):
                console.print(f"run {n} of {len(missing)}: {name}")
                run(hosts, asked, (out / name).resolve())
    return json.loads(link.read_text())


def counted(folder: Path, asked: Job) -> bool:
    """Return True if the folder has the finished run of exactly this job, and the bytes that its cables carried."""
    return (folder / CABLES).exists() and finished(folder, asked)


def run(hosts: Hosts, asked: Job, folder: Path) -> None:
    """One rank on each host, or a server and its worker, by `hpcsync run`. Raises CalledProcessError if it fails."""
    make_empty(folder)
    file = folder / "asked.toml"
    file.write_text(asked.to_toml(), encoding="utf-8")
    mpiexec = shlex.join(hosts.mpiexec(range(1, HOSTS + 1), asked.cluster.ranks // HOSTS))
    line = [sys.executable, "-m", "hpcsync", "run", str(file), "--out", str(folder)]
    before = sent_bytes(hosts)
    succeed(hosts, line, os.environ | {"PYTHONPATH": str(ROOT), "MPIEXEC": mpiexec})
    with whole(folder / CABLES) as file:
        file.write_text(json.dumps(sent_bytes(hosts) - before))


def sent_bytes(hosts: Hosts) -> int:
    """By all hosts together, as their cables have counted."""
    lines = succeed(hosts, ["cat", "/proc/net/dev"], os.environ).splitlines()
    return sum(int(line.split(":")[1].split()[0]) for line in lines if line.strip().startswith("to-n"))


def succeed(hosts: Hosts, line: list[str], environ: Mapping[str, str]) -> str:
    """Return the output of the program."""
    done = hosts.run(line, ROOT, environ, TIMEOUT_S)
    if done.returncode != 0:
        raise subprocess.CalledProcessError(done.returncode, line, done.stdout, done.stderr)
    return str(done.stdout)


def computing(folder: Path) -> dict[str, float]:
    """Return measured over intended compute time of the slowest worker: 1 if the machine keeps up."""
    trace = load(folder / layout.TRACE)
    rows = trace.frame("pushes" if trace.job.has_servers else "exchanges")
    compute_s = rows[rows["iteration"] > LEFT_OUT].groupby("worker")["compute_s"].median()
    return {"slowed": float(compute_s.max()) / max_s(trace.job)}


def max_s(asked: Job) -> float:
    """Return the compute time of the worker with the most work."""
    if not isinstance(asked.paradigm, StanzaOptions):
        return SECONDS
    share = asked.paradigm.fc_share or 0.0
    return SECONDS * max(1 - share, share * asked.groups.n_convolution)


# ---- what is claimed ----

AS_SIMULATED = 0.15
WRAPPING = 0.2  # headers, the start and the end of a run, which weigh most where little is sent
SLOWED = 0.05
AT_LEAST = f"at least {LEAST:g}, which is printed for common models at 10 Gbit/s"


def speed_up(rate: str, engine: str, ours: str, other: str) -> Of:
    return ratio(*(of("samples_per_s", rate, engine, method) for method in (ours, other)))


def of_bytes_between(said: Of) -> Of:
    """Return the part of a sharded server's bytes that travels between hosts."""
    return lambda results: said(results) * (HOSTS - 1) / HOSTS


def claims() -> list[Claim]:
    found = []
    for rate, words in RATES.items():
        for method in METHODS:
            measured, simulated = (of("samples_per_s", rate, engine, method) for engine in ("real", "simulated"))
            says = f"{words}, {method}: measured samples a second / simulated"
            found.append(Claim(says, "", ratio(measured, simulated), 1 - AS_SIMULATED, 1 + AS_SIMULATED))
            counted, said = (of(column, rate, "real", method) for column in ("cable_bytes", "bytes"))
            if method == SHARDS:  # each worker's own shard stays on its host
                said = of_bytes_between(said)
            says = f"{words}, {method}: bytes counted at the cables / in the trace"
            found.append(Claim(says, "", ratio(counted, said), 1.0, 1 + WRAPPING))
            says = f"{words}, {method}: seconds computed / padded to"
            found.append(Claim(says, "", of("slowed", rate, "real", method), 1.0, 1 + SLOWED))
        for ours in (STANZA, IN_PIECES):
            for other in (SERVER, SHARDS, RING):
                for engine in ("real", "simulated"):
                    number = speed_up(rate, engine, ours, other)
                    says = f"{words}, {engine}: times the {other}'s samples a second: {ours}"
                    low, expected = (1.0, "") if other == RING else (LEAST, AT_LEAST)
                    found.append(Claim(says, "", number, low, expected=expected))
    return found


def reproduce(out: Path, seeds: int, console: Console) -> pd.DataFrame:
    """Run and simulate what is missing in the folder, write results and claims there, print the claims."""
    out.mkdir(parents=True, exist_ok=True)
    each = range(FIRST_SEED, FIRST_SEED + seeds)
    rows = []
    for rate in RATES:
        link = run_all(rate, each, out, console)
        network = {key: link[key] for key in ("latency_us", "bandwidth_gbit")}
        simulated = {
            path_of(rate, "simulated", method, seed): job(method, seed, network) for seed in each for method in METHODS
        }
        simulate_all(simulated, out, 1, console)
        for seed in each:
            for method in METHODS:
                real = out / path_of(rate, "real", method, seed)
                cables = {"cable_bytes": json.loads((real / CABLES).read_text()) / UPDATES}
                rows += [measure(real, LEFT_OUT) | link | cables | computing(real)]
                rows += [measure(out / path_of(rate, "simulated", method, seed), LEFT_OUT) | link]
    results = pd.DataFrame(rows)
    return conclude(claims(), results, out, console, f"Stanza, four hosts, {seeds} seeds: mean (95 % interval)")
