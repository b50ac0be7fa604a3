"""On any number of ranks, as tests/mpi, which share the GPUs there are. Without one everything is skipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcsync.mpi.transport.window_trials import ON_A_NODE, WindowTrial, fastest, rehearse
from tests.gpu.device import DEVICE, FOUND
from tests.mpi.conftest import (  # noqa: F401
    Transport,
    comm,
    folder,
    needs,
    pytest_configure,
    pytest_runtest_logreport,
    route,
    through,
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("gpu")
            item.add_marker(
                pytest.mark.timeout(600)
            )  # the first one waits for child jobs, each of which may hang for a while
            if FOUND.why:
                item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {FOUND.why}"))


@pytest.fixture(scope="session")
def trials() -> dict[str, WindowTrial]:
    """Of each kind of window, on this machine."""
    from mpi4py import MPI

    from hpcsync.mpi.transport.backoff import Backoff

    found = rehearse() if MPI.COMM_WORLD.rank == 0 else []
    Backoff(MPI.COMM_WORLD).barrier()
    return {trial.kind: trial for trial in MPI.COMM_WORLD.bcast(found)}


@pytest.fixture(params=ON_A_NODE)
def transport(request: pytest.FixtureRequest, trials: dict[str, WindowTrial]) -> Transport:
    """Every kind that serves here."""
    if (trial := trials[request.param]).took_s is None:
        pytest.skip(f"{trial.kind}: {trial.failure}")
    return Transport(request.param, DEVICE)


@pytest.fixture(autouse=True)
def fastest_windows(trials: dict[str, WindowTrial], monkeypatch: pytest.MonkeyPatch) -> None:
    """For all runs of tests that do not say otherwise: a trial for each of them would take seconds."""
    kind = fastest(list(trials.values()))
    assert kind is not None, trials
    route(monkeypatch, Transport(kind, DEVICE))
