"""Codecs of vectors in a GPU's memory: CuPy's kernels in NumPy's place."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpcsync.compression import CODECS, create
from hpcsync.training import compressor
from tests.gpu.device import DEVICE
from tests.unit.compression.vectors import LAYOUT, vector
from tests.unit.jobs import make_job

LONG = 200_000_000  # clock cycles that the GPU is kept busy for


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


@pytest.mark.parametrize("waiting", [True, False])
def test_torch_sees_what_is_decoded_on_a_stream_of_its_own(waiting, monkeypatch):
    """The control: CuPy decodes on the default stream, for which no other stream waits by itself."""
    compression = compressor.Compression(make_job(compression={"name": "fp16"}), [(1000,)], torch.float32)
    (payload,) = compression.compressor(0).encode(torch.ones(1000, device=DEVICE), [compression.whole])
    into = torch.empty(1000, device=DEVICE)
    compression.decode(payload, into, compression.whole)  # compiles the kernels
    into.zero_()
    torch.cuda.synchronize()
    if not waiting:
        monkeypatch.setattr(compressor, "written", lambda tensor: None)
    torch.cuda._sleep(LONG)
    with torch.cuda.stream(torch.cuda.Stream(DEVICE)):
        compression.decode(payload, into, compression.whole)
        seen = into.clone()
    torch.cuda.synchronize()
    assert (seen == (1 if waiting else 0)).all()
