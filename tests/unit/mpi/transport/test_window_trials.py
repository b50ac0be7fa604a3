"""Choice of a kind of window, and its description. Real child jobs are in tests/runs."""

from __future__ import annotations

import itertools
import math

import pytest

from hpcsync.mpi.transport import window_trials
from hpcsync.mpi.transport.subprocess_probe import ProbeError
from hpcsync.mpi.transport.window_trials import ON_A_NODE, WindowTrial, fastest, reason, rehearse
from hpcsync.system.launcher import LaunchError

STAGED, IPC, MPI = (
    WindowTrial("staged", 0.0021),
    WindowTrial("ipc", 0.0001),
    WindowTrial("mpi", None, "ended with status -11"),
)


@pytest.mark.parametrize(
    ("trials", "kind"),
    [
        ([STAGED, IPC, MPI], "ipc"),
        ([STAGED, MPI], "staged"),
        ([MPI], None),
        ([], None),
        ([WindowTrial("mpi", 0.0), STAGED], "mpi"),
        ([WindowTrial("staged", math.inf), WindowTrial("mpi", 9.0)], "mpi"),
    ],
)
def test_the_fastest_working_kind_is_chosen(trials: list[WindowTrial], kind: str | None) -> None:
    assert fastest(trials) == kind


def test_the_reason_begins_with_the_chosen_kind_and_is_complete() -> None:
    assert reason([STAGED, MPI, IPC], "ipc") == (
        "ipc: 8 MB there and back in 0.10 ms; staged: 8 MB there and back in 2.10 ms; mpi: ended with status -11"
    )
    assert reason([MPI]) == "mpi: ended with status -11"
    assert "no child job" in reason([WindowTrial("staged", math.inf)])


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The child jobs; one in which `mpi` is tried crashes, after the kinds before it."""
    jobs: list[tuple[str, ...]] = []

    def probe(name: str, *kinds: str, ranks: int) -> dict:
        if name == "world":
            return {"size": 2}
        assert (name, ranks) == ("windows", 2)
        jobs.append(kinds)
        before = list(itertools.takewhile(lambda kind: kind != "mpi", kinds))
        found = {"windows": [{STAGED.kind: STAGED, IPC.kind: IPC}[kind] for kind in before]}
        if len(before) < len(kinds):
            raise ProbeError("ended with status -11", found if before else {})
        return found

    monkeypatch.setattr(window_trials.subprocess_probe, "probe", probe)
    return jobs


def test_one_job_tries_all_kinds_if_none_crashes(probed: list) -> None:
    assert rehearse(("staged", "ipc")) == [STAGED, IPC] and probed == [("staged", "ipc")]


def test_a_crash_affects_only_its_own_kind(probed: list) -> None:
    assert rehearse() == [STAGED, IPC, MPI] and probed == [ON_A_NODE], "what was found before it is kept"
    assert rehearse(("staged", "mpi", "ipc")) == [STAGED, MPI, IPC] and probed[1:] == [
        ("staged", "mpi", "ipc"),
        ("ipc",),
    ]


def test_a_crash_after_the_last_trial_is_held_against_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    def probe(name: str, *kinds: str, ranks: int) -> dict:
        if name == "world":
            return {"size": 2}
        raise ProbeError("ended with status -11", {"windows": [STAGED, IPC][: len(kinds)]})

    monkeypatch.setattr(window_trials.subprocess_probe, "probe", probe)
    crashed = "ended with status -11"
    assert rehearse(("staged", "ipc")) == [STAGED, WindowTrial("ipc", failure=crashed)]
    assert rehearse(("staged",)) == [WindowTrial("staged", failure=crashed)]


def test_a_single_requested_kind_that_fails_is_reported_as_failed(probed: list) -> None:
    assert rehearse(["mpi"]) == [MPI]


@pytest.mark.parametrize("error", [LaunchError("mpiexec: not found"), ProbeError("ended with status 1")])
def test_without_child_jobs_the_safest_kind_is_returned_untried(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def probe(*_: str, ranks: int) -> dict:
        raise error

    monkeypatch.setattr(window_trials.subprocess_probe, "probe", probe)
    assert fastest(rehearse()) == "staged" and fastest(rehearse(["ipc"])) == "ipc"
