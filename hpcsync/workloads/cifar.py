"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009) from their author's archives for Python.

The archives are not downloaded, and no code in them is run: they hold pickles, of which only arrays, numbers and
strings are read.
"""

from __future__ import annotations

import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch

from hpcsync.config.errors import JobError, shown

PIXELS = 3 * 32 * 32
PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"


class Archive(NamedTuple):
    """Layout of an archive.

    Parameters
    ----------
    file
        Name of the archive.
    folder
        Folder in the archive.
    training, test
        Files of the training and test images.
    labels
        Key of the images' classes in each file.
    classes
        Number of classes.
    """

    file: str
    folder: str
    training: tuple[str, ...]
    test: str
    labels: bytes
    classes: int


ARCHIVES = {
    "cifar10": Archive(
        "cifar-10-python.tar.gz",
        "cifar-10-batches-py",
        tuple(f"data_batch_{i}" for i in range(1, 6)),
        "test_batch",
        b"labels",
        10,
    ),
    "cifar100": Archive("cifar-100-python.tar.gz", "cifar-100-python", ("train",), "test", b"fine_labels", 100),
}

Samples = tuple[torch.Tensor, torch.Tensor]


def read(name: str, folder: Path) -> tuple[Samples, Samples]:
    """Read the training and test images of a data set.

    Parameters
    ----------
    name
        A key of `ARCHIVES`.
    folder
        Folder that holds the archive, unpacked or as it was downloaded.

    Returns
    -------
    training, test : tuple of torch.Tensor
        (x, y) each: images x, uint8, shape (n, 3, 32, 32), and classes y, int64, shape (n,).

    Raises
    ------
    JobError
        If the archive is missing or damaged.
    """
    archive = ARCHIVES[name]
    where = f"workload.folder = {shown(str(folder))}"
    names = (*archive.training, archive.test)
    try:
        if (folder / archive.folder).is_dir():
            parts = _read_all(archive, names, lambda file: (folder / archive.folder / file).open("rb"))
        elif (folder / archive.file).is_file():
            with tarfile.open(folder / archive.file) as tar:
                parts = _read_all(archive, names, lambda file: _member(tar, f"{archive.folder}/{file}"))
        else:
            raise JobError(
                f"{where}: must hold {archive.folder}/ or {archive.file}, the Python version of the data set from "
                f"{PAGE}, which hpcsync does not download"
            )
    except ValueError as error:
        raise JobError(f"{where}: {error}; download {archive.file} from {PAGE} again") from None
    except (tarfile.TarError, EOFError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise JobError(f"{where}: {archive.file} cannot be read: {reason}") from None
    x, y = (torch.cat(tensors) for tensors in zip(*parts[:-1], strict=True))
    return (x, y), parts[-1]


def _member(tar: tarfile.TarFile, name: str) -> IO[bytes]:
    try:
        file = tar.extractfile(name)
    except KeyError:
        file = None
    if file is None:
        raise FileNotFoundError(name)
    return file


def _read_all(archive: Archive, names: tuple[str, ...], opened: Callable[[str], IO[bytes]]) -> list[Samples]:
    parts = []
    for name in names:
        path = f"{archive.folder}/{name}"
        try:
            with opened(name) as file:
                parts.append(_samples(_Plain(file, encoding="bytes").load(), archive))
        except FileNotFoundError:
            raise ValueError(f"{path} is missing") from None
        except Exception as error:  # reading an invalid pickle can raise anything
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise ValueError(f"{path} is not a file of this data set: {reason}") from None
    return parts


def _samples(batch: Any, archive: Archive) -> Samples:
    data, labels = np.asarray(batch[b"data"]), np.asarray(batch[archive.labels])
    if data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != PIXELS:
        raise ValueError(f"images must be rows of {PIXELS} bytes, not {data.dtype} of shape {data.shape}")
    if labels.shape != data.shape[:1] or labels.dtype.kind not in "iu":
        raise ValueError(f"{len(data)} images must have as many labels, not {labels.dtype} of shape {labels.shape}")
    if len(labels) and not 0 <= labels.min() <= labels.max() < archive.classes:
        raise ValueError(f"labels must be 0 to {archive.classes - 1}, not {labels.min()} to {labels.max()}")
    return torch.from_numpy(data.reshape(-1, 3, 32, 32)), torch.from_numpy(labels.astype(np.int64))


class _Plain(pickle.Unpickler):
    """Reads NumPy arrays and pickle's own types, and refuses all other names, which could run code."""

    _ARRAYS = {  # names by which arrays are pickled, in Python 2 and later
        ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
        ("numpy._core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
    }

    def find_class(self, module: str, name: str) -> Any:
        """Return a permitted class or function."""
        if (module, name) not in self._ARRAYS:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}; only arrays are allowed")
        return self._ARRAYS[module, name]
