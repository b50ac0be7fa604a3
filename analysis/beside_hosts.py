"""Compare simulations with real ranks on four hosts with shaped links; called by beside_real.py.

The hosts are network namespaces of this machine, which needs root on Linux. Iterations are padded to a time about equal
to that of an iteration's transfers. Each run is simulated with the same times and with the link as it was measured.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas
from rich.table import Table

from hpcsync.config.job import Job
from hpcsync.report.trace_pair import side
from hpcsync.run_dir import layout
from hpcsync.system import launcher
from hpcsync.system.namespaces import Hosts
from hpcsync.trace.reader import Trace, load

ROOT = Path(__file__).parents[1]
LINK_SPEED, UPDATE_SPEED = (
    Path(__file__).parent / "reproductions" / name for name in ("link_speed.py", "update_speed.py")
)
HOSTS = 4
RATES = {"1gbit": 1.0, "200mbit": 0.2}  # of every link in Gbit/s, by its name in tc's words
PARAMETERS = {"1gbit": 4_000_000, "200mbit": 1_000_000}  # of 4 bytes: transfers of at least a tenth of a second
CONGESTION = "reno"  # shares a link evenly; BBR, the default of some machines, does not
# A run takes about so many times as long as the transfers of an iteration. Workers that do not wait for each other
# begin together, and it takes time until their transfers meet at random.
TRANSFERS, DRIFTING = 40, 100
LEFT_OUT = 0.2  # share of the samples at the beginning, while memory and connections are new
WINDOW = 4  # iterations: a multiple of the periods of all methods
RATIO, POINTS = 0.05, 3.0  # aims
TIMEOUT_S = 300.0


class Method(NamedTuple):
    """A paradigm.

    Attributes
    ----------
    paradigm
        Its table of the job file.
    servers
        Number of servers; without `colocated` these hosts have no workers.
    crossings
        How often the model crosses the busiest link in an iteration.
    backward_share
        Share of the computation during which gradients become ready.
    colocated
        Whether servers share the hosts of workers.
    drifts
        Whether workers do not wait for each other.
    """

    paradigm: dict[str, Any]
    servers: int
    crossings: float
    backward_share: float = 0.0
    colocated: bool = False
    drifts: bool = False


SERVED = 2 * (HOSTS - 1)  # pushes and reads of three workers over the server's link
RING = 2 * (HOSTS - 1) / HOSTS
METHODS = {
    "bsp": Method({"name": "bsp"}, 1, SERVED),
    "asp": Method({"name": "asp"}, 1, SERVED, drifts=True),
    "ssp": Method({"name": "ssp", "staleness": 2}, 1, SERVED, drifts=True),
    "dssp": Method({"name": "dssp", "staleness_min": 1, "staleness_max": 4}, 1, SERVED, drifts=True),
    "k-sync": Method({"name": "k-sync", "k": 2}, 1, SERVED),
    "k-async": Method({"name": "k-async", "k": 2}, 1, SERVED, drifts=True),
    "easgd": Method({"name": "easgd", "period": 2}, 1, SERVED / 2, drifts=True),
    "bsp, 2 servers": Method({"name": "bsp"}, 2, 2),
    "bsp, colocated": Method({"name": "bsp"}, HOSTS, RING, colocated=True),
    "allreduce": Method({"name": "allreduce"}, 0, RING),
    "allreduce, overlapped": Method({"name": "allreduce", "bucket_mb": 1.0}, 0, RING, backward_share=0.6),
    "local-sgd": Method({"name": "local-sgd", "steps": 2}, 0, RING / 2),
    "gossip pull": Method({"name": "gossip", "mode": "pull", "include_self": False}, 0, 1, drifts=True),
    "gossip push": Method({"name": "gossip", "mode": "push", "include_self": False}, 0, 1, drifts=True),
    "gossip swap": Method({"name": "gossip", "mode": "permutation"}, 0, 1),
    "ad-psgd": Method({"name": "ad-psgd"}, 0, 1, drifts=True),
}


def job(name: str, rate: str, seed: int, measured: Mapping[str, Any] | None = None) -> Job:
    """Return the job of a real run, or with what was measured of the hosts that of its simulation."""
    method = METHODS[name]
    transfers_s = method.crossings * 4 * PARAMETERS[rate] * 8e-9 / RATES[rate]
    compute = {"model": "lognormal", "seconds": round(transfers_s, 3), "jitter": 0.1}
    cluster: dict[str, Any] = {
        "workers": HOSTS - (0 if method.colocated else method.servers),
        "servers": method.servers,
        "colocated": method.colocated,
        "compute": compute | {"backward_share": method.backward_share},
    }
    return Job.from_table(
        {
            "name": "beside-real",
            "seed": seed,
            "workload": {"name": "timing", "parameters": PARAMETERS[rate], "batch_size": 1},
            "optimizer": {"name": "sgd", "lr": 0.1},
            "stop": {"seconds": round((DRIFTING if method.drifts else TRANSFERS) * max(transfers_s, 0.25), 1)},
            "paradigm": method.paradigm,
            "cluster": cluster | dict(measured or {}),
        }
    )


def compare_on_hosts(methods: Sequence[str], rates: Sequence[str], seeds: Sequence[int], out: Path) -> pandas.DataFrame:
    """Run and simulate each method; return a row for each run."""
    rows = []
    out.mkdir(parents=True, exist_ok=True)
    for rate in rates:
        with Hosts(HOSTS, rate=rate, congestion=CONGESTION) as hosts:
            measured = measure(hosts, out / rate, 4 * PARAMETERS[rate])
            print(rate, measured, flush=True)
            for seed in seeds:
                for name in methods:
                    folder = out / f"{rate}-{name.replace(', ', '-').replace(' ', '-')}-{seed}"
                    hpcsync("run", job(name, rate, seed), folder / "real", hosts)
                    hpcsync("simulate", job(name, rate, seed, measured), folder / "simulated")
                    rows.append({"rate": rate, "paradigm": name, "seed": seed} | beside(folder))
                    print(rows[-1], flush=True)
    return pandas.DataFrame(rows)


def measure(hosts: Hosts, folder: Path, size_bytes: int) -> dict[str, Any]:
    """Measure the link with messages of the model's size, and updates of such a model; return keys of [cluster]."""
    folder.mkdir(parents=True, exist_ok=True)
    link_file, update_file = (folder.resolve() / name for name in ("link.json", "update.json"))
    program = ["-m", "mpi4py", str(LINK_SPEED), str(link_file), str(size_bytes)]
    line = [*hosts.mpiexec([1, 2]), "-n", "2", sys.executable, *program]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    succeed(hosts, line, launcher.environment({**environ, "MPIEXEC": shlex.join(line)}))
    succeed(hosts, [sys.executable, str(UPDATE_SPEED), str(update_file), str(size_bytes)], environ)
    link = json.loads(link_file.read_text())
    network = {key: link[key] for key in ("latency_us", "bandwidth_gbit")}
    return {"network": network} | json.loads(update_file.read_text())


def hpcsync(command: str, asked: Job, folder: Path, hosts: Hosts | None = None) -> None:
    file = folder.resolve() / "asked.toml"  # of ranks in another folder
    if (folder / layout.SUMMARY).exists() and Job.from_toml(file.read_text(encoding="utf-8")) == asked:
        return
    shutil.rmtree(folder, ignore_errors=True)  # of another job, such as with the link as it was measured before
    folder.mkdir(parents=True)
    file.write_text(asked.to_toml(), encoding="utf-8")
    line = [sys.executable, "-m", "hpcsync", command, str(file), "--out", str(folder.resolve())]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    if hosts is None:
        subprocess.run(line, check=True, stdout=subprocess.DEVNULL, env=environ)
    else:
        per_host = asked.cluster.ranks // HOSTS
        succeed(hosts, line, environ | {"MPIEXEC": shlex.join(hosts.mpiexec(range(1, HOSTS + 1), per_host))})


def succeed(hosts: Hosts, line: list[str], environ: Mapping[str, str]) -> None:
    done = hosts.run(line, ROOT, environ, TIMEOUT_S)
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(line)}\n{done.stdout}\n{done.stderr}")


def beside(folder: Path) -> dict[str, float]:
    """Compare a real run with its simulation, from the same number of samples to the same number of samples."""
    real, simulated = (load(folder / engine / layout.TRACE) for engine in ("real", "simulated"))
    last = min(int(trace.tables["updates"]["samples"].max()) for trace in (real, simulated))
    first = int(LEFT_OUT * last)
    rates = [samples_per_s(trace, first, last) for trace in (real, simulated)]
    waits = [side(trace, last).wait_share or 0.0 for trace in (real, simulated)]
    computed = [compute_s(trace) for trace in (real, simulated)]
    return {
        "samples": last - first,
        "real_per_s": rates[0],
        "simulated_per_s": rates[1],
        "ratio": rates[1] / rates[0],
        "real_wait": waits[0],
        "simulated_wait": waits[1],
        "wait_points": 100 * (waits[1] - waits[0]),
        "slowed": computed[0] / computed[1],
    }


def samples_per_s(trace: Trace, first: int, last: int) -> float:
    """Return the median over windows of four iterations: other work of the machine delays a few of a real run's."""
    updates, window = trace.tables["updates"], WINDOW * trace.n_workers
    begins = np.arange(first, last - window + 1, trace.n_workers)
    begin_s, end_s = (updates["now_s"][np.searchsorted(updates["samples"], at)] for at in (begins, begins + window))
    return window / float(np.median(end_s - begin_s))


def compute_s(trace: Trace) -> float:
    """Return the mean compute time of the iterations: a machine that is too busy takes longer than it is padded to."""
    rows = trace.tables["pushes" if trace.job.has_servers else "exchanges"]
    return float(np.mean(rows["compute_s"]))


def table(frame: pandas.DataFrame) -> Table:
    """Return the means over seeds, with the farthest of the ratios and of the differences."""
    result = Table(title="On four hosts, with the measured link", title_justify="left", box=None, pad_edge=False)
    for column in (
        "link",
        "",
        "samples/s: real",
        "simulated",
        "ratio",
        "waiting: real",
        "simulated",
        "points",
        "slowed",
    ):
        result.add_column(column, justify="left" if column in ("link", "") else "right")
    for (rate, name), group in frame.groupby(["rate", "paradigm"], sort=False):
        mean = group.mean(numeric_only=True)
        result.add_row(
            rate,
            str(name),
            f"{mean.real_per_s:.3f}",
            f"{mean.simulated_per_s:.3f}",
            " ".join(f"{x:.3f}" for x in group.ratio),
            f"{mean.real_wait:.1%}",
            f"{mean.simulated_wait:.1%}",
            " ".join(f"{x:+.1f}" for x in group.wait_points),
            f"{mean.slowed:.3f}",
        )
    return result


def misses(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Return the rows that miss an aim; a figure that is missing does."""
    return frame[~(((frame.ratio - 1).abs() <= RATIO) & (frame.wait_points.abs() <= POINTS))]
