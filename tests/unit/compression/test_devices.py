"""Arrays of another module than NumPy: only that module's functions and methods may touch them.

There is no GPU here. A module of the same functions stands for CuPy, whose arrays hide NumPy's and refuse to become
them, as CuPy's do.
"""

from __future__ import annotations

import operator
import sys
import types

import numpy as np
import pytest

from hpcsync.compression import CODECS, create
from tests.unit.compression.vectors import CUTS, LAYOUT, shard, vector

# Functions of CuPy in use; it has all of these.
HAS = (
    "abs arange asarray clip concatenate empty flatnonzero floor full maximum minimum packbits partition searchsorted "
    "sort sqrt take unpackbits where zeros zeros_like"
).split()


class DeviceArray:
    __array_ufunc__ = None

    def __init__(self, values):
        self.values = values

    def __array_function__(self, function, *_):
        raise TypeError(f"numpy.{function.__name__} is called on a device's array")

    def __array__(self, *args, **options):
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    def __getattr__(self, name):
        return wrapped(getattr(self.values, name))

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return wrapped(self.values[bare(index)])

    def __setitem__(self, index, value):
        self.values[bare(index)] = bare(value)

    def __int__(self):
        return int(self.values)

    def __float__(self):
        return float(self.values)

    def __invert__(self):
        return DeviceArray(~self.values)

    def __neg__(self):
        return DeviceArray(-self.values)


def defined(name):
    function = getattr(operator, name)

    def method(self, other):
        if name.startswith("i"):
            self.values = function(self.values, bare(other))
            return self
        return DeviceArray(function(self.values, bare(other)))

    def reflected(self, other):
        return DeviceArray(function(bare(other), self.values))

    return method, reflected


for name in "add sub mul truediv matmul lt le gt ge eq ne rshift lshift and_ or_".split():
    for prefix, method in zip(("", "r"), defined(name), strict=True):
        setattr(DeviceArray, f"__{prefix}{name.strip('_')}__", method)
for name in "iadd isub imul itruediv".split():
    setattr(DeviceArray, f"__{name}__", defined(name)[0])


def bare(value):
    """Return the array inside; NumPy's own arrays are refused."""
    if isinstance(value, DeviceArray):
        return value.values
    if isinstance(value, (list, tuple)):
        return type(value)(bare(one) for one in value)
    assert not isinstance(value, np.ndarray), "an array in host memory meets one on a device"
    return value


def wrapped(value):
    if isinstance(value, (np.ndarray, np.generic)):
        return DeviceArray(np.asarray(value))
    if isinstance(value, tuple) and any(isinstance(one, np.ndarray) for one in value):
        return tuple(wrapped(one) for one in value)
    if callable(value) and not isinstance(value, (type, np.dtype)):
        return lambda *args, **options: wrapped(
            value(*(bare(one) for one in args), **{key: bare(one) for key, one in options.items()})
        )
    return value


@pytest.fixture
def cupy(monkeypatch):
    functions = {name: wrapped(getattr(np, name)) for name in HAS}
    functions["asarray"] = lambda values: values if isinstance(values, DeviceArray) else DeviceArray(np.asarray(values))
    module = types.SimpleNamespace(
        **functions,
        linalg=types.SimpleNamespace(norm=wrapped(np.linalg.norm), qr=wrapped(np.linalg.qr)),
        random=types.SimpleNamespace(
            default_rng=lambda seed: types.SimpleNamespace(random=wrapped(np.random.default_rng(seed).random))
        ),
    )
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in CODECS),
        ("dgc", {"clip": 1.0, "nesterov": True}),
        ("dgc", {"ratio": 1.0}),
        ("top-k", {"ratio": 1.0}),
        ("random-k", {"error_feedback": True}),
        ("fp16", {"error_feedback": True}),
    ],
)
def test_the_bytes_and_their_decoding_are_those_of_numpy(name, options, cupy):
    host, device = (create(name, LAYOUT, np.float32, seed=2, **options) for _ in range(2))
    for step in range(2):
        on_host, on_device = host.encode(vector(step)), device.encode(DeviceArray(vector(step)))
        for begin, end in [(0, LAYOUT.size), CUTS[2][2:4], (50, 50)]:
            payload = on_device.payload(begin, end)
            assert isinstance(payload, DeviceArray)
            assert payload.values.tobytes() == on_host.payload(begin, end).tobytes()
            out = DeviceArray(np.full(end - begin, np.nan, np.float32))
            device.decode(payload, begin, end, out)
            assert out.values.tobytes() == shard(host, on_host.payload(begin, end), begin, end).tobytes()


def test_a_codec_that_calls_numpy_would_be_caught(cupy):
    with pytest.raises(TypeError, match="does not support ufuncs"):
        np.abs(DeviceArray(vector()))
    with pytest.raises(TypeError, match="numpy.concatenate is called"):
        np.concatenate([DeviceArray(vector())])
    with pytest.raises(AssertionError, match="meets one on a device"):
        DeviceArray(vector()) + vector()
