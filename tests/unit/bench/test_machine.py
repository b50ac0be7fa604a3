from __future__ import annotations

import re

from hpcsync.bench.machine import machine, versions


def test_the_machine_is_named_with_its_size():
    assert re.fullmatch(r".+, \d+ cores, \d+ GiB", machine())


def test_versions_are_those_that_matter():
    assert re.fullmatch(r"Python 3\S+, numpy \S+, torch \S+, mpi4py \S+, h5py \S+", versions())
