"""Tests with a fixture `comm` run on ranks that are threads, once at each of several numbers of ranks.

They are written as those in tests/mpi: every rank runs the whole test. See hpcsync/mpi/transport/thread_ranks.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from hpcsync.mpi.rank0 import run_recorder
from hpcsync.mpi.transport.thread_ranks import run
from hpcsync.system import garbage
from tests.conftest import is_its_turn, runs_everywhere
from tests.mpi.conftest import needs, only, through, transport  # noqa: F401

SIZES = (1, 2, 3, 5, 8)
PRINTING = 3
LIMIT_S = 280.0  # less than pytest's, which would not tell where each rank was


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "comm" in metafunc.fixturenames:
        metafunc.parametrize("n_ranks", SIZES)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--take-turns`, run some cases at each number of ranks, and every case at some."""
    if not config.getoption("take_turns"):
        return
    cases: dict[str, list[dict[str, int]]] = {}
    its_case = {}
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec is not None and "n_ranks" in callspec.params and not runs_everywhere(item):
            of_test = cases.setdefault(item.nodeid.partition("[")[0], [])
            case = {name: id(value) for name, value in callspec.params.items() if name != "n_ranks"}
            if case not in of_test:
                of_test.append(case)
            its_case[item] = (of_test, of_test.index(case), SIZES.index(callspec.params["n_ranks"]))
    left = [item for item, (of, number, turn) in its_case.items() if not is_its_turn(number, len(of), turn)]
    items[:] = [item for item in items if item not in set(left)]
    config.hook.pytest_deselected(items=left)


@pytest.fixture
def n_ranks(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture
def comm(n_ranks: int, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """What other fixtures may know of the communicator that each rank gets.

    Where a test does not read what runs print, they print their tables at one number of ranks only.
    """
    monkeypatch.setattr(garbage, "freeze", lambda: None)  # one process is not at an end after a run
    if n_ranks != PRINTING and not {"capsys", "capfd"} & {*request.fixturenames}:
        monkeypatch.setattr(run_recorder, "console", lambda: Console(quiet=True))
    return SimpleNamespace(size=n_ranks)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if "comm" not in pyfuncitem.fixturenames:
        return None
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    test: Callable[..., None] = pyfuncitem.obj

    def body(comm: Any) -> None:
        test(**given | ({"comm": comm} if "comm" in given else {}))

    run(pyfuncitem.funcargs["n_ranks"], body, limit_s=LIMIT_S)
    return True
