"""The declaration of tables and columns, and the description that every trace carries of itself."""

import h5py
import numpy as np
import pytest

from hpcsync.core.assignments import decision_fields
from hpcsync.trace import schema
from hpcsync.trace.schema import ENUMS, SCHEMA, TABLES, UNITS, Column, TableSchema
from tests.unit.jobs import make_job
from tests.unit.simulator.running import simulate, timing_job

ADAPTIVE = {
    "dssp": {"name": "dssp", "staleness_min": 1, "staleness_max": 3},
    "k-sync": {"name": "k-sync", "k": "state"},
    "adsp": {"name": "adsp", "check_period_s": 3.0, "interval_min_s": 0.5},
    "ashl": {"name": "ashl", "warmup": 0, "profiled": 2},
    "async-diloco": {"name": "async-diloco", "grace_s": 0.5},
    "bsp": {"name": "bsp"},
    "allreduce": {"name": "allreduce"},
}
BATCHES = {"policy": "proportional", "predictor": "last"}


def undescribed(path):
    """The columns of a trace file whose description or unit is missing or not allowed."""
    with h5py.File(path) as file:
        return [
            f"{table}.{column}"
            for table, dataset in file.items()
            for column in dataset.dtype.names
            if not dataset.attrs.get(f"{column}.description", "").endswith(".")
            or dataset.attrs.get(f"{column}.unit") not in UNITS
        ]


@pytest.mark.parametrize("paradigm", ADAPTIVE)
def test_every_column_of_a_trace_has_a_description_and_a_unit(tmp_path, paradigm):
    path = tmp_path / "trace.h5"
    paradigm = ADAPTIVE[paradigm]
    batches = {} if paradigm["name"] in ("ashl", "adsp", "async-diloco") else {"batches": BATCHES}
    job = timing_job(paradigm=paradigm, **batches)
    simulate(job, path)
    assert undescribed(path) == []
    with h5py.File(path) as file:
        assert file.keys() == TABLES.keys()
        assert all(dataset.attrs["description"] for dataset in file.values())
        assert file["decisions"].dtype.names[5:] == tuple(decision_fields(job))
        assert file["grants"].attrs["held_s.unit"] == "s"
        assert file["grants"].attrs["gap_iters.description"].startswith("Lead ")


@pytest.mark.parametrize("attribute", ["wait_s.description", "wait_s.unit"])
def test_a_missing_description_is_found(tmp_path, attribute):
    simulate(timing_job(), tmp_path / "trace.h5")
    with h5py.File(tmp_path / "trace.h5", "r+") as file:
        del file["pushes"].attrs[attribute]
    assert undescribed(tmp_path / "trace.h5") == ["pushes.wait_s"]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (TableSchema("", (Column("a", "<f8", "s", "A."),)), r"table \['a'\]: description is missing"),
        (TableSchema("T.", (Column("a", "<f8", "s", ""),)), "column a: description is missing"),
        (TableSchema("T.", (Column("a", "<f8", "ms", "A."),)), "column a: unit is 'ms'; must be one of '', '1', 's'"),
    ],
)
def test_an_incomplete_declaration_is_refused(table, message):
    with pytest.raises(ValueError, match=message):
        schema.hdf5_attributes(table)


def test_every_controller_describes_its_inputs():
    for paradigm in ADAPTIVE.values():
        schema.hdf5_attributes(schema.decisions_table(decision_fields(make_job(paradigm=paradigm))))


def test_names_of_quantities_end_in_their_unit():
    for table in SCHEMA.values():
        for column in table.columns:
            assert (column.unit in ("s", "s/sample")) == column.name.endswith("_s"), column
            assert (column.unit == "B") == column.name.endswith("_bytes"), column


def test_record_types_follow_from_the_declaration():
    assert TABLES.keys() == SCHEMA.keys()
    assert TABLES["updates"] == np.dtype(
        [
            ("version", "<i8"),
            ("now_s", "<f8"),
            ("n_contributions", "<i4"),
            ("lr", "<f8"),
            ("samples", "<i8"),
            ("gradient_sq", "<f8"),
        ]
    )
    assert schema.decisions_table({"r": ("1", "R.")}).dtype == schema.decisions_dtype(["r"])
    assert ENUMS.keys() <= {column.name for table in SCHEMA.values() for column in table.columns}
