"""Files of a checkpoint: a part is a JSON file, and a safetensors file of its arrays; a manifest names all files.

The manifest holds the number of the format and size and SHA-256 of every file, so that a foreign, truncated or altered
checkpoint is refused before anything is restored. Neither format can hold code.

In the JSON an array is `{"$array": NAME}`, where NAME is its name in the safetensors file; floats that JSON does not
have are strings. The types are declared where a state is restored (`hpcsync.state`).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcsync.config.errors import JobError
from hpcsync.state import NOT_FINITE, StateError, built, plain
from hpcsync.system.atomic_files import naming, permitted, removing, sync
from hpcsync.version import __version__

if TYPE_CHECKING:
    import torch

FORMAT = "hpcsync checkpoint"
FORMAT_VERSION = 8  # raise it with every change of what a checkpoint holds: tests/unit/run_dir/checkpoint_format.txt
# Fields that version 3 lacks have their defaults (`later_fields` of their records); 3 and 4 hold all workers' slots.
# Up to 5 they hold the numbers of a script's optimizers, and not the step that it was to make.
# Up to 6 they hold the sum of the batches that a worker has used, and not those and the epochs of each of its loaders;
# and nothing that the steps of a script's optimizers have changed in their groups.
# Up to 7 they hold the initial weights under local SGD, too, which has no use for them.
READABLE_VERSIONS = (3, 4, 5, 6, 7, 8)

MANIFEST = "manifest.json"
ARRAY = "$array"


class Digest(NamedTuple):
    """Size in bytes and SHA-256 of a file."""

    size: int
    sha256: str


class Manifest(NamedTuple):
    """What a checkpoint consists of."""

    format: str
    version: int
    hpcsync: str
    files: dict[str, Digest]


class _Part(NamedTuple):
    state: dict[str, Any]
    arrays: Digest | None


def write_part(folder: Path, name: str, state: Mapping[str, Any]) -> None:
    """Write a part into a folder; on return it has reached the disk. Raises NotWritten if it cannot be written."""
    arrays: dict[str, Any] = {}
    document = _as_json(state, "", arrays)
    digest = _write_arrays(folder / f"{name}.safetensors", arrays) if arrays else None
    _write_json(folder / f"{name}.json", plain(_Part(document, digest)))


def write_manifest(folder: Path) -> None:
    """Write the manifest of the parts in this folder."""
    files: dict[str, Digest] = {}
    for path in sorted(folder.glob("*.json")):
        with naming(path):
            files[path.name] = _digest(path)
            part = _read_part(path)
        if part.arrays is not None:  # its writer has read the file; it may be large
            files[f"{path.stem}.safetensors"] = part.arrays
    _write_json(folder / MANIFEST, plain(Manifest(FORMAT, FORMAT_VERSION, __version__, files)))


def verified(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint of which all files are as they were written.

    Raises
    ------
    JobError
        If the checkpoint is of another format, or a file is missing, truncated or altered.
    """
    manifest = read_manifest(folder)
    for name, digest in manifest.files.items():
        if (wrong := _difference(folder, name, digest)) is not None:
            raise JobError(f"--resume: {folder / name}: {wrong}")
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint. Raises JobError if it is of another format."""
    path = folder / MANIFEST
    if not path.exists():
        raise JobError(f"--resume: {path}: missing, so this is no checkpoint of format version {FORMAT_VERSION}")
    try:
        content = _read_json(path)
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise StateError(f'must have the format "{FORMAT}"')
        if content.get("version") not in READABLE_VERSIONS:
            readable = ", ".join(map(str, READABLE_VERSIONS))
            raise StateError(f"version {content.get('version')} of the format; this hpcsync reads {readable}")
        manifest: Manifest = built(Manifest, content)
    except StateError as error:
        raise JobError(f"--resume: {path}: {error}") from None
    return manifest


def read_part(folder: Path, name: str) -> dict[str, Any]:
    """Return a part's state, its arrays on the CPU. Raises StateError if a file is not of its format."""
    part = _read_part(folder / f"{name}.json")
    arrays: dict[str, Any] = {}
    if part.arrays is not None:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = folder / f"{name}.safetensors"
        try:  # copies: the file may be deleted while the run continues
            arrays = {key: tensor.clone() for key, tensor in load_file(path).items()}
        except (SafetensorError, OSError) as error:
            raise StateError(f"{path.name}: no safetensors file: {error}") from None
    state: dict[str, Any] = _with_arrays(part.state, arrays)
    return state


def _as_json(value: Any, name: str, arrays: dict[str, Any]) -> Any:
    """Return plain values as JSON has them; arrays are put into `arrays` by name."""
    if isinstance(value, Mapping):
        return {str(key): _as_json(each, f"{name}/{key}" if name else str(key), arrays) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(each, f"{name}/{i}", arrays) for i, each in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        return next(text for text, each in NOT_FINITE.items() if each == value or (each != each and value != value))
    if hasattr(value, "dtype"):
        arrays[name] = value
        return {ARRAY: name}
    return value


def _with_arrays(value: Any, arrays: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        return [_with_arrays(each, arrays) for each in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {ARRAY}:
        if not isinstance(value[ARRAY], str) or value[ARRAY] not in arrays:
            raise StateError(f"array {value[ARRAY]!r:.60}: missing")
        return arrays[value[ARRAY]]
    return {key: _with_arrays(each, arrays) for key, each in value.items()}


def _write_arrays(path: Path, arrays: Mapping[str, Any]) -> Digest:
    from safetensors.torch import save_file

    from hpcsync.training.compressor import as_tensor

    tensors = apart({name: array if hasattr(array, "is_cuda") else as_tensor(array) for name, array in arrays.items()})
    with naming(path), removing(path):
        with permitted(path):
            save_file(tensors, path)
        sync(path)
        return _digest(path)


def apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors as safetensors takes them: on the CPU, contiguous, and none overlapping another in memory."""
    found = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    end = 0
    for name, tensor in sorted(found.items(), key=lambda item: item[1].data_ptr()):
        if (begin := tensor.data_ptr()) < end:
            found[name] = tensor.clone()
        end = max(end, begin + tensor.nbytes)
    return found


def _write_json(path: Path, content: Any) -> None:
    with naming(path), removing(path), path.open("x", encoding="utf-8") as file:
        file.write(json.dumps(content, allow_nan=False))  # json.dump encodes in Python, ten times as slow
        file.flush()
        os.fsync(file.fileno())


def _read_part(path: Path) -> _Part:
    part: _Part = built(_Part, _read_json(path))
    return part


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise StateError(f"no JSON: {error}") from None


def _difference(folder: Path, name: str, digest: Digest) -> str | None:
    """Return what is wrong with a file; None if it is as the manifest says."""
    path = folder / name
    if Path(name).name != name:
        return "must be the name of a file in this folder"
    if not path.is_file():
        return "missing"
    if (size := path.stat().st_size) != digest.size:
        return f"must have {digest.size} bytes, as the manifest says; it has {size}"
    return None if _digest(path) == digest else "altered: its SHA-256 is not the one in the manifest"


def _digest(path: Path) -> Digest:
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return Digest(file.tell(), sha256)
