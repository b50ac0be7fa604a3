"""Reading traces, refusing other files, and settling traces that a dead run left open."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import h5py
import numpy as np
import numpy.lib.recfunctions as rfn
import pytest

import hpcsync
from hpcsync.config.errors import JobError
from hpcsync.trace import reader
from hpcsync.trace.reader import TraceError
from hpcsync.trace.schema import ADDED, CHECKSUM, TABLES, checksum
from hpcsync.trace.writer import TraceWriter
from tests.unit.trace.recorder import attributes, job_of, play


@pytest.fixture
def path(tmp_path):
    """A trace of BSP, whose pushes are not written in the order of seq."""
    path, job = tmp_path / "trace.h5", job_of("bsp", updates=5)
    with TraceWriter(path, attributes(job)) as trace:
        play(job, trace, (1.0, 1.5, 0.5))
    return path


def test_pushes_are_in_the_order_of_seq(path):
    with h5py.File(path) as file:
        file_order = file["pushes"][:]["seq"]
    pushes = reader.load(path).tables["pushes"]
    assert len(pushes) == 15
    assert (np.diff(pushes["seq"]) > 0).all()
    assert sorted(file_order) == pushes["seq"].tolist()


def test_the_job_is_the_one_that_ran(path):
    trace = reader.load(path)
    assert trace.job == job_of("bsp", updates=5)
    assert (trace.status, trace.finished, trace.n_workers) == ("finished", True, 3)


def test_a_trace_is_found_in_the_folder_of_its_run(path):
    for given in (path, str(path), path.parent, str(path.parent)):
        trace = hpcsync.load_trace(given)
        assert trace.path == path
        assert len(trace.tables["pushes"]) == 15
    with reader.opened(path.parent) as trace:
        assert trace.path == path


def test_a_folder_without_a_trace_is_reported(tmp_path):
    with pytest.raises(TraceError, match=r"trace\.h5: no such file"):
        hpcsync.load_trace(tmp_path)


def test_a_job_that_cannot_be_read_is_reported_when_it_is_used(path):
    with h5py.File(path, "r+") as file:
        file.attrs["job"] = "nonsense = 1"
    trace = reader.load(path)
    with pytest.raises(TraceError, match=r"trace\.h5: its job cannot be read: .*nonsense"):
        _ = trace.job


def test_frame_has_categories_for_codes(path):
    pytest.importorskip("pandas")
    frame = reader.load(path).frame("pushes")
    assert set(frame["outcome"]) == {"applied"}
    assert frame["outcome"].dtype == "category"
    assert frame["outcome"].cat.categories.tolist() == ["applied", "dropped"]
    assert list(frame["seq"]) == sorted(frame["seq"])
    assert frame["now_s"].dtype == np.float64


def test_frame_has_text_for_bytes(tmp_path):
    pytest.importorskip("pandas")
    with TraceWriter(tmp_path / "t.h5", attributes(job_of("asp"))) as trace:
        trace.append("clocks", (0, 0, "node-0", 0.0, 0.0))
        trace.append("membership", (1, 0.5, 0, 0))
    trace = reader.load(tmp_path / "t.h5")
    assert trace.frame("clocks")["host"].tolist() == ["node-0"]
    assert trace.frame("membership")["change"].tolist() == ["left"]


def test_every_enumeration_and_controller_is_a_category(tmp_path):
    pytest.importorskip("pandas")
    with TraceWriter(tmp_path / "t.h5", attributes(job_of("asp"))) as trace:
        for controller in ("k", "batches", "k"):
            trace.append("decisions", (1, 0.5, controller, 0, 2.0))
        trace.append("stalls", (2.5, 1, 7, 3, 2.0, 0.5, 2))
        trace.append("membership", (1, 0.5, 0, 2))
    trace = reader.load(tmp_path / "t.h5")
    for table, column, values, categories in (
        ("decisions", "controller", ["k", "batches", "k"], ["batches", "k"]),
        ("stalls", "phase", ["computing"], ["unknown", "waiting", "reading", "computing", "pushing"]),
        ("membership", "change", ["died"], ["left", "joined", "died"]),
        ("pushes", "outcome", [], ["applied", "dropped"]),
    ):
        frame = trace.frame(table)
        assert frame[column].tolist() == values
        assert frame[column].cat.categories.tolist() == categories
    assert (trace.frame("decisions")["controller"] == "k").sum() == 2


def _flushed_before(path):
    """Simulate a kill between the writing of two tables: `flushed_rows` is still that of the flush before."""
    with h5py.File(path, "r+") as file:
        counts = file.attrs["flushed_rows"]
        counts["pushes"], counts["grants"] = 9, 9
        file.attrs.modify("flushed_rows", counts)


def test_rows_after_the_last_whole_flush_are_not_read(path):
    _flushed_before(path)
    tables = reader.load(path).tables
    assert (len(tables["pushes"]), len(tables["grants"]), len(tables["updates"])) == (9, 9, 5)


def test_slices_are_the_rows_in_the_order_of_the_file(path):
    with h5py.File(path) as file:
        in_file = {table: file[table][:] for table in TABLES}
    with reader.opened(path, slice_rows=4) as trace:
        slices = {table: list(trace.slices(table)) for table in TABLES}
        assert (trace.job, trace.status, trace.n_workers) == (job_of("bsp", updates=5), "finished", 3)
    assert [len(rows) for rows in slices["pushes"]] == [4, 4, 4, 3]
    assert [len(rows) for rows in slices["decisions"]] == [0]
    for table, rows in in_file.items():
        assert np.concatenate(slices[table]).tobytes() == rows.tobytes()


def test_slices_end_with_the_last_whole_flush(path):
    _flushed_before(path)
    with reader.opened(path, slice_rows=4) as trace:
        assert [len(rows) for rows in trace.slices("pushes")] == [4, 4, 1]


@pytest.mark.parametrize(("worker", "damaged"), [(-2, True), (-1, False), (2, False), (3, True)])
def test_a_slice_names_workers_of_the_run(path, worker, damaged):
    with h5py.File(path, "r+") as file:
        file["grants"][14] = tuple(worker if name == "worker" else 0 for name in file["grants"].dtype.names)
    with reader.opened(path, slice_rows=4) as trace:
        refused = pytest.raises(TraceError, match="damaged trace: /grants names a worker that is none of 3")
        with refused if damaged else nullcontext():
            list(trace.slices("grants"))
        with pytest.raises(TraceError, match="damaged trace: the rows of /grants are not those that were written"):
            trace.verify()


def test_a_trace_in_memory_is_one_slice(path):
    trace = reader.load(path)
    (rows,) = trace.slices("pushes")
    assert rows is trace.tables["pushes"]


def test_damage_of_a_slice_is_reported_in_one_line(path):
    with reader.opened(path) as trace:
        trace.stored["grants"] = trace.stored["grants"]._replace(n_rows=3)
        h5py.Dataset(trace.stored["grants"].id).file.close()
        with pytest.raises(TraceError, match="trace.h5: a damaged trace: "):
            list(trace.slices("grants"))


def _no_file(path):
    path.unlink()


def _a_folder(path):
    path.unlink()
    path.mkdir()


def _a_text(path):
    path.write_text("seq,now_s\n")


def _empty(path):
    path.write_bytes(b"")


def _other_hdf5(path):
    path.unlink()
    with h5py.File(path, "w") as file:
        file["pushes"] = np.arange(3)


def _edited(change):
    def damage(path):
        with h5py.File(path, "r+") as file:
            change(file)

    return damage


def _replaced(file, table, rows):
    del file[table]
    file[table] = rows


def _flushed(file, table, n_rows):
    flushed = file.attrs["flushed_rows"]
    flushed[table] = n_rows
    file.attrs["flushed_rows"] = flushed


def _cut_short(path):
    path.write_bytes(path.read_bytes()[:3000])


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_no_file, "no such file"),
        (_a_folder, "no such file"),
        (_a_text, "not an HDF5 file"),
        (_empty, "not an HDF5 file"),
        (_other_hdf5, "not a trace"),
        (_edited(lambda file: file.attrs.update(format_version=99)), "format version 99"),
        (
            _edited(lambda file: file.attrs.update(format_version=3)),
            "a trace of format version 3; this hpcsync reads 7 and 8",
        ),
        (_edited(lambda file: file.pop("grants")), "damaged.*grants"),
        (_edited(lambda file: _replaced(file, "grants", np.arange(3))), "damaged.*: /grants must be a table"),
        (
            _edited(lambda file: _replaced(file, "grants", file["grants"][:][["seq", "now_s"]])),
            r"damaged.*: /grants must have the columns seq \(<i8\), now_s \(<f8\), ",
        ),
        (_edited(lambda file: _flushed(file, "grants", 99)), "damaged.*: flushed_rows must be 0 to 15 for grants"),
        (_edited(lambda file: _flushed(file, "grants", -1)), "damaged.*: flushed_rows must be 0 to 15 for grants"),
        (_edited(lambda file: file.attrs.pop("flushed_rows")), "damaged.*: the attribute flushed_rows must have"),
        (_edited(lambda file: file.attrs.pop("n_workers")), "damaged.*n_workers is missing"),
        (_edited(lambda file: file.attrs.update(n_workers=0)), "damaged.*n_workers must be 1 to 10,000,000"),
        (_edited(lambda file: file.attrs.update(n_workers="3")), "damaged.*n_workers must be int, it is str"),
        (_edited(lambda file: file.attrs.update(status="done")), "damaged.*status must be one of running, "),
        (_cut_short, r"truncated: it has [\d,]+ of [\d,]+ bytes$"),
    ],
)
def test_other_files_are_refused_in_one_line(path, damage, says):
    damage(path)
    with pytest.raises(TraceError, match=says) as caught:
        reader.load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("before", "after", "changed"),
    [
        ("running", "failed", True),
        ("interrupted", "failed", True),
        ("finished", "finished", False),
        ("failed", "failed", False),
    ],
)
def test_settle_changes_only_open_traces(path, before, after, changed):
    with h5py.File(path, "r+") as file:
        file.attrs["status"] = before
    assert reader.settle(path, "failed") == (before if changed else None)
    trace = reader.load(path)
    assert trace.status == after
    assert len(trace.tables["pushes"]) == 15


@pytest.mark.parametrize("patience_s", [30.0, 0.0])
def test_settle_waits_for_a_rank_that_dies(path, monkeypatch, patience_s):
    """It holds the file until its last system call has ended."""
    monkeypatch.setattr(reader, "DYING_S", patience_s)
    with h5py.File(path, "r+") as file:
        file.attrs["status"] = "running"
    with held(path) as rank:
        with ThreadPoolExecutor() as pool:
            settled = pool.submit(reader.settle, path, "failed")
            if patience_s:
                time.sleep(0.3)
                assert not settled.done()
                rank.stdin.close()
                assert settled.result()
            else:
                with pytest.raises(TraceError, match="another process uses it"):
                    settled.result()
                rank.stdin.close()


def test_the_trace_of_a_run_under_way_is_refused(path):
    with held(path), pytest.raises(TraceError, match=r"trace.h5: another process uses it; `hpcsync watch` shows a run"):
        reader.load(path)


def held(path):
    """Return a process that has the file open as a rank has that writes it, until its standard input ends."""
    holds = "import h5py, sys; f = h5py.File(sys.argv[1], 'r+'); print(flush=True); sys.stdin.read(1)"
    argv = [sys.executable, "-c", holds, str(path)]
    rank = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    rank.stdout.readline()
    return rank


def test_settle_without_a_file_is_no_error(tmp_path):
    assert reader.settle(tmp_path / "none.h5", "failed") is None


def test_settle_refuses_other_files(path):
    _a_text(path)
    with pytest.raises(TraceError, match="not an HDF5 file"):
        reader.settle(path, "failed")


@pytest.mark.parametrize("wrong", ["running", "dead"])
def test_settle_needs_a_final_status(path, wrong):
    with pytest.raises(ValueError, match=wrong):
        reader.settle(path, wrong)


def _as_of_version(path, version):
    """Turn the trace into one of this format version, with the checksums of its rows if that has them."""
    with h5py.File(path, "r+") as file:
        flushed = file.attrs["flushed_rows"]
        for table in TABLES:
            rows = file[table][:]
            kept = [name for name in rows.dtype.names if ADDED.get(name, 0) <= version]
            if len(kept) == len(rows.dtype.names):
                continue
            rows = rfn.repack_fields(rows[kept])
            del file[table]
            file.create_dataset(table, data=rows, maxshape=(None,), chunks=(100,))
            flushed[f"{table}{CHECKSUM}"] = checksum(rows)
        kept = [name for name in flushed.dtype.names if version > 7 or not name.endswith(CHECKSUM)]
        del file.attrs["flushed_rows"]
        file.attrs["flushed_rows"] = rfn.repack_fields(flushed[kept])
        file.attrs["format_version"] = version


def test_a_trace_of_format_version_8_is_read_audited_and_resumed(path):
    before = reader.load(path)
    pushes, updates = before.tables["pushes"], before.tables["updates"]
    _as_of_version(path, 8)
    trace = reader.load(path)
    assert trace.altered == ()
    assert np.isnan(trace.tables["pushes"]["gradient_sq"]).all()
    assert np.isnan(trace.tables["updates"]["gradient_sq"]).all()
    for name in set(pushes.dtype.names) - {"gradient_sq"}:
        assert trace.tables["pushes"][name].tobytes() == pushes[name].tobytes()
    with reader.opened(path, slice_rows=4) as file:
        file.verify()
        n_rows = {table: stored.n_rows for table, stored in file.stored.items()}
        described = {**file.attributes, "hosts": ""}
    with h5py.File(path, "r+") as file:
        file.attrs["created"], file.attrs["hosts"] = "", ""
        wrong = file["updates"][:]
    with TraceWriter(path, described, resumed_rows=n_rows):
        pass
    trace = reader.load(path)
    assert (trace.attributes["format_version"], trace.altered) == (9, ())
    assert trace.tables["updates"]["lr"].tobytes() == updates["lr"].tobytes()
    # The control: a changed value of an old trace is found.
    _as_of_version(path, 8)
    with h5py.File(path, "r+") as file:
        wrong["lr"][0] += 1
        file["updates"][...] = wrong
    assert reader.load(path).altered == ("updates",)


def test_a_trace_of_format_version_7_is_read_and_resumed(path, tmp_path):
    grants = reader.load(path).tables["grants"]
    assert (grants["released_by"] != 0).all()
    grants["released_by"] = 0
    _as_of_version(path, 7)
    assert reader.load(path).tables["grants"].tobytes() == grants.tobytes()
    with reader.opened(path, slice_rows=4) as file:
        assert np.concatenate(list(file.slices("grants"))).tobytes() == grants.tobytes()
        n_rows = {table: stored.n_rows for table, stored in file.stored.items()}
        described = {**file.attributes, "hosts": ""}
    with h5py.File(path, "r+") as file:
        file.attrs["created"], file.attrs["hosts"] = "", ""
    with TraceWriter(path, described, resumed_rows=n_rows):
        pass
    trace = reader.load(path)
    assert trace.attributes["format_version"] == 9
    assert trace.tables["grants"].tobytes() == grants.tobytes()


def test_a_frame_without_pandas_is_refused_in_one_line(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(JobError, match=r"^Trace\.frame: needs pandas, which is not installed: pip install pandas$"):
        reader.load(path).frame("pushes")
