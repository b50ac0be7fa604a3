"""Compression of a job's contributions: torch's flat vectors as arrays of `hpcsync.compression`, in the same memory.

A worker's `Compressor` has state: the error feedback, or whatever else its codec keeps. Decoding needs no state, only
the job and the model.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hpcsync import compression
from hpcsync.compression import Codec, TensorLayout
from hpcsync.compression.sparse import Sparse
from hpcsync.config.compression import DenseOptions
from hpcsync.config.job import Job
from hpcsync.state import Stateful

_quiet = np.errstate(over="ignore", invalid="ignore")  # that a run has diverged is said where its losses are looked at


class Compressor(Stateful):
    """The encoder of one worker, with the state of its codec."""

    state_types = {"codec": Codec}

    def __init__(self, codec: Codec) -> None:
        self.codec = codec

    @_quiet
    def encode(self, vector: torch.Tensor, shards: Sequence[slice], ratio: float = math.nan) -> list[torch.Tensor]:
        """Compress a flat vector.

        Parameters
        ----------
        vector
            Shape (size,).
        shards
            Slices of the vector, one per server.
        ratio
            Share of the elements to send; NaN for that of the codec (see `hpcsync.compression.Codec.encode`).

        Returns
        -------
        list of torch.Tensor
            Payload of each shard as bytes, padded to whole elements of the vector's type.
        """
        encoded = self.codec.encode(as_array(vector), ratio)
        return [_filled(as_tensor(encoded.payload(s.start, s.stop)), vector.itemsize) for s in shards]


class Compression:
    """The compression of a job as far as it is the same on all ranks.

    Parameters
    ----------
    job
        A job that compresses.
    shapes
        Shapes of the model's trainable parameters, in the order of the flat vector.
    dtype
        Type of the flat vector.

    Attributes
    ----------
    dtype
        Type of the flat vector.
    whole
        The slice of the whole flat vector.
    averages
        True if the codec averages its factors over all workers (PowerSGD) instead of decoded vectors.
    """

    def __init__(self, job: Job, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> None:
        assert not isinstance(job.compression, DenseOptions)
        self._name, self._options = job.compression.name, job.compression.options
        self._layout, self.dtype = TensorLayout(shapes), dtype
        self._seed = job.seed
        self._decoder = self._create(seed=0)
        self.whole = slice(0, self._layout.size)
        self.averages = self._decoder.averages

    def attributes(self) -> dict[str, str | int]:
        """Return root attributes of a trace, from which the bytes of sparse contributions can be recounted.

        `tensors` has a row [elements, sent whole, number] for each kind of tensor, as JSON; `element_bytes` is the size
        of an element. Codecs that are not sparse have none: their payloads have equal sizes.
        """
        if not issubclass(compression.CODECS[self._name], Sparse):
            return {}
        kinds = Counter((size, self._layout.is_small(i)) for i, size in enumerate(self._layout.sizes))
        rows = [[size, small, number] for (size, small), number in kinds.items()]
        return {"tensors": json.dumps(rows), "element_bytes": self.dtype.itemsize}

    def compressor(self, worker: int) -> Compressor:
        """Return a new worker's encoder; its random draws differ from those of other workers."""
        seed = int(np.random.SeedSequence([self._seed, 4, worker]).generate_state(1)[0])
        return Compressor(self._create(seed=seed))

    def averager(self) -> Codec:
        """Return a new worker's codec if it `averages`; all workers draw the same."""
        return self.compressor(0).codec

    def slot_size(self, shard: slice) -> int:
        """Return the number of elements that hold any payload of the shard."""
        return -(-self._decoder.capacity(shard.start, shard.stop) // self.dtype.itemsize)

    def nominal_bytes(self, shard: slice, ratio: float = math.nan) -> int:
        """Return the usual size of the shard's payload in bytes."""
        n_bytes = self._decoder.nominal_bytes(shard.start, shard.stop, ratio)
        return n_bytes + -n_bytes % self.dtype.itemsize

    @_quiet
    def decode(self, payload: torch.Tensor, into: torch.Tensor, shard: slice) -> None:
        """Decode a payload into a shard, shape (stop - start,). Bytes after the payload are ignored."""
        self._decoder.decode(as_array(payload), shard.start, shard.stop, as_array(into))
        written(into)

    def decode_mean(self, payloads: Sequence[torch.Tensor], into: torch.Tensor) -> None:
        """Decode payloads of whole vectors and write their mean into `into`, summed in this order."""
        self.decode(payloads[0], into, self.whole)
        if len(payloads) == 1:
            return
        one = torch.empty_like(into)
        for payload in payloads[1:]:
            self.decode(payload, one, self.whole)
            into.add_(one)
        into.div_(len(payloads))

    def _create(self, seed: int) -> Codec:
        return compression.create(self._name, self._layout, _numpy_dtype(self.dtype), seed=seed, **self._options)


def of_job(job: Job, parameters: Sequence[torch.nn.Parameter], dtype: torch.dtype | None = None) -> Compression | None:
    """Return the compression for a flat model with these parameters; None if the job does not compress.

    `dtype` is the type of the flat vector, by default that of the parameters.
    """
    if not job.compresses:
        return None
    return Compression(job, [tuple(p.shape) for p in parameters], dtype or parameters[0].dtype)


def as_array(tensor: torch.Tensor) -> Any:
    """Return a tensor's memory as a NumPy array, or as a CuPy array on a GPU, which becomes this thread's current one.

    CuPy computes on the current GPU, wherever its arrays are, and on the default stream, which then waits for torch's.
    """
    if not tensor.is_cuda:
        return tensor.numpy()
    import cupy

    cupy.cuda.Device(tensor.device.index).use()
    return cupy.from_dlpack(tensor)


def as_tensor(array: Any) -> torch.Tensor:
    """Return an array's memory as a tensor, the inverse of `as_array`."""
    return torch.from_numpy(array) if isinstance(array, np.ndarray) else torch.from_dlpack(array)


def written(tensor: torch.Tensor) -> None:
    """Let torch's stream wait for CuPy's, after CuPy has written to the memory of a tensor."""
    if tensor.is_cuda:
        here, default = (stream(tensor.device) for stream in (torch.cuda.current_stream, torch.cuda.default_stream))
        if here != default:  # a script may compute on a stream of its own
            here.wait_stream(default)


def _filled(octets: torch.Tensor, itemsize: int) -> torch.Tensor:
    """Pad and align bytes to whole elements, as MPI requires of a buffer of elements."""
    missing = -len(octets) % itemsize
    if missing == 0 and octets.data_ptr() % itemsize == 0:
        return octets
    filled = octets.new_zeros(len(octets) + missing)
    filled[: len(octets)] = octets
    return filled


def _numpy_dtype(dtype: torch.dtype) -> np.dtype:
    return torch.empty(0, dtype=dtype).numpy().dtype
