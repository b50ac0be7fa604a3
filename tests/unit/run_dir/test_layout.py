"""The folder of a run: chosen, created, and never overwritten."""

import functools
import io
import json
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from hpcsync.config.errors import JobError
from hpcsync.config.job import Job
from hpcsync.report.summary import summarize
from hpcsync.run_dir import layout
from hpcsync.run_dir.checkpoint import Resumed
from hpcsync.run_dir.checkpoint_files import apart
from hpcsync.system.atomic_files import NotWritten
from hpcsync.trace import reader
from hpcsync.trace.reader import load
from hpcsync.trace.schema import TABLES
from hpcsync.trace.writer import TraceWriter
from tests.unit.jobs import make_job
from tests.unit.trace import recorder


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(layout.time, "strftime", lambda _: "20260102-030405")


def test_a_folder_of_the_users_is_taken_as_it_is(tmp_path):
    assert layout.choose(make_job(), "here") == tmp_path.joinpath("here").relative_to(tmp_path)
    assert [p.name for p in (tmp_path / "here").iterdir()] == ["run.lock"]
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "notes").write_text("mine")
    assert layout.choose(make_job(), tmp_path / "there") == tmp_path / "there"
    assert {p.name for p in (tmp_path / "there").iterdir()} == {"notes", "run.lock"}
    assert layout.choose(make_job(), tmp_path / "there") == tmp_path / "there"  # as the ranks do after the front


def test_otherwise_it_is_named_after_job_and_time(tmp_path):
    names = []
    for _ in range(3):
        folder = layout.choose(make_job(), None)
        layout.create(folder, make_job())
        names.append(str(folder))
    assert names == [f"runs/test-20260102-030405{suffix}" for suffix in ("", "-2", "-3")]


def test_runs_that_begin_in_the_same_second_have_folders_of_their_own():
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: layout.choose(make_job(), None), range(40)))
    assert len(set(folders)) == 40


@pytest.mark.parametrize("name", ["trace.h5", "job.toml", "weights.safetensors", "summary.json", "checkpoints"])
def test_a_finished_or_unfinished_run_is_never_overwritten(tmp_path, name):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_bytes(b"mine")
    with pytest.raises(JobError, match=f"^out run: must not hold a {name} already: runs are never overwritten$"):
        layout.choose(make_job(), "run")
    assert (tmp_path / "run" / name).read_bytes() == b"mine"
    assert [path.name for path in (tmp_path / "run").iterdir()] == [name], "the lock is released"


def test_what_an_attempt_without_a_checkpoint_has_left_is_put_aside(tmp_path, monkeypatch):
    (tmp_path / "run" / "checkpoints" / "1.unfinished").mkdir(parents=True)
    (tmp_path / "run" / "tensorboard").mkdir()
    for name in ("trace.h5", "job.toml", "weights.safetensors", "wandb.id", "mlflow.id", "notes"):
        (tmp_path / "run" / name).touch()
    rename, renamed = Path.rename, []

    def interrupted(self: Path, target: Path) -> Path:
        if len(renamed) in (1, 4) and self not in renamed:
            renamed.append(self)
            raise KeyboardInterrupt
        renamed.append(self)
        return rename(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", interrupted)
        for _ in range(2):  # it may end anywhere, and the next attempt does the rest
            with pytest.raises(KeyboardInterrupt):
                layout.cleared(tmp_path / "run")
    assert layout.cleared(tmp_path / "run")
    left = {"trace.lost-1.h5", "job.lost-1.toml", "weights.lost-1.safetensors", "notes"}
    left |= {"tensorboard.lost-1", "wandb.lost-1.id", "mlflow.lost-1.id"}  # the next attempt is logged as a new run
    assert {path.name for path in (tmp_path / "run").iterdir()} == left


def test_a_run_that_has_finished_is_not_put_aside(tmp_path):
    """Another command may have finished it after this one has looked."""
    (tmp_path / "run").mkdir()
    for name in ("trace.h5", "summary.json"):
        (tmp_path / "run" / name).write_bytes(b"mine")
    with pytest.raises(JobError, match=r"^out run: must hold a run that has not finished; this one has$"):
        layout.put_aside("run")
    assert layout.finished_already("run", resume=True) and not layout.cleared(tmp_path / "run")
    assert not layout.finished_already("run", resume=False), "a new run is refused there"
    assert (tmp_path / "run" / "trace.h5").read_bytes() == b"mine"
    (tmp_path / "run" / "summary.json").unlink()  # the control
    assert not layout.finished_already("run", resume=True) and layout.cleared(tmp_path / "run")
    assert not (tmp_path / "run" / "trace.h5").exists()


def test_a_run_under_way_is_not_put_aside(tmp_path, monkeypatch):
    def refuse(_):
        raise JobError("under way")

    monkeypatch.setattr(layout.lock, "hold", refuse)
    (tmp_path / "run").mkdir()
    with pytest.raises(JobError, match="under way"):
        layout.cleared(tmp_path / "run")


def test_a_folder_that_is_not_there_holds_no_run_to_resume(tmp_path):
    layout.put_aside("run")
    assert layout.resuming("run", resume=True) is None and not (tmp_path / "run").exists()
    assert layout.missing_above(None) == [Path("runs")]
    (tmp_path / "a").mkdir()
    assert layout.missing_above("a/b/c/run") == [Path("a/b/c"), Path("a/b")]


def test_a_run_that_finishes_while_its_lock_is_awaited_does_not_resume(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(layout.lock, "hold", lambda folder: (folder / "summary.json").touch())
    with pytest.raises(JobError, match=r"^out run: must hold a run that has not finished; this one has$"):
        layout.resuming("run", resume=True)
    (tmp_path / "run" / "summary.json").unlink()
    monkeypatch.setattr(layout.lock, "hold", lambda folder: None)  # the control
    assert layout.resuming("run", resume=True) is None


def test_of_two_runs_that_choose_the_same_folder_one_gets_it(tmp_path):
    folders = [layout.choose(make_job(), "run") for _ in range(2)]
    layout.create(folders[0], make_job())
    with pytest.raises(JobError, match=r"^out run: must not hold a job.toml already: runs are never overwritten$"):
        layout.create(folders[1], make_job(seed=5))
    assert Job.from_toml((tmp_path / "run" / "job.toml").read_text()) == make_job()


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(JobError, match=r"^out run: must be a folder$"):
        layout.choose(make_job(), "run")
    with pytest.raises(JobError, match=r"^out run/below: Not a directory$"):
        layout.choose(make_job(), "run/below")
    (tmp_path / "runs").write_text("")
    with pytest.raises(JobError, match=r"^out runs: File exists$"):
        layout.choose(make_job(), None)


def test_a_folder_that_cannot_be_written_is_refused(monkeypatch):
    def refuse(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(layout.tempfile, "TemporaryFile", refuse)
    with pytest.raises(JobError, match=r"^out run: Permission denied$"):
        layout.choose(make_job(), "run")
    with pytest.raises(JobError, match=r"^out a/run: Permission denied$"):
        layout.refuse_unwritable("a/run")
    assert not Path("a").exists()


def test_a_folder_that_the_system_refuses_to_look_into_is_refused():
    out = "a/" * 3000 + "run"
    with pytest.raises(JobError, match=r"^out a/a/.*File name too long$"), layout.claimed(Path(out)):
        pass
    for ask in (layout.finished_already, layout.resuming):
        with suppress(JobError):  # from Python 3.14 on there is no such folder
            ask(out, resume=True)
    with suppress(JobError):
        layout.refuse_taken(Path(out))
    assert len(layout.missing_above(out)) == 3000, "that is told when the folder is created"


def test_the_resolved_job_lies_in_the_folder(tmp_path):
    layout.create(layout.choose(make_job(), tmp_path / "a" / "b"), make_job())
    assert Job.from_toml((tmp_path / "a" / "b" / "job.toml").read_text()) == make_job()


def test_a_job_that_is_half_written_is_not_in_the_folder(tmp_path, monkeypatch):
    """Else a kill would leave it there, and `hpcsync compare` would end with it."""
    write, seen = Path.write_text, []

    def look(path, text, **how):
        write(path, text[:9], **how)
        seen.append((tmp_path / "job.toml").exists())
        return write(path, text, **how)

    monkeypatch.setattr(Path, "write_text", look)
    layout.create(tmp_path, make_job())
    assert (seen, [path.name for path in tmp_path.iterdir()]) == ([False], ["job.toml"])


def test_a_run_that_did_not_start_leaves_nothing(tmp_path, monkeypatch):
    layout.create(layout.choose(make_job(), "run"), make_job())
    layout.withdraw(Path("run"))
    assert [*(tmp_path / "run").iterdir()] == []

    def fill_disk(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Job, "to_toml", fill_disk)
    with pytest.raises(JobError, match=r"^out run: No space left on device$"):
        layout.create(Path("run"), make_job())
    assert [*(tmp_path / "run").iterdir()] == []


def test_a_run_does_not_resume_with_another_job(tmp_path):
    before = Resumed(tmp_path, make_job(), frozenset())
    with pytest.raises(JobError, match=r"^seed = 5: must be \d+, as it was when the run began$"):
        layout.choose(make_job(seed=5), "run", before)
    other = make_job(paradigm={"name": "stanza", "cut": "classifier"}, workload={"name": "digits"})
    assert layout.as_begun(other, make_job()) is other, "which is refused later"


@pytest.mark.parametrize(
    ("paradigm", "workers"), [({"name": "allreduce"}, 3), ({"name": "gossip", "mode": "permutation"}, 4)], ids=str
)
def test_a_run_resumes_with_its_workers_unless_it_needs_a_rank_for_each(tmp_path, paradigm, workers):
    job = make_job(paradigm=paradigm, cluster={"workers": 3})
    (tmp_path / "job.toml").write_text(job.to_toml())
    assert layout.job_of("job.toml", [], 4, None).cluster.ranks == 4
    before = Resumed(tmp_path, job, frozenset())
    later = layout.job_of("job.toml", ["stop.updates=9"], 4, before)
    assert (later.stop.updates, later.cluster.workers) == (9, workers)
    layout.create(tmp_path, later, before)
    assert Job.from_toml((tmp_path / "job.toml").read_text()) == later


def write_trace(folder, iterations, workers=20):
    """Write a trace of pushes only, by workers in turn; return its folder."""
    folder.mkdir()
    row = np.zeros((), TABLES["pushes"])
    with TraceWriter(folder / "trace.h5", recorder.attributes(recorder.job_of("bsp", workers))) as trace:
        for push in range(iterations * workers):
            iteration, worker = divmod(push, workers)
            numbers = {"seq": push + 1, "now_s": push, "worker": worker, "iteration": iteration + 1, "compute_s": 1.0}
            for column, number in numbers.items():
                row[column] = number
            trace.append("pushes", row.item())
    return folder


def test_at_the_end_there_is_a_summary_in_the_folder_and_on_the_terminal(tmp_path):
    folder, shown = write_trace(tmp_path / "run", 5), io.StringIO()
    layout.conclude(folder, Console(file=shown, width=80))
    assert json.loads((folder / "summary.json").read_text()) == summarize(load(folder / "trace.h5")).as_dict()
    assert "20 workers" in shown.getvalue()
    assert shown.getvalue().endswith("\ntrace: run/trace.h5\n")


def test_a_narrow_terminal_cuts_no_number_and_a_folder_below_the_current_one_is_shown_from_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = io.StringIO()
    layout.conclude(write_trace(tmp_path / "run", 5), Console(file=shown, width=40))
    assert "\u2026" not in shown.getvalue()
    assert shown.getvalue().endswith("\ntrace: run/trace.h5\n")


def test_the_name_of_the_folder_is_no_markup(tmp_path):
    shown = io.StringIO()
    layout.conclude(write_trace(tmp_path / "[lr=0.1]", 1), Console(file=shown, width=80))
    assert shown.getvalue().endswith("\ntrace: [lr=0.1]/trace.h5\n")


def test_a_longer_run_takes_no_more_memory_at_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "opened", functools.partial(reader.opened, slice_rows=500))

    def peak_bytes(work):
        tracemalloc.start()
        work()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return peak

    shorter, longer = (write_trace(tmp_path / f"{iterations}", iterations) for iterations in (100, 1000))
    conclude = functools.partial(layout.conclude, console=Console(file=io.StringIO()))
    conclude(write_trace(tmp_path / "first", 1))  # what is imported and compiled once
    one, ten = (peak_bytes(functools.partial(conclude, folder)) for folder in (shorter, longer))
    assert ten < 1.5 * one
    assert peak_bytes(functools.partial(load, longer / "trace.h5")) > 3 * ten


def test_tied_weights_are_saved_under_each_name(tmp_path):
    first, last = torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False)
    model = torch.nn.Sequential(first, last)
    last.weight = first.weight
    layout.save_weights(tmp_path, model)
    saved = load_file(tmp_path / layout.WEIGHTS)
    assert saved.keys() == model.state_dict().keys()
    assert all(torch.equal(value, first.weight) for value in saved.values())


def test_buffers_that_are_parts_of_others_are_saved(tmp_path):
    """In PyTorch such a model trains and is saved; the format refuses tensors that overlap, and the run failed."""
    model = torch.nn.Linear(2, 3)
    model.register_buffer("table", torch.arange(10.0))
    model.register_buffer("tail", model.table[3:])
    model.register_buffer("row", model.table[5:6])
    layout.save_weights(tmp_path, model)
    saved = load_file(tmp_path / layout.WEIGHTS)
    assert saved.keys() == model.state_dict().keys()
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in saved.items())


def test_views_of_one_vector_are_saved_without_a_copy(tmp_path):
    vector = torch.zeros(1000)
    parts = {name: vector[begin : begin + 100] for name, begin in (("b", 100), ("a", 0), ("c", 200))}
    found = apart(parts)
    assert all(found[name].data_ptr() == part.data_ptr() for name, part in parts.items())


def test_weights_are_whole_whatever_their_layout_or_not_there(tmp_path, monkeypatch):
    model = torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    assert not model.weight.is_contiguous()
    layout.save_weights(tmp_path, model)
    assert torch.equal(load_file(tmp_path / layout.WEIGHTS)["weight"], model.weight)
    (tmp_path / layout.WEIGHTS).unlink()

    def fill_disk(_, path):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", fill_disk)
    with pytest.raises(NotWritten, match=r"weights\.safetensors: No space left on device$"):
        layout.save_weights(tmp_path, model)
    assert [*tmp_path.iterdir()] == []
