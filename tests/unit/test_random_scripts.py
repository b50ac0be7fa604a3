"""A few scripts of `tests/random_scripts.py`: whatever a loop does, it trains as plain PyTorch."""

from __future__ import annotations

import pytest

from hpcsync.system import garbage
from hpcsync.training.piece_optimizer import PieceOptimizer
from hpcsync.training.script_optimizers import ScriptOptimizers
from tests.random_scripts import Case, draw, examine

SEED, SCRIPTS = 1, 12


@pytest.fixture(autouse=True)
def lasting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "freeze", lambda: None)  # one process is not at an end after a run


@pytest.mark.parametrize("seed", range(SEED, SEED + SCRIPTS))
def test_random_scripts(seed: int) -> None:
    case = draw(seed)
    assert case == draw(seed) != draw(seed + 1)
    assert examine(case) == []


def one(**given: object) -> Case:
    """A script with a schedule on servers."""
    return Case(**vars(draw(1)) | {"schedule": "by hand", "paradigm": "bsp", "servers": 2, "workers": 2} | given)


@pytest.mark.parametrize(
    ("owner", "name", "how"),
    [
        (PieceOptimizer, "follow", "trained: "),  # servers that ignore what workers state
        (ScriptOptimizers, "adopt", "trained: optimizer 0: "),  # an optimizer that gets nothing back
        (PieceOptimizer, "restore", "resumed: "),
    ],
)
def test_what_is_left_out_is_found(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, how: str) -> None:
    case = one(optimizer="momentum", steps_by="optimizer", n_optimizers=1, interrupted=1, clip_norm=None)
    assert examine(case) == []
    monkeypatch.setattr(owner, name, lambda self, *given: None)
    assert any(wrong.startswith(how) for wrong in examine(case))
