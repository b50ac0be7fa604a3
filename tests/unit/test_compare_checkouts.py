"""The comparison of two checkouts' traces finds what differs, and says where."""

from __future__ import annotations

import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.compare_checkouts import ROOT, compare, jobs_of, left_out, outcome

UPDATES = np.dtype([("now_s", "<f8"), ("version", "<i8"), ("word", "S8")])
JOB = {
    "name": "small",
    "seed": 1,
    "workload": {"name": "timing", "parameters": 10, "batch_size": 1},
    "optimizer": {"name": "sgd", "lr": 0.1},
    "stop": {"updates": 5},
    "paradigm": {"name": "asp"},
    "cluster": {"workers": 2, "compute": {"model": "constant", "seconds": 0.05}},
}


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Two runs that differ in nothing but attributes."""
    found = [tmp_path / "before", tmp_path / "after"]
    for folder in found:
        folder.mkdir()
        with h5py.File(folder / "trace.h5", "w") as file:
            file.attrs["created"] = folder.name
            updates = np.array([(0.1, 1, b"a"), (np.nan, 2, b"b"), (0.3, 3, b"c")], UPDATES)
            file.create_dataset("updates", data=updates, maxshape=(None,), chunks=True).attrs["version"] = folder.name
            file.create_dataset("clocks", data=np.zeros(0, UPDATES))
        save_file({"bias": np.arange(3, dtype=np.float32)}, folder / "weights.safetensors")
    return found


def found(folders: list[Path]) -> str:
    return outcome(folders, ["0\n", "0\n"])[1]


def test_the_same(folders):
    assert outcome(folders, ["0\n", "0\n"]) == ("2 tables, 3 rows", "identical")


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("version", 7, "updates, column version, row 1: 2 before, 7 after"),
        ("now_s", 0.2, "updates, column now_s, row 1: nan before, 0.2 after"),
        ("word", b"x", "updates, column word, row 1: b'b' before, b'x' after"),
    ],
)
def test_a_changed_value(folders, column, value, words):
    with h5py.File(folders[1] / "trace.h5", "a") as file:
        rows = file["updates"][()]
        rows[column][1] = value
        file["updates"][...] = rows
    assert found(folders) == words


def test_zeros_of_other_signs(folders):
    """They are equal, but not the same bytes."""
    for folder, value in zip(folders, (0.0, -0.0), strict=True):
        with h5py.File(folder / "trace.h5", "a") as file:
            rows = file["updates"][()]
            rows["now_s"][2] = value
            file["updates"][...] = rows
    assert found(folders) == "updates, column now_s, row 2: 0.0 before, -0.0 after"


@pytest.mark.parametrize(("shorter", "words"), [(0, "2 rows before, 3 after"), (1, "3 rows before, 2 after")])
def test_a_missing_row(folders, shorter, words):
    with h5py.File(folders[shorter] / "trace.h5", "a") as file:
        file["updates"].resize(2, axis=0)
    assert found(folders) == f"updates: {words}, and the same up to there"


@pytest.mark.parametrize(("which", "words"), [(0, "clocks: only after"), (1, "clocks: only before")])
def test_a_missing_table(folders, which, words):
    with h5py.File(folders[which] / "trace.h5", "a") as file:
        del file["clocks"]
    assert found(folders) == words


def test_a_new_column(folders):
    with h5py.File(folders[1] / "trace.h5", "a") as file:
        rows = file["updates"][()]
        del file["updates"]
        wider = np.zeros(len(rows), [*UPDATES.descr, ("norm", "<f8")])
        for name in rows.dtype.names:
            wider[name] = rows[name]
        file["updates"] = wider
    assert "type" in found(folders)
    assert outcome(folders, ["0\n", "0\n"], ["norm"])[1] == "identical"
    with h5py.File(folders[1] / "trace.h5", "a") as file:
        wider["version"][1] = 7
        file["updates"][...] = wider
    assert "column version, row 1" in outcome(folders, ["0\n", "0\n"], ["norm"])[1]


def test_another_type_of_a_column(folders):
    """Even in a table without rows."""
    with h5py.File(folders[1] / "trace.h5", "a") as file:
        del file["clocks"]
        file.create_dataset("clocks", data=np.zeros(0, [("now_s", "<f4")]))
    assert found(folders).startswith("clocks: type ")


def test_other_weights(folders):
    path = folders[1] / "weights.safetensors"
    weights = load_file(path)
    weights["bias"][2] = np.nextafter(weights["bias"][2], np.float32(3))
    save_file(weights, path)
    assert found(folders).startswith("weights: bias, row 2: 2.0 before, 2.0000002")


def test_a_simulation_that_failed(folders):
    (folders[1] / "output.txt").write_text("first\nhpcsync: no such paradigm\n")
    assert outcome(folders, ["0\n", "2\n"])[1] == "failed after, status 2: hpcsync: no such paradigm"
    assert outcome(folders, ["", "0\n"])[1].startswith("failed before, status unknown")


def test_each_simulates_with_its_own_code(tmp_path, capsys):
    """A copy of this checkout draws other numbers: it differs where times vary, and only there."""
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "hpcsync", copy / "hpcsync", ignore=shutil.ignore_patterns("__pycache__"))
    program = copy / "hpcsync" / "__main__.py"
    program.write_text('import sys\n\nsys.argv += ["--set", "seed=2"]\n' + program.read_text())
    cluster = {"workers": 2, "compute": {"model": "lognormal", "seconds": 0.05, "jitter": 0.2}}
    assert compare(ROOT, copy, {"constant": JOB, "varied": {**JOB, "cluster": cluster}}, tmp_path) == 1
    constant, varied = capsys.readouterr().out.splitlines()
    assert constant.startswith("constant: ") and constant.endswith(": identical")
    assert varied.startswith("varied: ") and ", row 0: " in varied and " before, " in varied


def test_code_of_another_folder_is_not_compared(tmp_path, capsys):
    """Where a checkout has no hpcsync, that of the environment must not be taken for it."""
    (tmp_path / "empty").mkdir()
    assert compare(ROOT, tmp_path / "empty", {"small": JOB}, tmp_path) == 1
    assert "small: nothing: failed after, status unknown" in capsys.readouterr().out


def test_all_jobs_are_simulated_or_said_to_be_left_out(tmp_path):
    jobs = jobs_of(ROOT)
    assert set(jobs) == {f"jobs/{path.stem}" for path in (ROOT / "jobs").glob("*.toml")}
    assert not any(left_out(name, job) for name, job in jobs.items())
    (tmp_path / "jobs").mkdir()
    cifar = 'workload.name = "cifar10"\nstop.samples = 10\nparadigm.name = "bsp"\ncluster.workers = 2\n'
    (tmp_path / "jobs" / "cifar.toml").write_text(cifar)
    ((name, job),) = jobs_of(tmp_path).items()
    assert left_out(name, job) == f"its data are missing: {tmp_path / 'jobs' / 'data'}"
