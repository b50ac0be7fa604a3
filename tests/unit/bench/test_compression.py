from __future__ import annotations

import pytest

from hpcsync.bench import compression
from hpcsync.compression import CODECS


def test_every_codec_is_compared_with_a_copy():
    figures = compression.measure(sizes=(4_000, 20_000), repetitions=2)
    assert len(figures) == 4 * 2 * len(CODECS)
    for encode, decode, sent, pays in zip(*(figures[i::4] for i in range(4)), strict=True):
        assert len(encode.values) == len(decode.limits) == len(pays.values) == 2
        assert encode.ratio > 0 and decode.ratio > 0
        assert 0 < sent.values[0] < 60 and pays.values[0] > 0
    assert figures[0].what == "top-k, 0.004 M elements: encode" and figures[0].limits == figures[1].limits


def test_a_codec_pays_below_the_bandwidth_at_which_the_saved_bytes_take_as_long(monkeypatch):
    monkeypatch.setattr(compression, "_seconds", lambda *call: 0.5)
    *_, pays = compression._measure("fp16", 1_000_000, 1)
    assert pays.values == pytest.approx([8 * 2e6 / (0.5 + 0.5) / 1e9])


@pytest.mark.parametrize("n", [4_000, 1_000_000, 25_000_000])
def test_the_layout_has_n_elements_most_of_them_in_large_matrices(n):
    layout = compression.layout(n)
    assert layout.size == n
    assert layout.sizes[0] > 0.45 * n and 0 < layout.sizes[-1] < 0.1 * n
