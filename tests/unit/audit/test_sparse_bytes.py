"""Bytes of sparse contributions: recounted from the sizes of tensors, which the trace has."""

import dataclasses

import numpy as np
import pytest

from hpcsync.audit.compression import bytes_follow_from_compression
from hpcsync.audit.server_recount import Recount
from hpcsync.audit.trace_audit import audit
from tests.unit.jobs import REQUIRED, make_job
from tests.unit.simulator.running import simulate
from tests.unit.trace.recorder import edit

CODECS = [
    {"name": "top-k", "ratio": 0.05},
    {"name": "random-k", "ratio": 0.1},
    {"name": "dgc", "ratio": 0.02, "warmup": 6},
]


@pytest.fixture(params=[1, 3])
def servers(request):
    return request.param


def trained(folder, servers, compression, paradigm="asp"):
    job = make_job(
        workload={"name": "digits", "batch_size": 4},
        stop={"updates": 20},
        paradigm=paradigm if isinstance(paradigm, dict) else {"name": paradigm, **REQUIRED.get(paradigm, {})},
        compression=compression,
        cluster={"servers": servers, "workers": 2, "compute": {"model": "constant", "seconds": [0.1, 0.13]}},
    )
    return simulate(job, folder / f"{servers}.h5")


def passes(trace):
    return bytes_follow_from_compression(Recount(trace)).passed


@pytest.mark.parametrize("compression", CODECS, ids=lambda compression: compression["name"])
def test_one_element_more_is_found(tmp_path, servers, compression):
    trace = trained(tmp_path, servers, compression)
    assert all(check.passed for check in audit(trace))
    pushes = trace.tables["pushes"]
    for row in range(len(pushes)):
        assert not passes(edit(trace, "pushes", row, wire_bytes=pushes["wire_bytes"][row] + 8))
    read = 4 * 13_706
    assert not passes(edit(trace, "pushes", 0, wire_bytes=read)), "a payload has at least its header"


def test_a_cancelled_iteration_only_reads(tmp_path):
    trace = trained(tmp_path, 1, CODECS[0], {"name": "k-batch-sync", "k": 1, "cancel": "abort"})
    assert passes(trace)
    (row, *_) = np.flatnonzero(trace.tables["pushes"]["share"] < 1)
    for more in (8, -8):
        assert not passes(edit(trace, "pushes", row, wire_bytes=4 * 13_706 + more))


def test_a_trace_without_the_sizes_is_checked_as_far_as_it_can_be(tmp_path):
    """Control: of the bytes of a sparse push only that they are not those of more than the vector is then known."""
    trace = trained(tmp_path, 1, CODECS[0])
    sizes = {name: trace.attributes[name] for name in ("tensors", "element_bytes")}
    unknown = {name: value for name, value in trace.attributes.items() if name not in sizes}
    more = edit(trace, "pushes", 3, wire_bytes=trace.tables["pushes"]["wire_bytes"][3] + 8)
    assert passes(dataclasses.replace(more, attributes={**unknown, "format_version": 8}))
    none = edit(trace, "pushes", 3, wire_bytes=0)
    assert not passes(dataclasses.replace(none, attributes={**unknown, "format_version": 8}))
    assert passes(dataclasses.replace(trace, attributes={**unknown, **sizes}))
    (check,) = (check for check in audit(dataclasses.replace(trace, attributes=unknown)) if not check.passed)
    assert check.detail == "no sizes of tensors follow from the attributes element_bytes, tensors"
    for name, value in sizes.items():
        assert not passes(dataclasses.replace(trace, attributes={**unknown, name: value})), "without the other one"
    for tensors in ("[", "[]"):
        other = {**unknown, **sizes, "tensors": tensors}
        assert not passes(dataclasses.replace(trace, attributes=other)), "sizes of another model"


def test_pushes_that_are_granted_a_ratio_are_checked_by_it(tmp_path, servers):
    trace = trained(tmp_path, servers, {"name": "top-k", "ratio": None}, "ashl")
    assert passes(trace)
    granted = trace.tables["grants"]["ratio"]
    assert (granted < 1).any()
    pushes = trace.tables["pushes"]
    row = int(np.argmin(pushes["wire_bytes"]))
    assert not passes(edit(trace, "pushes", row, wire_bytes=pushes["wire_bytes"][row] + 8))
