"""CIFAR's archives, made here as they are published: pickles of Python 2, in a folder or in a .tar.gz."""

import io
import os
import pickle
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpcsync.config import job as jobs
from hpcsync.workloads import cifar
from hpcsync.workloads.registry import build
from tests.unit.jobs import make_job, refusal

N = 20  # images in a file


class Python2Pickler(pickle._Pickler):
    """A pickler whose strings and booleans are those of Python 2."""

    dispatch = dict(pickle._Pickler.dispatch)

    def save_string(self, value: bytes) -> None:
        self.write(pickle.BINSTRING + len(value).to_bytes(4, "little") + value)

    dispatch[bytes] = save_string
    dispatch[str] = lambda self, value: self.save_string(value.encode())
    dispatch[bool] = lambda self, value: self.save_long(int(value))


def pickled(value: Any) -> bytes:
    file = io.BytesIO()
    Python2Pickler(file, protocol=2).dump(value)
    return file.getvalue().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")


def batch(name: str, index: int) -> dict[bytes, Any]:
    generator = np.random.default_rng([cifar.ARCHIVES[name].classes, index])
    found = {
        b"data": generator.integers(0, 256, (N, 3072)).astype(np.uint8),
        b"filenames": [f"image_{i}.png" for i in range(N)],
        b"batch_label": f"batch {index}",
        cifar.ARCHIVES[name].labels: generator.integers(0, cifar.ARCHIVES[name].classes, N).tolist(),
    }
    if name == "cifar100":
        found[b"coarse_labels"] = generator.integers(0, 20, N).tolist()
    return found


def files(name: str) -> dict[str, Any]:
    archive = cifar.ARCHIVES[name]
    return {file: batch(name, i) for i, file in enumerate((*archive.training, archive.test))}


def make_folder(folder: Path, name: str, **others: Any) -> Path:
    unpacked = folder / cifar.ARCHIVES[name].folder
    unpacked.mkdir(parents=True)
    for file, content in {**files(name), **others}.items():
        if content is not None:
            (unpacked / file).write_bytes(content if isinstance(content, bytes) else pickled(content))
    return folder


def make_tar(folder: Path, name: str, **others: Any) -> Path:
    """Write an archive as published: folder, other files, batches not in numerical order."""
    archive = cifar.ARCHIVES[name]
    make_folder(folder, name, **others)
    with tarfile.open(folder / archive.file, "w:gz", compresslevel=1) as tar:
        tar.add(folder / archive.folder, archive.folder, recursive=False)
        for path in sorted((folder / archive.folder).iterdir(), reverse=True):
            tar.add(path, f"{archive.folder}/{path.name}")
    shutil.rmtree(folder / archive.folder)
    return folder


@pytest.mark.parametrize("make", [make_folder, make_tar])
@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_images_and_classes_are_those_of_the_archive(tmp_path, name, make):
    (x, y), (x_test, y_test) = cifar.read(name, make(tmp_path, name))
    *training, test = files(name).values()
    labels = cifar.ARCHIVES[name].labels
    assert len(training) == {"cifar10": 5, "cifar100": 1}[name]
    assert x.shape == (N * len(training), 3, 32, 32)
    assert x.dtype == torch.uint8
    assert x.flatten(1).numpy().tobytes() == b"".join(part[b"data"].tobytes() for part in training)
    assert y.dtype == torch.int64
    assert y.tolist() == [label for part in training for label in part[labels]]
    assert x_test.flatten(1).numpy().tobytes() == test[b"data"].tobytes()
    assert y_test.tolist() == test[labels]


def test_pixels_are_red_green_and_blue_planes_row_after_row(tmp_path):
    data = np.zeros((N, 3072), dtype=np.uint8)
    data[3, 1024 + 32 * 5 + 7] = 9  # green, row 5, column 7
    (x, _), _ = cifar.read(
        "cifar10", make_folder(tmp_path, "cifar10", data_batch_2={**batch("cifar10", 1), b"data": data})
    )
    assert x[N + 3, 1, 5, 7] == 9
    assert x[N : 2 * N].sum() == 9


@pytest.mark.parametrize("protocol", [3, 4])
def test_pickles_of_today_s_python_are_read_too(tmp_path, protocol):
    again = {file: pickle.dumps(content, protocol) for file, content in files("cifar100").items()}
    (x, _), _ = cifar.read("cifar100", make_folder(tmp_path, "cifar100", **again))
    assert torch.equal(x.flatten(1), torch.from_numpy(batch("cifar100", 0)[b"data"]))


# ---- mistakes are reported in one line ----


def message(name: str, folder: Path) -> str:
    return refusal(cifar.read, name, folder).removeprefix(f'workload.folder = "{folder}": ')


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_a_missing_archive_is_reported(tmp_path, name):
    archive = cifar.ARCHIVES[name]
    for folder in (tmp_path, tmp_path / "none"):
        assert message(name, folder) == (
            f"must hold {archive.folder}/ or {archive.file}, the Python version of the data set from "
            "https://www.cs.toronto.edu/~kriz/cifar.html, which hpcsync does not download"
        )


AGAIN = "; download cifar-10-python.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html again"


@pytest.mark.parametrize("make", [make_folder, make_tar])
def test_a_file_that_is_missing_is_named(tmp_path, make):
    folder = make(tmp_path, "cifar10", data_batch_3=None)
    assert message("cifar10", folder) == f"cifar-10-batches-py/data_batch_3 is missing{AGAIN}"


def without(batch: dict[bytes, Any], key: bytes) -> dict[bytes, Any]:
    return {k: value for k, value in batch.items() if k != key}


SOME = batch("cifar10", 5)
LABELS = SOME[b"labels"]
WRONG = {
    "no pickle": (b"<html>not found</html>", ""),
    "cut off": (pickled(SOME)[:1000], "pickle data was truncated"),
    "empty": (b"", "Ran out of input"),
    "no dict": ([1, 2], "list indices must be integers"),
    "no images": (without(SOME, b"data"), "b'data'"),
    "of cifar100": (batch("cifar100", 0), "b'labels'"),
    "narrow": (
        {**SOME, b"data": SOME[b"data"][:, 1:]},
        "images must be rows of 3072 bytes, not uint8 of shape (20, 3071)",
    ),
    "flat": ({**SOME, b"data": SOME[b"data"][0]}, "images must be rows of 3072 bytes, not uint8 of shape (3072,)"),
    "floats": (
        {**SOME, b"data": SOME[b"data"] / 2},
        "images must be rows of 3072 bytes, not float64 of shape (20, 3072)",
    ),
    "few labels": ({**SOME, b"labels": LABELS[1:]}, "20 images must have as many labels, not int64 of shape (19,)"),
    "words": ({**SOME, b"labels": ["a"] * N}, "20 images must have as many labels, not |S1 of shape (20,)"),
    "too large": ({**SOME, b"labels": [10, *LABELS[1:]]}, "labels must be 0 to 9, not "),
    "negative": ({**SOME, b"labels": [-1, *LABELS[1:]]}, "labels must be 0 to 9, not -1 to "),
}


@pytest.mark.parametrize("why", WRONG)
def test_a_file_that_is_another_is_named_with_the_reason(tmp_path, why):
    content, reason = WRONG[why]
    found = message("cifar10", make_folder(tmp_path, "cifar10", test_batch=content))
    assert found.startswith(f"cifar-10-batches-py/test_batch is not a file of this data set: {reason}")
    assert found.endswith(AGAIN)


def test_an_archive_that_is_cut_off_is_told(tmp_path):
    file = make_tar(tmp_path, "cifar10") / "cifar-10-python.tar.gz"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    assert "cifar-10" in message("cifar10", tmp_path)
    file.write_bytes(b"<html>not found</html>")
    assert message("cifar10", tmp_path).startswith("cifar-10-python.tar.gz cannot be read: ")


class Call:
    """A pickle that calls a function when it is read."""

    def __init__(self, function, *arguments):
        self._call = (function, arguments)

    def __reduce__(self):
        return self._call


@pytest.mark.parametrize("make", [make_folder, make_tar])
@pytest.mark.parametrize(
    ("function", "argument"), [(os.system, "touch {}"), (eval, "open('{}', 'w').close()"), (os.mkdir, "{}")]
)
def test_a_pickle_that_would_run_code_is_refused(tmp_path, function, argument, make):
    mark = tmp_path / "mark"
    hostile = pickle.dumps(Call(function, argument.format(mark)), protocol=2)
    folder = make(tmp_path / "data", "cifar10", data_batch_1=hostile)
    found = message("cifar10", folder)
    assert found.startswith("cifar-10-batches-py/data_batch_1 is not a file of this data set: it refers to ")
    assert not mark.exists()
    pickle.loads(hostile)  # which would have been
    assert mark.exists()


def test_a_file_outside_the_archive_is_not_read(tmp_path):
    folder = make_tar(tmp_path / "data", "cifar10", test_batch=None)
    (tmp_path / "elsewhere").write_bytes(pickled(SOME))
    archive = cifar.ARCHIVES["cifar10"]
    with tarfile.open(folder / archive.file) as tar, tarfile.open(folder / "new", "w:gz") as new:
        for member in tar:
            new.addfile(member, tar.extractfile(member) if member.isfile() else None)
        link = tarfile.TarInfo(f"{archive.folder}/test_batch")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path / "elsewhere")
        new.addfile(link)
    (folder / "new").rename(folder / archive.file)
    assert message("cifar10", folder) == f"cifar-10-batches-py/test_batch is missing{AGAIN}"


# ---- the workload ----


@pytest.mark.parametrize(("name", "classes"), [("cifar10", 10), ("cifar100", 100)])
def test_a_job_trains_on_it(tmp_path, name, classes):
    make_folder(tmp_path, name)
    settings = {"name": name, "folder": str(tmp_path), "width": 2, "hidden": 8}
    workload = build(make_job(workload=settings))
    x, y = workload.train.tensors
    model = workload.model
    assert workload.loss(model, x, y).item() == pytest.approx(np.log(classes), rel=0.2)
    assert model(x).shape == (len(x), classes)
    standardised = model.features[0](x)
    assert standardised.mean((0, 2, 3)).numpy() == pytest.approx(np.zeros(3), abs=1e-5)
    assert standardised.std((0, 2, 3)).numpy() == pytest.approx(np.ones(3), abs=1e-3)
    loss, accuracy = workload.evaluate(model)
    assert loss == pytest.approx(np.log(classes), rel=0.2)
    assert accuracy in np.arange(N + 1) / N


def test_the_folder_is_beside_the_job_file(tmp_path):
    text = make_job(workload={"name": "cifar10"}).to_toml()
    assert 'folder = "data"' in text
    (tmp_path / "job.toml").write_text(text)
    job = jobs.load(tmp_path / "job.toml")
    assert job.workload.folder == str(tmp_path / "data")
    make_folder(tmp_path / "data", "cifar10")
    assert len(build(job).train) == 5 * N
    assert jobs.load(tmp_path / "job.toml", ["workload.folder=/there"]).workload.folder == "/there"
