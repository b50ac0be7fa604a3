from __future__ import annotations

import numpy as np
import pytest

from hpcsync.compression import TensorLayout, create
from hpcsync.compression.powersgd import PowerSGD
from tests.unit.compression.vectors import LAYOUT, decoded, vector

MATRIX = TensorLayout([(40, 30)])


def of_rank(rank, seed=1, n=40, m=30):
    generator = np.random.default_rng(seed)
    return (generator.standard_normal((n, rank)) @ generator.standard_normal((rank, m))).reshape(-1)


def error(codec, given):
    return np.abs(decoded(codec, codec.encode(given)) - given).max() / np.abs(given).max()


def create_plain(rank, **options):
    return create("powersgd", MATRIX, np.float64, rank=rank, error_feedback=False, **options)


@pytest.mark.parametrize("rank", [1, 2, 5])
@pytest.mark.parametrize("of", [1, 2, 5])
def test_a_matrix_of_no_higher_rank_is_exact(rank, of):
    assert (error(create_plain(rank), of_rank(of)) < 1e-12) == (of <= rank)


def test_it_is_exact_after_gradients_of_lower_rank_or_none():
    """The warm start is then rank-deficient or zero."""
    codec = create_plain(3)
    for given in (of_rank(1, 2), np.zeros(1200), of_rank(1, 3), 1e-30 * of_rank(2, 4), of_rank(2, 5), of_rank(3, 6)):
        assert np.abs(decoded(codec, codec.encode(given)) - given).max() <= 1e-11 * np.abs(given).max()


def test_columns_that_are_zero_do_no_harm():
    given = of_rank(2).reshape(40, 30)
    given[:, 5:] = 0
    assert error(create_plain(4), given.reshape(-1)) < 1e-12


def test_gram_schmidt_without_an_epsilon_would_be_caught(monkeypatch):
    def gram_schmidt(matrix):
        result = matrix.copy()
        for k in range(result.shape[1]):
            result[:, k] -= result[:, :k] @ (result[:, :k].T @ result[:, k])
            with np.errstate(invalid="ignore"):
                result[:, k] /= np.linalg.norm(result[:, k])
        return result, None

    monkeypatch.setattr(np.linalg, "qr", gram_schmidt)
    assert error(create_plain(2), of_rank(2)) < 1e-12
    assert not error(create_plain(3), of_rank(2)) < 1e-12
    codec = create_plain(2)
    assert np.isnan(decoded(codec, codec.encode(np.zeros(1200)))).any()


@pytest.mark.parametrize("given", [of_rank(30), of_rank(1), np.zeros(1200)], ids=["full", "one", "zero"])
def test_p_is_orthonormal(given):
    ((p, _),) = create_plain(3).encode(given).parts
    assert p.T @ p == pytest.approx(np.eye(3), abs=1e-14)


def test_the_warm_start_finds_the_best_approximation():
    """Power iteration: for a constant gradient the error becomes that of the singular value decomposition."""
    given = of_rank(30)
    values = np.linalg.svd(given.reshape(40, 30), compute_uv=False)
    best = np.sqrt((values[2:] ** 2).sum())
    codec = create_plain(2)
    errors = [np.linalg.norm(decoded(codec, codec.encode(given)) - given) for _ in range(100)]
    assert errors[0] > 1.02 * best and errors[-1] == pytest.approx(best, rel=1e-3)


def test_only_tensors_that_shrink_to_less_than_half_are_sent_as_factors():
    layout = TensorLayout([(12, 12), (8, 7), (100,), (100, 1), (4, 3, 3, 3)])
    codec = create("powersgd", layout, np.float32, rank=2, error_feedback=False)
    given = vector(layout=layout)
    same = decoded(codec, codec.encode(given)) == given
    assert [bool(same[b : b + n].all()) for b, n in zip(layout.begins, layout.sizes, strict=True)] == [
        False, True, True, True, True,
    ]  # fmt: skip
    assert codec.capacity(0, layout.size) == 4 * (2 * (12 + 12) + 56 + 100 + 100 + 108)
    assert codec.capacity(13, 14) == 4 * (2 * (1 + 12))


def test_only_the_rows_of_p_that_are_touched_are_sent():
    codec = create("powersgd", MATRIX, np.float64, rank=1)
    encoded = codec.encode(of_rank(1))
    assert len(encoded.payload(29, 61)) == 8 * (3 + 30)
    assert len(encoded.payload(30, 60)) == 8 * (1 + 30)


# ---- means over ranks ----


def in_ranks(codecs, vectors):
    """Return the mean found by each rank."""
    left = np.mean([codec.left_factors(vector) for codec, vector in zip(codecs, vectors, strict=True)], axis=0)
    right = np.mean([codec.right_factors(left) for codec in codecs], axis=0)
    assert (len(left), len(right)) == codecs[0].factor_sizes
    found = [np.full_like(vector, np.nan) for vector in vectors]
    for codec, out in zip(codecs, found, strict=True):
        codec.product(right, out)
    return found


@pytest.mark.parametrize("feedback", [True, False])
def test_all_ranks_find_the_same_and_nothing_is_lost(feedback):
    ranks, kept = 3, np.zeros((3, LAYOUT.size))
    codecs = [create("powersgd", LAYOUT, np.float64, seed=5, error_feedback=feedback) for _ in range(ranks)]
    for step in range(4):
        given = [vector(10 * step + rank, np.float64) for rank in range(ranks)]
        found = in_ranks(codecs, given)
        assert found[0].tobytes() == found[1].tobytes() == found[2].tobytes()
        if feedback:
            before, kept = kept, np.array([codec.residual for codec in codecs])
            assert kept.mean(axis=0) + found[0] == pytest.approx((given + before).mean(axis=0), abs=1e-12)
        else:
            assert np.abs(found[0] - np.mean(given, axis=0)).max() > 0.1


def test_the_mean_is_exact_if_it_has_the_rank():
    given = [of_rank(2, 1), -of_rank(2, 1) + of_rank(1, 2), of_rank(1, 3)]
    codecs = [create("powersgd", MATRIX, np.float64, rank=2, seed=5) for _ in range(3)]
    found = in_ranks(codecs, given)
    assert found[0] == pytest.approx(np.mean(given, axis=0), abs=1e-12)


@pytest.mark.parametrize("feedback", [True, False])
def test_without_matrices_it_is_the_mean(feedback):
    layout = TensorLayout([(5,), (2, 2)])
    codecs = [create("powersgd", layout, np.float64, error_feedback=feedback) for _ in range(2)]
    assert codecs[0].factor_sizes == (9, 0)
    for step in range(2):
        given = [vector(10 * step + rank, np.float64, layout) for rank in range(2)]
        kept = [getattr(codec, "residual", None) for codec in codecs]
        expected = sum(given) / 2 + (0 if kept[0] is None else sum(kept) / 2)
        assert in_ranks(codecs, given)[1] == pytest.approx(expected, abs=1e-15)


def test_ranks_with_other_seeds_would_be_caught():
    codecs = [create("powersgd", MATRIX, np.float64, rank=2, seed=seed) for seed in range(2)]
    given = [of_rank(2, 1), of_rank(2, 1) * 0.5 + 0.1 * of_rank(2, 7)]
    same = in_ranks([create("powersgd", MATRIX, np.float64, rank=2, seed=0) for _ in range(2)], given)
    other = in_ranks(codecs, given)
    assert np.abs(same[0] - other[0]).max() > 0.01


def test_a_codec_without_factors_takes_no_means():
    with pytest.raises(TypeError, match="TopK has no factors to average"):
        create("top-k", LAYOUT, np.float32).left_factors(vector())


def test_rank_0_is_refused():
    with pytest.raises(ValueError, match="rank must be at least 1, got 0"):
        PowerSGD(MATRIX, np.float32, rank=0)
