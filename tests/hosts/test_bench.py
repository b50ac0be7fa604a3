"""`hpcsync bench hosts` measures over the cables of the hosts."""

from __future__ import annotations

import pytest

from hpcsync import bench
from hpcsync.bench import BenchError, Target
from tests.hosts.processes import PAUSES

pytestmark = pytest.mark.hosts


@PAUSES
@pytest.mark.once
def test_means_and_iterations_take_as_long_as_their_bytes_on_the_line() -> None:
    try:
        library, figures = bench.measure(Target("between_hosts", "", 2, 100.0, rates=("1gbit",)), kind="1gbit")
    except BenchError as error:
        if "status" in str(error):
            raise
        pytest.skip(str(error))
    assert library
    assert {figure.limit for figure in figures} == {"the line", "gloo", "MPI_Allreduce", "DDP, gloo"}
    for figure in figures:
        assert figure.what.startswith("1gbit: ") and figure.values and figure.limits
        if figure.limit == "the line":
            assert figure.ratio is not None and figure.ratio > 0.9, f"{figure.what}: faster than the line"
