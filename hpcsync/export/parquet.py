"""The tables of a trace as Parquet files, one a table, written slice by slice."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
from pyarrow import parquet

from hpcsync.system.atomic_files import naming, whole
from hpcsync.trace.reader import TraceFile
from hpcsync.trace.schema import ENUMS, SCHEMA, Rows


def write(trace: TraceFile, folder: Path) -> list[Path]:
    """Write each table of a trace to a file of its name; return the files.

    Codes are dictionaries of words, text is text. The metadata of a column are its description and unit; those of a
    file the description of the table and, with names that begin with ``hpcsync.``, the attributes of the run.

    Raises
    ------
    NotWritten
        If the system refuses to write.
    """
    with naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{table}.parquet" for table in SCHEMA]
    for table, file in zip(SCHEMA, files, strict=True):
        columns = schema(trace, table)
        with whole(file) as path, parquet.ParquetWriter(path, columns, compression="zstd") as writer:
            for rows in trace.slices(table):
                arrays = [array(name, rows[name]) for name in columns.names]
                writer.write_table(pa.Table.from_arrays(arrays, schema=columns))
    return files


def schema(trace: TraceFile, table: str) -> pa.Schema:
    """Return the columns of a table of this trace with their types, descriptions and units."""
    none = trace.read(table, 0, 0)
    declared = {column.name: column for column in SCHEMA[table].columns}
    stored = h5py.AttributeManager(trace.stored[table])  # the inputs of controllers are declared there only
    fields = []
    for name in none.dtype.names or ():
        about = {
            word: getattr(declared[name], word) if name in declared else str(stored[f"{name}.{word}"])
            for word in ("description", "unit")
        }
        fields.append(pa.field(name, array(name, none[name]).type, metadata=about))
    attributes = {f"hpcsync.{name}": str(value) for name, value in trace.attributes.items()}
    return pa.schema(fields, metadata={"description": SCHEMA[table].description, **attributes})


def array(name: str, values: Rows) -> pa.Array:
    """Return the values of a column of the trace, shape (n_rows,)."""
    if name in ENUMS:
        words = [code.name.lower() for code in sorted(ENUMS[name])]  # the codes count from 0
        return pa.DictionaryArray.from_arrays(pa.array(values.astype(np.int8)), pa.array(words))
    if values.dtype.kind == "S":
        return pa.array(np.char.decode(values, "utf-8", "replace").tolist(), pa.string())
    return pa.array(values)
