"""Parquet: the values, types, words and descriptions of the trace."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("pyarrow")

from pyarrow import parquet

from hpcsync.export import parquet as exporting
from hpcsync.trace.reader import load, opened
from hpcsync.trace.schema import SCHEMA
from tests.unit.export import runs


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    return runs.simulated(folder, '{name = "dssp", staleness_min = 1, staleness_max = 4}')


def test_tables_hold_what_the_trace_holds(run: Path, tmp_path: Path) -> None:
    with opened(run, slice_rows=7) as trace:  # so that there are several slices
        files = exporting.write(trace, tmp_path / "tables")
    assert [file.name for file in files] == [f"{table}.parquet" for table in SCHEMA]
    whole = load(run)
    for table in SCHEMA:
        frame, there = parquet.read_table(tmp_path / "tables" / f"{table}.parquet").to_pandas(), whole.frame(table)
        there = there.assign(**{name: there[name].astype("category") for name in ("controller",) if name in there})
        frame = frame.assign(**{name: frame[name].astype("category") for name in ("controller",) if name in frame})
        assert [*frame.columns] == [*there.columns]
        rows = frame.sort_values("seq", kind="stable") if table == "pushes" else frame
        pd.testing.assert_frame_equal(
            rows.reset_index(drop=True), there, check_categorical=False, check_dtype=False, check_exact=True
        )
    assert parquet.ParquetFile(tmp_path / "tables" / "pushes.parquet").num_row_groups > 1
    assert set(pd.read_parquet(tmp_path / "tables" / "pushes.parquet")["outcome"]) == {"applied"}


def test_columns_say_their_unit_and_files_their_run(run: Path, tmp_path: Path) -> None:
    with opened(run) as trace:
        exporting.write(trace, tmp_path)
        inputs = [
            name
            for name in trace.read("decisions").dtype.names
            if name not in {c.name for c in SCHEMA["decisions"].columns}
        ]
    schema = parquet.read_schema(tmp_path / "pushes.parquet")
    assert schema.field("wait_s").metadata[b"unit"] == b"s"
    assert schema.metadata[b"hpcsync.paradigm"] == b"dssp"
    assert inputs and all(parquet.read_schema(tmp_path / "decisions.parquet").field(name).metadata for name in inputs)


def test_text_and_types_are_kept() -> None:
    assert exporting.array("host", np.array([b"n\xc3\xb6de", b""], "S64")).to_pylist() == ["nöde", ""]
    assert str(exporting.array("worker", np.array([1], "<i4")).type) == "int32"
    assert exporting.array("phase", np.array([4, 0], "i1")).to_pylist() == ["pushing", "unknown"]
