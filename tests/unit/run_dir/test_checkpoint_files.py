"""The files of a checkpoint: exact, and refused in one line if they are foreign, truncated or altered."""

from __future__ import annotations

import json
import math
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpcsync.config.errors import JobError
from hpcsync.run_dir import checkpoint
from hpcsync.run_dir.checkpoint import RUN, Checkpoints
from hpcsync.run_dir.checkpoint_files import MANIFEST, read_part, verified, write_manifest, write_part
from hpcsync.state import StateError
from tests.unit.run_states import run_state

FORBIDDEN = (
    "import pickle",
    "from pickle",
    "torch.load(",
    "torch.save(",
    "allow_pickle",
    "cloudpickle",
    "joblib",
    "dill",
)


def test_nothing_in_hpcsync_reads_or_writes_pickles():
    """Except the data set CIFAR, which is published as pickles: its reader refuses all names but those of arrays."""
    import hpcsync

    found = {
        path.name
        for path in Path(hpcsync.__path__[0]).rglob("*.py")
        if any(word in path.read_text(encoding="utf-8") for word in FORBIDDEN)
    }
    assert found == {"cifar.py"}, "the search itself must find that one"


DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int64, torch.bool)


def test_a_part_is_read_as_it_was_written(tmp_path):
    generator = torch.Generator().manual_seed(1)
    tensors = {str(dtype): torch.randint(0, 2, (3, 5), generator=generator).to(dtype) for dtype in DTYPES}
    whole = torch.arange(10.0)
    state = {
        "numbers": [0, -0.0, 1e-310, 0.1, 2**80, math.inf, -math.inf, math.nan, True, None],
        "text": "inf",
        "tensors": tensors,
        "scalar": torch.tensor(7.0),
        "empty": torch.zeros(0, 3),
        "shared": [whole, whole[2:5], whole[::2]],
        "numpy": np.arange(6, dtype=np.float32).reshape(2, 3),
        "words": (1, {"2": ["a"]}),
        "nan": torch.tensor([math.nan, -0.0]),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
    }
    write_part(tmp_path, "p", state)
    again = read_part(tmp_path, "p")
    assert again["numbers"][:5] == state["numbers"][:5] and math.copysign(1, again["numbers"][1]) == -1
    assert again["numbers"][5:] == ["inf", "-inf", "nan", True, None], "floats, where the declared type says so"
    assert again["words"] == [1, {"2": ["a"]}] and again["text"] == "inf"
    arrays = ("scalar", "empty", "numpy", "nan", "transposed")
    pairs = [(again["tensors"][key], tensor) for key, tensor in tensors.items()]
    pairs += [(again[key], torch.as_tensor(state[key])) for key in arrays]
    pairs += [*zip(again["shared"], state["shared"], strict=True)]
    for read, wrote in pairs:
        assert read.dtype == wrote.dtype and read.shape == wrote.shape
        assert read.contiguous().view(-1).view(torch.uint8).equal(wrote.contiguous().view(-1).view(torch.uint8))
    for path in tmp_path.iterdir():
        path.write_bytes(b"")
    assert again["tensors"]["torch.int64"].equal(tensors["torch.int64"]), "a copy, not a view of the file"


def test_its_files_have_the_permissions_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        write_part(tmp_path, "worker-0", {"array": torch.zeros(3)})
    finally:
        os.umask(before)
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {
        "worker-0.json": 0o640,
        "worker-0.safetensors": 0o640,
    }


def test_a_part_without_arrays_is_one_file(tmp_path):
    write_part(tmp_path, "p", {"a": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"]
    assert read_part(tmp_path, "p") == {"a": 1}


# ---- refused ----


def saved(folder: Path, **changes: Any) -> Path:
    """Write a checkpoint of a run, and return its folder."""
    store = Checkpoints(folder, 2, None, shared=True)
    store.begin(1)
    store.write(1, RUN, run_state(**changes))
    store.write(1, "worker-0", {"weights": torch.arange(1000.0)})
    return store.commit(1)


def rewritten(path: Path, change: Callable[[Any], Any]) -> None:
    content = json.loads(path.read_text())
    changed = change(content)
    path.write_text(json.dumps(content if changed is None else changed))


def with_new_manifest(path: Path) -> None:
    """Let the manifest say what is in the files, as somebody would who wants them to be restored."""
    (path / MANIFEST).unlink()
    write_manifest(path)


class Runs:
    """A pickle that runs code."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def a_pickle(path: Path) -> bytes:
    return pickle.dumps(Runs(path))


@pytest.mark.parametrize(
    ("name", "change", "line"),
    [
        ("worker-0.safetensors", lambda data: data[:-1], r"must have \d+ bytes, as the manifest says; it has \d+"),
        ("worker-0.safetensors", lambda data: data[:-1] + b"x", "altered: its SHA-256 is not the one in the manifest"),
        ("worker-0.json", lambda data: data.replace(b"state", b"etats"), "altered: its SHA-256 is .*"),
        ("run.json", lambda data: data.replace(b"bsp", b"asp"), "altered: its SHA-256 is .*"),
        ("run.json", lambda data: b"", r"must have \d+ bytes, as the manifest says; it has 0"),
        ("run.json", None, "missing"),
        ("worker-0.safetensors", None, "missing"),
        (MANIFEST, None, "missing, so this is no checkpoint of format version 8"),
        (MANIFEST, lambda data: data[:-9], "no JSON: .*"),
        (MANIFEST, lambda data: b"\xff", "no JSON: .*"),
        (MANIFEST, lambda data: b"[" * 100_000, "no JSON: .*"),
        (MANIFEST, lambda data: b"[]", 'must have the format "hpcsync checkpoint"'),
        (MANIFEST, lambda data: b'{"format": "other"}', 'must have the format "hpcsync checkpoint"'),
        (
            MANIFEST,
            lambda data: data.replace(b'"version": 8', b'"version": 9'),
            "version 9 of the format; this .* 3, 4, 5, 6, 7, 8",
        ),
        (MANIFEST, lambda data: data.replace(b'"size"', b'"sizes"', 1), r"files\.[a-z0-9.-]+\.size: must be given"),
    ],
)
def test_another_file_than_was_written_is_refused_before_any_rank_starts(tmp_path, name, change, line):
    path = saved(tmp_path) / name
    if change is None:
        path.unlink()
    else:
        path.write_bytes(change(path.read_bytes()))
    with pytest.raises(JobError, match=rf"^--resume: \S+/checkpoints/1/{name}: {line}$") as told:
        checkpoint.resumed(tmp_path)
    assert "\n" not in str(told.value)


def test_an_intact_one_is_accepted(tmp_path):
    """The control of the refusals."""
    assert set(verified(saved(tmp_path)).files) == {"run.json", "worker-0.json", "worker-0.safetensors"}
    assert checkpoint.resumed(tmp_path) is not None


def test_a_checkpoint_of_earlier_releases_is_refused(tmp_path):
    folder = tmp_path / "checkpoints" / "4"
    folder.mkdir(parents=True)
    torch.save({"hpcsync_version": "0.1", "job": ""}, folder / "run.pt")
    line = r"^--resume: \S+/checkpoints/4/manifest.json: missing, so this is no checkpoint of format version 8$"
    with pytest.raises(JobError, match=line):
        checkpoint.resumed(tmp_path)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"now_s": "x"}, "now_s: must be float, got 'x'"),
        ({"more": 1}, "more: must be left out"),
        ({"trace_rows": {"updates": 1.5}}, "trace_rows.updates: must be int, got 1.5"),
        ({"unheard": [["x"]]}, r"unheard.\[0\].\[0\]: must be int | float, got 'x'"),
        ({"coordinator": {}}, "[a-z_]+: must be given"),
    ],
)
def test_records_of_another_type_are_refused_before_any_rank_starts(tmp_path, change, line):
    saved(tmp_path, **change)
    with pytest.raises(JobError, match=rf"^--resume: \S+/checkpoints/1/run.json: {line}$"):
        checkpoint.resumed(tmp_path)


def test_a_wrong_attribute_of_the_paradigm_is_refused_before_any_rank_starts(tmp_path):
    path = saved(tmp_path)
    rewritten(path / "run.json", lambda part: part["state"]["coordinator"]["paradigm"].update(contributed=["x"]))
    with_new_manifest(path)
    line = r"^--resume: \S+/run.json: paradigm.contributed.\[0\]: must be int, got 'x'$"
    with pytest.raises(JobError, match=line):
        checkpoint.resumed(tmp_path)


@pytest.mark.parametrize("consistent", [False, True], ids=["", "with-its-digest"])
@pytest.mark.parametrize("archive", [False, True], ids=["plain", "zipped"])
@pytest.mark.parametrize("name", ["run.json", "worker-0.json", "worker-0.safetensors", MANIFEST])
def test_a_pickle_in_place_of_a_file_is_refused_and_runs_no_code(tmp_path, name, archive, consistent):
    path, touched = saved(tmp_path), tmp_path / "touched"
    (path / name).write_bytes(a_pickle(touched))
    if archive:  # as torch writes them
        with zipfile.ZipFile(path / name, "w") as file:
            file.writestr("archive/data.pkl", a_pickle(touched))
    if consistent and name == "worker-0.safetensors":
        part = json.loads((path / "worker-0.json").read_text())
        part["arrays"] = {"size": (path / name).stat().st_size, "sha256": sha256(path / name)}
        (path / "worker-0.json").write_text(json.dumps(part))
        with_new_manifest(path)
        assert checkpoint.resumed(tmp_path) is not None, "the launcher reads no arrays"
        with pytest.raises(StateError, match=r"^worker-0\.safetensors: no safetensors file: .*"):
            Checkpoints(tmp_path, 2, path, shared=True).state("worker-0")
    elif consistent and name != MANIFEST:
        rewritten(
            path / MANIFEST,
            lambda manifest: manifest["files"][name].update(
                size=(path / name).stat().st_size, sha256=sha256(path / name)
            ),
        )
        with pytest.raises((JobError, StateError), match="no JSON: "):
            checkpoint.resumed(tmp_path)
            Checkpoints(tmp_path, 2, path, shared=True).state("worker-0")
    else:
        with pytest.raises(JobError, match=rf"^--resume: \S+/{name}: "):
            checkpoint.resumed(tmp_path)
    assert not touched.exists()
    pickle.loads(a_pickle(touched))
    assert touched.exists(), "the pickle would have run code"


def sha256(path: Path) -> str:
    import hashlib

    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("name", ["../run.json", "/etc/hosts", "a/b"])
def test_a_manifest_cannot_name_files_elsewhere(tmp_path, name):
    path = saved(tmp_path)
    rewritten(path / MANIFEST, lambda manifest: manifest["files"].update({name: {"size": 1, "sha256": ""}}))
    with pytest.raises(JobError, match="must be the name of a file in this folder$"):
        checkpoint.resumed(tmp_path)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda part: part["state"].update(weights={"$array": "other"}), "array 'other': missing"),
        (lambda part: part["state"].update(weights={"$array": ["x"]}), r"array \['x'\]: missing"),
        (lambda part: part.update(more=1), "more: must be left out"),
        (lambda part: part.update(arrays=3), "arrays: must be Digest, got 3"),
        (lambda part: part.update(state=[]), r"state: must be dict\[.*\], got list"),
        (lambda part: [], "must be _Part, got list"),
    ],
)
def test_a_part_of_another_form_is_refused(tmp_path, change, line):
    path = saved(tmp_path)
    rewritten(path / "worker-0.json", change)
    with pytest.raises(StateError, match=f"^{line}$"):
        read_part(path, "worker-0")


def test_a_file_that_the_manifest_does_not_name_is_not_read(tmp_path):
    path = saved(tmp_path)
    write_part(path, "worker-7", {"weights": 1})
    assert Checkpoints(tmp_path, 2, path, shared=True).state("worker-7") is None
