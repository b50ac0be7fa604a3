"""Check that a node has room for its windows, from the requests of its ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcsync.mpi.transport import shm_budget
from hpcsync.mpi.transport.shm_budget import MARGIN, MIB, SPARE_BYTES, Request, verdict

A, B = ("a", "1", "9"), ("b", "1", "9")


def asked(n_mib: float, free_mib: float | None = 100.0, held_mib: float = 0.0, node: tuple[str, ...] = A) -> Request:
    free = None if free_mib is None else int(free_mib * MIB)
    return Request(node, int(n_mib * MIB), int(held_mib * MIB), free, 128 * MIB)


def test_windows_of_all_ranks_of_a_node_must_fit() -> None:
    most = (100 - SPARE_BYTES / MIB) / MARGIN
    assert verdict([asked(most - 0.1), asked(0)]) == ""
    assert verdict([asked(most / 2 + 0.1), asked(most / 2)])


def test_existing_windows_count_whether_touched_or_not() -> None:
    assert verdict([asked(40, held_mib=40), asked(0)]) == ""
    assert verdict([asked(40, held_mib=40), asked(10, held_mib=10)])


def test_the_message_names_the_first_node_that_lacks_room_and_a_sufficient_size() -> None:
    everybody = [asked(90, node=A), asked(200, node=B), asked(0, node=A), asked(200, node=B)]
    assert verdict(everybody) == (
        "shared memory of b: the windows of its 2 ranks need 424 MiB of /dev/shm, and 100 MiB are free: enlarge it "
        "(docker run --shm-size=512m; mount -o remount,size=512m /dev/shm), or start fewer ranks there"
    )


def test_the_message_never_names_as_much_free_as_needed() -> None:
    said = verdict([asked((100.3 - SPARE_BYTES / MIB) / MARGIN, free_mib=100.2), asked(0, free_mib=100.2)])
    assert "need 101 MiB of /dev/shm, and 100 MiB are free" in said


def test_a_rank_alone_on_its_node_needs_no_shared_memory() -> None:
    assert verdict([asked(10**6, node=A), asked(10**6, node=B)]) == ""


def test_unknown_free_memory_is_accepted() -> None:
    assert verdict([asked(10**6, None), asked(10**6, None)]) == ""


@pytest.mark.parametrize("name", shm_budget.MOVED)
def test_open_mpi_may_be_configured_with_another_directory(name: str) -> None:
    assert shm_budget.directory({name: "/scratch"}) == Path("/scratch")
    assert shm_budget.directory({name: ""}) == shm_budget.directory({}) == Path("/dev/shm")
