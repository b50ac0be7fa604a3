from __future__ import annotations

import numpy as np
import pytest

from hpcsync.compression import CODECS, ErrorFeedback, TensorLayout, create
from hpcsync.compression.sparse import TopK
from tests.unit.compression.vectors import LAYOUT, decoded, vector

FED_BACK = [name for name, codec in CODECS.items() if not codec.keeps_rest]


def most_lost(codec, steps=5, dtype=np.float32):
    """Return the largest part of the input that was neither sent nor kept, relative to the largest element."""
    old, worst = np.zeros(LAYOUT.size, dtype), 0.0
    for step in range(steps):
        given = vector(step, dtype)
        came = decoded(codec, codec.encode(given))
        lost = np.abs(old + given - came - codec.residual).max()
        worst, old = max(worst, lost / np.abs(given).max()), codec.residual.copy()
    return worst


@pytest.mark.parametrize("name", FED_BACK)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_nothing_is_lost(name, dtype):
    codec = create(name, LAYOUT, dtype, error_feedback=True)
    assert most_lost(codec, dtype=dtype) <= (0 if name in ("top-k", "random-k") else 1e-6)


@pytest.mark.parametrize("ratio", [0.1, 0.7])
def test_nothing_is_lost_when_the_ratio_changes(ratio):
    codec = create("top-k", LAYOUT, np.float32)
    codec.encode(vector(1))
    old = codec.residual.copy()
    came = decoded(codec, codec.encode(vector(2), ratio))
    assert (came + codec.residual).tolist() == (old + vector(2)).tolist()
    assert codec.residual.any() == (ratio < 0.5)


def test_a_feedback_that_forgets_its_residual_would_be_caught():
    class Forgetful(ErrorFeedback):
        def _corrected(self, vector):
            self.residual = vector.copy()
            return self.residual

    assert most_lost(Forgetful(TopK(LAYOUT, np.float32))) > 0.1


def descended(codec, steps=1500):
    """Return the end of gradient descent on a quadratic; the first element has noise instead of a gradient."""
    at = np.ones(10)
    for step in range(steps):
        gradient = at.copy()
        gradient[0] = 2.0 * (-1) ** step
        at -= 0.01 * decoded(codec, codec.encode(gradient))
    return at[1:]


def test_without_error_feedback_small_gradients_are_lost():
    layout = TensorLayout([(2, 5)])
    assert np.abs(descended(create("top-k", layout, np.float64, ratio=0.1))).max() < 0.05
    assert (descended(create("top-k", layout, np.float64, ratio=0.1, error_feedback=False)) == 1.0).all()


def test_error_feedback_is_the_codecs_default_unless_declined():
    for name, codec in CODECS.items():
        assert isinstance(create(name, LAYOUT, np.float32), ErrorFeedback) == codec.feeds_back
        assert not isinstance(create(name, LAYOUT, np.float32, error_feedback=False), ErrorFeedback)


def test_a_second_error_feedback_is_refused():
    with pytest.raises(ValueError, match="ErrorFeedback keeps what it has not sent"):
        ErrorFeedback(create("top-k", LAYOUT, np.float32))
