"""How a job's contributions are compressed: torch's flat vectors as `compression`'s arrays, in the same memory.

A worker's `Compressor` remembers what it has not sent yet, or whatever else its codec keeps; whoever decodes needs to
know the job and the model alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hpcsync import compression
from hpcsync.compression import Codec, TensorLayout
from hpcsync.config.compression import DenseOptions
from hpcsync.config.job import Job


class Compressor:
    """One worker's."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec

    def encode(self, vector: torch.Tensor, shards: Sequence[slice], ratio: float = math.nan) -> list[torch.Tensor]:
        """Of a flat vector, shape (size,), what the holder of each shard is to be given: bytes, as many as whole
        elements of the vector take. ratio: see `compression.CodecOptions.encode`."""
        encoded = self.codec.encode(as_array(vector), ratio)
        return [_filled(as_tensor(encoded.payload(s.start, s.stop)), vector.itemsize) for s in shards]


class Compression:
    """All that is alike on all ranks. shapes: of the model's tensors, in the order in which they lie in the flat
    vector, which is of type `dtype`.

    whole: the flat vector. averages: see `CodecOptions`.
    """

    def __init__(self, job: Job, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> None:
        assert not isinstance(job.compression, DenseOptions)
        self._name, self._options = job.compression.name, job.compression.options
        self._layout, self._dtype = TensorLayout(shapes), dtype
        self._seed = job.seed
        self._decoder = self._create(seed=0)
        self.whole = slice(0, self._layout.size)
        self.averages = self._decoder.averages

    def compressor(self, worker: int) -> Compressor:
        """Of a worker that begins; what it draws differs from what others draw."""
        seed = int(np.random.SeedSequence([self._seed, 4, worker]).generate_state(1)[0])
        return Compressor(self._create(seed=seed))

    def averager(self) -> Codec:
        """Of a worker that begins, where its codec `averages`: all draw the same."""
        return self.compressor(0).codec

    def slot_size(self, shard: slice) -> int:
        """Elements that have room for any payload of the shard."""
        return -(-self._decoder.capacity(shard.start, shard.stop) // self._dtype.itemsize)

    def nominal_bytes(self, shard: slice, ratio: float = math.nan) -> int:
        """What its payload takes as a rule."""
        n_bytes = self._decoder.nominal_bytes(shard.start, shard.stop, ratio)
        return n_bytes + -n_bytes % self._dtype.itemsize

    def decode(self, payload: torch.Tensor, into: torch.Tensor, shard: slice) -> None:
        """Fill a shard, shape (stop - start,), with what these bytes say; there may be anything behind them."""
        self._decoder.decode(as_array(payload), shard.start, shard.stop, as_array(into))

    def decode_mean(self, payloads: Sequence[torch.Tensor], into: torch.Tensor) -> None:
        """Fill `into` with the mean of what these payloads of whole vectors say, added up in this order."""
        self.decode(payloads[0], into, self.whole)
        if len(payloads) == 1:
            return
        one = torch.empty_like(into)
        for payload in payloads[1:]:
            self.decode(payload, one, self.whole)
            into.add_(one)
        into.div_(len(payloads))

    def _create(self, seed: int) -> Codec:
        return compression.create(self._name, self._layout, _numpy_dtype(self._dtype), seed=seed, **self._options)


def of_job(job: Job, parameters: Sequence[torch.nn.Parameter]) -> Compression | None:
    """Of a model with these trainable parameters. None where contributions are sent as they are."""
    if not job.compresses:
        return None
    return Compression(job, [tuple(p.shape) for p in parameters], parameters[0].dtype)


def as_array(tensor: torch.Tensor) -> Any:
    """The same memory as an array of NumPy, or of CuPy where it is a GPU's; both work on its default stream."""
    if not tensor.is_cuda:
        return tensor.numpy()
    import cupy

    return cupy.from_dlpack(tensor)


def as_tensor(array: Any) -> torch.Tensor:
    return torch.from_numpy(array) if isinstance(array, np.ndarray) else torch.from_dlpack(array)


def _filled(octets: torch.Tensor, itemsize: int) -> torch.Tensor:
    """Bytes, as many and lying as whole elements do: MPI takes no others for elements."""
    missing = -len(octets) % itemsize
    if missing == 0 and octets.data_ptr() % itemsize == 0:
        return octets
    filled = octets.new_zeros(len(octets) + missing)
    filled[: len(octets)] = octets
    return filled


def _numpy_dtype(dtype: torch.dtype) -> np.dtype:
    return torch.empty(0, dtype=dtype).numpy().dtype
