"""Do two checkouts compute the same? Simulates the same jobs with the code of both and compares all that they write.

    python tests/compare_checkouts.py BEFORE AFTER [--jobs PATTERN] [--new COLUMN,...]

BEFORE and AFTER are folders of checkouts. The jobs are AFTER's jobs/*.toml and what the reproductions simulate in the
checkout that this script lies in, with one seed; all are shortened. Every table of trace.h5 and every tensor of
weights.safetensors must be the same byte for byte, but for columns that are said to be new. Attributes, such as when a
trace was written, are not compared.
The exit status is 1 if anything differs or fails.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from contextlib import ExitStack
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import tomli_w
from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parents[1]
EACH = "simulate-each"  # the first argument of the process that simulates with the code of one checkout
TIMEOUT_S = 600.0  # of one simulation
WEIGHTS, IDENTICAL = "weights: ", "identical"

Jobs = dict[str, dict[str, Any]]  # as they are in TOML, by name

# ---- which jobs ----

# At most, of a job in jobs/: samples by workload, and updates. What adapts after a while has its time.
SAMPLES, UPDATES = {"digits": 10_000, "images": 5_000, "text": 1_200}, 20_000
LONG = ("adsp", "ashl")
COMPUTE = {"model": "lognormal", "seconds": 0.02, "jitter": 0.2}  # for a job that does not say it
LENGTH = {"dssp": 0.03, "gossip": 0.08, "first_k": 0.1, "ashl": 0.12}  # as a share of the reproductions' runs
NETWORK = {"bandwidth_gbit": 1.0, "latency_us": 50.0}  # for stanza_real, which measures one


def jobs_of(checkout: Path) -> Jobs:
    """Read the jobs in the folder `jobs` of a checkout, and shorten them.

    Parameters
    ----------
    checkout : Path
        Its folder.

    Returns
    -------
    Jobs
        The jobs by name, which is "jobs/" and the file's name without its ending.
    """
    found = {}
    for path in sorted((checkout / "jobs").glob("*.toml")):
        job = tomllib.loads(path.read_text(encoding="utf-8"))
        stop, samples = job["stop"], SAMPLES.get(job["workload"]["name"])
        if "updates" in stop:
            stop["updates"] = min(stop["updates"], UPDATES)
        if "samples" in stop and samples is not None and job["paradigm"]["name"] not in LONG:
            stop["samples"] = min(stop["samples"], samples)
            job["evaluation"]["every_samples"] = min(job["evaluation"]["every_samples"], stop["samples"] // 4)
        job["cluster"].setdefault("compute", COMPUTE)
        if "folder" in job["workload"] or job["workload"]["name"].startswith("cifar"):  # relative to the job file
            job["workload"]["folder"] = str((path.parent / job["workload"].get("folder", "data")).resolve())
        found[f"jobs/{path.stem}"] = job
    return found


def reproduced_jobs(times: Path) -> Jobs:
    """Collect what the reproductions of this checkout simulate, with one seed, and shortened.

    Parameters
    ----------
    times : Path
        The folder into which the tables of times are written that some of the jobs read.

    Returns
    -------
    Jobs
        The jobs by name: of the reproduction, the setting, its arm, the method, and the seed.
    """
    sys.path[:0] = [str(ROOT / "analysis"), str(ROOT)]
    from reproductions import ashl, dssp, first_k, first_k_real, gossip, stanza, stanza_real

    for workers in gossip.WORKERS:
        gossip.write_times(gossip.table_of(times, workers, gossip.FIRST_SEED), workers, gossip.FIRST_SEED)
    found = {
        "dssp": dssp.jobs(1, LENGTH["dssp"]),
        "gossip": gossip.jobs(1, times, LENGTH["gossip"]),
        "first_k": first_k.jobs(1, LENGTH["first_k"]),
        "first_k_real": first_k_real.jobs(1),
        "ashl": ashl.jobs(1, LENGTH["ashl"]),
        "stanza": stanza.jobs(1),
        "stanza_real": {name: stanza_real.job(name, 1, NETWORK) for name in stanza_real.METHODS},
    }
    return {
        f"{of}/{name}": job.model_dump(exclude_none=True, exclude_defaults=True)  # BEFORE may lack keys with defaults
        for of, jobs in found.items()
        for name, job in jobs.items()
    }


def left_out(name: str, job: dict[str, Any]) -> str:
    """Say why a job is not simulated.

    Parameters
    ----------
    name : str
        The job's name.
    job : dict
        The job as it is in TOML.

    Returns
    -------
    str
        The reason; empty for a job that is simulated.
    """
    folder = job["workload"].get("folder")
    if folder is not None and not Path(folder).is_dir():
        return f"its data are missing: {folder}"
    return "only a number differs from another job" if varies_a_number(name) else ""


def varies_a_number(name: str) -> bool:
    """Whether a reproduction has this job beside others that differ in a bound, a learning rate or a size alone.

    Parameters
    ----------
    name : str
        The job's name.

    Returns
    -------
    bool
        True for a job that need not be simulated.
    """
    of, setting, arm, method = name.split("/")[:4] if name.count("/") == 4 else ("", "", "", "")
    if of == "dssp":
        return method.startswith("SSP-") and method not in ("SSP-3", "SSP-6", "SSP-15")
    if of == "gossip":
        return arm in ("large", "small")
    if of == "ashl":
        return arm in ("half", "double")
    if of == "stanza" and method.startswith("server_") and method not in ("server_1", "server_2", "server_beside"):
        return True
    if of == "stanza" and setting.startswith("resnet50-"):
        return arm.startswith("batch-") and arm not in ("batch-8", "batch-512")
    if of == "stanza":  # other models, of which the large ones take long
        return not (setting.endswith("-10-10") and arm == "main")
    return False


# ---- simulating them ----


def simulate_each(checkout: str, jobs: str, out: str) -> int:
    """Simulate many jobs with the code on the path, and print the exit status of each.

    Each is simulated as `python -m hpcsync simulate JOB --out FOLDER` does it, in a process of its own. This process is
    forked from one that has imported what takes seconds and does not belong to the checkout.

    Parameters
    ----------
    checkout : str
        The folder from which hpcsync must be imported.
    jobs : str
        The folder of the job files.
    out : str
        The folder in which each job gets a folder of its own.

    Returns
    -------
    int
        1 if hpcsync is imported from another folder, else 0.
    """
    origin = Path(find_spec("hpcsync").origin).resolve()
    if not origin.is_relative_to(Path(checkout)):
        print(f"hpcsync is imported from {origin}, not from {checkout}", file=sys.stderr)
        return 1
    import pydantic.main  # noqa: F401
    import rich.progress  # noqa: F401
    import safetensors.torch  # noqa: F401
    import sklearn.datasets  # noqa: F401
    import torch._dynamo  # noqa: F401
    import typer  # noqa: F401

    for job in sorted(Path(jobs).glob("*.toml")):
        process = multiprocessing.get_context("fork").Process(target=_simulate, args=(job, Path(out) / job.stem))
        process.start()
        process.join(TIMEOUT_S)
        if process.is_alive():
            process.kill()
            process.join()
        print(process.exitcode, flush=True)
    return 0


def _simulate(job: Path, out: Path) -> None:
    out.mkdir(parents=True)
    with (out / "output.txt").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.argv = ["hpcsync", "simulate", str(job), "--out", str(out)]
    runpy.run_module("hpcsync", run_name="__main__")


def started(checkout: Path, jobs: Path, out: Path) -> subprocess.Popen[str]:
    """Start the process that simulates all jobs with the code of one checkout.

    Parameters
    ----------
    checkout, jobs, out : Path
        As in `simulate_each`.

    Returns
    -------
    subprocess.Popen
        The process, which writes a line with an exit status for each job.
    """
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environ["PYTHONPATH"] = os.pathsep.join([str(checkout), str(checkout / "analysis")])
    line = [sys.executable, "-P", str(Path(__file__).resolve()), EACH, str(checkout), str(jobs), str(out)]
    return subprocess.Popen(line, env=environ, cwd=checkout, stdout=subprocess.PIPE, text=True)


# ---- comparing what they wrote ----


def arrays_of(folder: Path) -> dict[str, np.ndarray]:
    """Read what a simulation has written.

    Parameters
    ----------
    folder : Path
        The simulation's folder.

    Returns
    -------
    dict of str to numpy.ndarray
        All tables of trace.h5 and all tensors of weights.safetensors.
    """
    found: dict[str, np.ndarray] = {}

    def take(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            found[name] = item[()]

    with h5py.File(folder / "trace.h5") as file:
        file.visititems(take)
    return found | {WEIGHTS + name: tensor for name, tensor in load_file(folder / "weights.safetensors").items()}


def difference(before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> str:
    """Find the first difference between the arrays of two simulations.

    Parameters
    ----------
    before, after : dict of str to numpy.ndarray
        As `arrays_of` gives them.

    Returns
    -------
    str
        Where it is, and both values; empty if all arrays are the same byte for byte.
    """
    for name in sorted(before.keys() | after.keys()):
        if name not in after or name not in before:
            return f"{name}: only {'before' if name in before else 'after'}"
        found = _difference(before[name], after[name])
        if found:
            return f"{name}{found}"
    return ""


def _difference(before: np.ndarray, after: np.ndarray) -> str:
    if before.dtype != after.dtype:
        return f": type {before.dtype} before, {after.dtype} after"
    if before.dtype.hasobject:
        return f": type {before.dtype} cannot be compared, its bytes are elsewhere"
    if before.shape == after.shape and before.tobytes() == after.tobytes():
        return ""
    if before.ndim != after.ndim or before.shape[1:] != after.shape[1:]:
        return f": shape {before.shape} before, {after.shape} after"
    before, after = np.atleast_1d(before, after)
    for row in range(min(len(before), len(after))):
        if before[row].tobytes() != after[row].tobytes():
            for column in before.dtype.names or ():
                values = before[row][column], after[row][column]
                if values[0].tobytes() != values[1].tobytes():
                    return f", column {column}, row {row}: {values[0].tolist()!r} before, {values[1].tolist()!r} after"
            return f", row {row}: {before[row].tolist()} before, {after[row].tolist()} after"
    return f": {len(before):,} rows before, {len(after):,} after, and the same up to there"


def without(array: np.ndarray, columns: Sequence[str]) -> np.ndarray:
    """Return a table without these columns, packed; other arrays as they are."""
    names = array.dtype.names or ()
    kept = [name for name in names if name not in columns]
    if len(kept) == len(names):
        return array
    packed = np.zeros(array.shape, [(name, array.dtype[name]) for name in kept])
    for name in kept:
        packed[name] = array[name]
    return packed


def outcome(folders: Sequence[Path], statuses: Sequence[str], new: Sequence[str] = ()) -> tuple[str, str]:
    """Say what has come of one job with the code of both checkouts.

    Parameters
    ----------
    folders : sequence of Path
        Of both simulations.
    statuses : sequence of str
        The exit statuses of both.
    new : sequence of str
        Columns that only the checkout after has.

    Returns
    -------
    tuple of str
        How much was compared, and "identical" or the first difference.
    """
    for when, folder, status in zip(("before", "after"), folders, statuses, strict=True):
        if status.strip() != "0":
            output = folder / "output.txt"
            said = output.read_text(encoding="utf-8").splitlines() if output.exists() else []
            return "nothing", f"failed {when}, status {status.strip() or 'unknown'}: {said[-1] if said else ''}"
    before, after = map(arrays_of, folders)
    after = {name: without(array, new) for name, array in after.items()}
    tables = [array for name, array in before.items() if not name.startswith(WEIGHTS)]
    return f"{len(tables)} tables, {sum(map(len, tables)):,} rows", difference(before, after) or IDENTICAL


# ---- all of it ----


def compare(before: Path, after: Path, jobs: Jobs, folder: Path, new: Sequence[str] = ()) -> int:
    """Simulate all jobs with the code of both checkouts side by side, and print a line for each.

    Parameters
    ----------
    before, after : Path
        The folders of the checkouts.
    jobs : Jobs
        What is simulated.
    folder : Path
        For files that are of no use afterwards.
    new : sequence of str
        Columns that only the checkout after has.

    Returns
    -------
    int
        How many jobs are not identical.
    """
    (folder / "jobs").mkdir()
    for n, job in enumerate(jobs.values()):
        (folder / "jobs" / f"{n:04}.toml").write_text(tomli_w.dumps(job), encoding="utf-8")
    different = 0
    with ExitStack() as ends:
        outs = [folder / "before", folder / "after"]
        processes = [
            started(checkout, folder / "jobs", out) for checkout, out in zip((before, after), outs, strict=True)
        ]
        for process in processes:
            ends.callback(process.kill)
        for n, name in enumerate(jobs):
            statuses = [process.stdout.readline() for process in processes]  # nothing from one that has ended
            folders = [out / f"{n:04}" for out in outs]
            extent, result = outcome(folders, statuses, new)
            print(f"{name}: {extent}: {result}", flush=True)
            different += result != IDENTICAL
            for path in folders:
                shutil.rmtree(path, ignore_errors=True)
    return different


def main(arguments: list[str]) -> int:
    """Carry out the command line.

    Parameters
    ----------
    arguments : list of str
        Without the program's name.

    Returns
    -------
    int
        The exit status.
    """
    if arguments[:1] == [EACH]:
        return simulate_each(*arguments[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--jobs", default="*", metavar="PATTERN", help="of names, such as 'jobs/digits-*' or 'ashl/*'")
    parser.add_argument("--new", default="", metavar="COLUMN,...", help="columns of tables that only AFTER has")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        every = jobs_of(asked.after.resolve()) | reproduced_jobs(folder / "times")
        chosen = {name: job for name, job in every.items() if fnmatch(name, asked.jobs)}
        reasons = {name: left_out(name, job) for name, job in chosen.items()}
        todo = {name: job for name, job in chosen.items() if not reasons[name]}
        different = compare(asked.before.resolve(), asked.after.resolve(), todo, folder, asked.new.split(","))
    for reason in sorted(set(filter(None, reasons.values()))):
        names = [name for name in chosen if reasons[name] == reason]
        print(f"left out, {reason}: {names[0] if len(names) == 1 else f'{len(names)} jobs such as {names[0]}'}")
    print(f"{len(todo)} jobs: {len(todo) - different} identical" + (f", {different} not" if different else ""))
    return 0 if todo and not different else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
