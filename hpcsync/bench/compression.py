"""Speed of codecs beside a copy of the vector, and the link bandwidth below which they pay; on a GPU beside the CPU."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from hpcsync.bench.figures import Figure, in_turn
from hpcsync.compression import CODECS, Codec, TensorLayout, create

SIZES = (1_000_000, 25_000_000)


def measure(device: str = "cpu", sizes: Sequence[int] = SIZES, repetitions: int = 5) -> list[Figure]:
    """Measure every codec with its default options, with one thread as on a rank.

    Parameters
    ----------
    device
        "cpu" or "cuda", where a codec is measured beside itself on the CPU.
    sizes
        Numbers of elements.
    repetitions
        Number of repetitions.
    """
    measured = _measure if device == "cpu" else _beside_the_cpu
    with threadpool_limits(1):
        return [figure for n in sizes for name in CODECS for figure in measured(name, n, repetitions)]


def layout(n: int) -> TensorLayout:
    """Return a layout of `n` elements: three large matrices and a bias."""
    width = math.isqrt((n - 1) // 4)
    return TensorLayout([(width, 2 * width), (width, width), (width, width), (n - 4 * width * width,)])


def _measure(name: str, n: int, repetitions: int) -> list[Figure]:
    codec = create(name, layout(n), np.float32)
    vector = np.random.default_rng(1).standard_normal(n).astype(np.float32)
    payload, copied = _payload(codec, vector), vector.copy()
    encode_s, decode_s, copy_s = in_turn(
        repetitions,
        lambda: _seconds(_payload, codec, vector),
        lambda: _seconds(codec.decode, payload, 0, n, copied),
        lambda: _seconds(np.copyto, copied, vector),
    )
    what, limit, limits = f"{name}, {n / 1e6:g} M elements", "a copy of the vector", _rates(vector.nbytes, copy_s)
    saved = vector.nbytes - len(payload)
    pays = [8e-9 * saved / (encode + decode) for encode, decode in zip(encode_s, decode_s, strict=True)]
    return [
        Figure(f"{what}: encode", "GB/s", _rates(vector.nbytes, encode_s), limit, limits),
        Figure(f"{what}: decode", "GB/s", _rates(vector.nbytes, decode_s), limit, limits),
        Figure(f"{what}: bytes sent", "%", [100.0 * len(payload) / vector.nbytes]),
        Figure(f"{what}: pays on a link below", "Gbit/s", pays),
    ]


def _beside_the_cpu(name: str, n: int, repetitions: int) -> list[Figure]:
    import cupy

    normal = np.random.default_rng(1).standard_normal(n).astype(np.float32)
    calls: list[Callable[[], float]] = []
    for vector in (cupy.asarray(normal), normal):
        codec, decoded = create(name, layout(n), np.float32), vector.copy()
        payload = _payload(codec, vector)
        calls.append(partial(_seconds, _complete(_payload), codec, vector))
        calls.append(partial(_seconds, _complete(codec.decode), payload, 0, n, decoded))
    seconds = in_turn(repetitions, *calls)
    encode, decode, encode_on_cpu, decode_on_cpu = (_rates(normal.nbytes, took_s) for took_s in seconds)
    what = f"{name}, {n / 1e6:g} M elements"
    return [
        Figure(f"{what}: encode", "GB/s", encode, "on the CPU, one thread", encode_on_cpu),
        Figure(f"{what}: decode", "GB/s", decode, "on the CPU, one thread", decode_on_cpu),
    ]


def _complete(call: Callable[..., Any]) -> Callable[..., None]:
    """Return the call followed by waiting for the GPU."""
    import cupy

    def complete(*arguments: Any) -> None:
        call(*arguments)
        cupy.cuda.get_current_stream().synchronize()

    return complete


def _payload(codec: Codec, vector: Any) -> Any:
    return codec.encode(vector).payload(0, len(vector))


def _seconds(call: Callable[..., Any], *arguments: Any) -> float:
    begin_s = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - begin_s


def _rates(n_bytes: int, seconds: Sequence[float]) -> list[float]:
    """Return the rates in GB/s."""
    return [1e-9 * n_bytes / took_s for took_s in seconds]
