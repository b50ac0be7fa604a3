from __future__ import annotations

import numpy as np
import pytest

from hpcsync.compression import ErrorFeedback, TensorLayout, create
from hpcsync.compression.dgc import DGC
from tests.unit.compression.test_sparse import by_sorting
from tests.unit.compression.vectors import LAYOUT, decoded, vector


class Reference:
    """DGC as in the paper, tensor by tensor, with dense vectors."""

    def __init__(self, layout, ratios, momentum, nesterov, clip):
        self.layout, self.ratios, self.momentum, self.nesterov, self.clip = layout, ratios, momentum, nesterov, clip
        self.u, self.v = ([np.zeros(n) for n in layout.sizes] for _ in "uv")

    def send(self, vector, step):
        if self.clip is not None:
            vector = vector * min(1.0, self.clip / np.sqrt((vector**2).sum()))
        sent = np.zeros(self.layout.size)
        for i, shape in enumerate(self.layout.shapes):
            begin, n = self.layout.begins[i], self.layout.sizes[i]
            g = vector[begin : begin + n]
            self.u[i] = self.momentum * (self.u[i] + g) if self.nesterov else self.momentum * self.u[i] + g
            gathered = self.u[i] + g if self.nesterov else self.u[i]
            if len(shape) <= 1:
                sent[begin : begin + n] = gathered
            elif n:
                self.v[i] = self.v[i] + gathered
                mask = by_sorting(self.v[i], max(1, int(n * self.ratios[min(step, len(self.ratios) - 1)])))
                sent[begin + mask] = self.v[i][mask]
                self.v[i][mask] = 0
                self.u[i][mask] = 0
        return sent


def differences(codec, reference, steps=12):
    return [
        np.abs(
            decoded(codec, codec.encode(vector(step, np.float64))) - reference.send(vector(step, np.float64), step)
        ).max()
        for step in range(steps)
    ]


OPTIONS = [
    {},
    {"momentum": 0.5, "nesterov": True},
    {"clip": 3.0},
    {"momentum": 0.0},
    {"warmup": 4, "warmup_ratios": [0.4, 0.2]},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_the_codec_equals_the_paper(options):
    codec = create("dgc", LAYOUT, np.float64, ratio=0.05, **options)
    ratios = [0.4, 0.4, 0.2, 0.2, 0.05] if "warmup" in options else [0.05]
    reference = Reference(LAYOUT, ratios, options.get("momentum", 0.9), options.get("nesterov"), options.get("clip"))
    assert max(differences(codec, reference)) < 1e-12


def test_a_momentum_that_is_not_masked_would_be_caught():
    class Unmasked(DGC):
        def _encode(self, vector, ratio):
            before = 0.0 if self._momenta is None else self._momenta.copy()
            encoded = super()._encode(vector, ratio)
            self._momenta[:] = self.momentum * before + vector
            return encoded

    errors = differences(Unmasked(LAYOUT, np.float64, ratio=0.05), Reference(LAYOUT, [0.05], 0.9, False, None))
    assert errors[0] < 1e-12 and errors[1] > 0.1


def test_the_warm_up_is_that_of_the_authors_code():
    codec = DGC(LAYOUT, np.float32, ratio=0.001, warmup=10)
    shown = [f"{codec.ratio_of(i):.2g}" for i in (*range(0, 10, 2), 10)]
    assert shown == ["0.32", "0.1", "0.032", "0.01", "0.0032", "0.001"]
    assert [codec.ratio_of(i) for i in range(1, 10, 2)] == [codec.ratio_of(i) for i in range(0, 10, 2)]
    assert codec.ratio_of(1000) == 0.001


def test_a_warm_up_that_sends_everything_is_plain_momentum():
    codec = create("dgc", LAYOUT, np.float64, warmup=3, warmup_ratios=[1.0])
    u = 0.0
    for step in range(3):
        given = vector(step, np.float64)
        u = 0.9 * u + given
        assert np.allclose(decoded(codec, codec.encode(given)), u, rtol=1e-12)
    assert not codec.gathered.any()


def test_nothing_is_lost():
    """Without momentum, sent and accumulated values sum to all gradients."""
    codec = create("dgc", LAYOUT, np.float64, momentum=0.0)
    given = [vector(step, np.float64) for step in range(5)]
    sent = [decoded(codec, codec.encode(one)) for one in given]
    assert sum(sent) + codec.gathered == pytest.approx(sum(given), abs=1e-12)


def test_a_large_gradient_is_clipped_and_a_small_one_is_not():
    layout = TensorLayout([(2,)])
    codec = create("dgc", layout, np.float64, momentum=0.0, clip=1.0)
    assert decoded(codec, codec.encode(np.array([3.0, 4.0]))) == pytest.approx([0.6, 0.8])
    assert decoded(codec, codec.encode(np.array([0.3, 0.4]))).tolist() == [0.3, 0.4]


def test_error_feedback_is_built_in():
    assert isinstance(create("dgc", LAYOUT, np.float32), DGC)
    for refused in (
        lambda: create("dgc", LAYOUT, np.float32, error_feedback=True),
        lambda: ErrorFeedback(DGC(LAYOUT, np.float32)),
    ):
        with pytest.raises(ValueError, match="DGC keeps what it has not sent"):
            refused()


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 1.0},
        {"momentum": -0.1},
        {"clip": 0.0},
        {"warmup": -1},
        {"warmup": 1, "warmup_ratios": []},
        {"warmup_ratios": [0.0]},
    ],
)
def test_values_that_are_not_allowed_are_refused(options):
    with pytest.raises(ValueError, match=f"^{list(options)[-1]} must"):
        create("dgc", LAYOUT, np.float32, **options)
