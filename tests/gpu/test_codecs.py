"""Codecs of vectors in a GPU's memory: CuPy's kernels in NumPy's place."""

from __future__ import annotations

import numpy as np
import pytest

from hpcsync.compression import CODECS, create
from tests.unit.compression.vectors import LAYOUT, vector


@pytest.mark.parametrize("name", CODECS)
def test_bytes_of_the_gpu_are_decoded_alike_on_both_devices(name):
    import cupy

    host, device = (create(name, LAYOUT, np.float32, seed=2) for _ in range(2))
    for step in range(3):
        payload = device.encode(cupy.asarray(vector(step))).payload(0, LAYOUT.size)
        assert isinstance(payload, cupy.ndarray)
        on_device, on_host = cupy.full(LAYOUT.size, np.nan, np.float32), np.full(LAYOUT.size, np.nan, np.float32)
        device.decode(payload, 0, LAYOUT.size, on_device)
        host.decode(cupy.asnumpy(payload), 0, LAYOUT.size, on_host)
        np.testing.assert_allclose(cupy.asnumpy(on_device), on_host, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["top-k", "one-bit", "sign", "fp16", "bf16", "qsgd"])
def test_what_is_not_sent_is_kept_on_the_gpu(name):
    """The sum of what was sent and of what is kept is the sum of all vectors: nothing is lost."""
    import cupy

    device = create(name, LAYOUT, np.float32, seed=2, error_feedback=True)
    total, sent = np.zeros(LAYOUT.size), np.zeros(LAYOUT.size)
    for step in range(5):
        payload = device.encode(cupy.asarray(vector(step))).payload(0, LAYOUT.size)
        out = cupy.empty(LAYOUT.size, np.float32)
        device.decode(payload, 0, LAYOUT.size, out)
        total += vector(step)
        sent += cupy.asnumpy(out)
    left = cupy.asnumpy(device.residual)
    np.testing.assert_allclose(sent + left, total, rtol=1e-4, atol=1e-4)
