"""Hosts that are network namespaces, for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hpcsync.system.namespaces import Hosts, Unavailable


@pytest.fixture(scope="module")
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    """As many hosts as the file's HOSTS, with links of 1 Gbit/s; where they cannot be made, the tests are skipped."""
    try:
        hosts = Hosts(request.module.HOSTS, rate="1gbit")
    except Unavailable as reason:
        pytest.skip(str(reason))
    with hosts:
        yield hosts
