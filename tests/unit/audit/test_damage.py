"""Damaged traces: every command answers, or refuses the file in one line."""

import random
import signal
from functools import partial
from pathlib import Path

import pytest

from tests import damage
from tests.unit.simulator.runs import simulated


@pytest.mark.parametrize("paradigm", [{"name": "dssp", "staleness_min": 1, "staleness_max": 4}, {"name": "allreduce"}])
def test_damaged_traces(tmp_path: Path, paradigm: dict[str, object]) -> None:
    source = simulated(tmp_path, paradigm, [0.1, 0.15, 0.2], updates=10).path
    found = [each for seed in range(60) for each in damage.trial(random.Random(seed), source, tmp_path)]
    assert [each for each in found if each[2][0].isupper()] == []
    assert {"refused", "failed", "summarized", "explained"} <= {result for _, _, result in found}
    assert {how.__name__ for how in (*damage.OF_FILES, *damage.OF_BYTES)} == {how for how, _, _ in found}


def test_a_traceback_would_be_found() -> None:
    assert damage.outcome(lambda path: str(1 // 0), Path()).startswith("ZERODIVISIONERROR in ")


def test_a_crash_would_be_found() -> None:
    crash = partial(signal.raise_signal, signal.SIGKILL)
    assert damage._apart([lambda: "passed", crash, lambda: "explained"]) == ["passed", *["ENDED by signal 9"] * 2]
