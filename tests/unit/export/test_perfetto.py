"""Traces for Perfetto, parsed by Perfetto's schema and read in the way of its trace processor."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("perfetto")

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as schema

from hpcsync.export import perfetto as exporting
from hpcsync.export.spans import spans
from hpcsync.trace.reader import Trace, load
from hpcsync.trace.schema import Change, Outcome, Release
from tests.unit.export import runs
from tests.unit.export.runs import in_slices
from tests.unit.trace import recorder
from tests.unit.trace.recorder import with_rows


class Slice(NamedTuple):
    track: tuple[str, str]  # process and track
    name: str
    begin_ns: int
    end_ns: int
    about: dict[str, float]


class Read(NamedTuple):
    tracks: dict[int, tuple[str, str]]
    slices: list[Slice]  # those without duration are instants
    flows: list[tuple[Slice, Slice]]
    counters: dict[tuple[str, str], list[tuple[int, float]]]
    problems: list[str]


def read(file: Path) -> Read:
    """Read a file as the trace processor does: packets by time, a stack a track, flows from the first packet on."""
    packets = list(schema.Trace.FromString(file.read_bytes()).packet)
    described = [packet.track_descriptor for packet in packets if packet.HasField("track_descriptor")]
    processes = {track.uuid: track.process.process_name for track in described if track.HasField("process")}
    tracks = {track.uuid: (processes.get(track.parent_uuid, ""), track.name) for track in described}
    assert len(tracks) == len(described), "two tracks have one identifier"
    problems: list[str] = []
    open_slices: dict[int, list[tuple[Any, int]]] = defaultdict(list)
    slices: list[Slice] = []
    begun: dict[int, tuple[str, int]] = {}
    ends: list[tuple[int, str, int]] = []  # identifier, direction, position
    counters: dict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
    events = [packet for packet in packets if packet.HasField("track_event")]
    for packet in sorted(events, key=lambda packet: packet.timestamp):
        event, at_ns = packet.track_event, packet.timestamp
        track = tracks[event.track_uuid]
        about = {each.name: each.double_value or float(each.int_value) for each in event.debug_annotations}
        if event.type == event.TYPE_COUNTER:
            counters[track].append((at_ns, event.double_counter_value))
        elif event.type == event.TYPE_SLICE_END:
            if not open_slices[event.track_uuid]:
                problems.append(f"{track} at {at_ns}: nothing to end")
                continue
            position = open_slices[event.track_uuid].pop()[1]
            slices[position] = slices[position]._replace(end_ns=at_ns)
        else:
            if event.type == event.TYPE_SLICE_BEGIN:
                if open_slices[event.track_uuid]:
                    problems.append(f"{track} at {at_ns}: a slice within another")
                open_slices[event.track_uuid].append((event, len(slices)))
            ends += [(number, "from", len(slices)) for number in event.flow_ids]
            ends += [(number, "to", len(slices)) for number in event.terminating_flow_ids]
            slices.append(Slice(track, event.name, at_ns, at_ns, about))
    problems += [f"{tracks[uuid]}: not ended" for uuid, open_ones in open_slices.items() if open_ones]
    flows = []
    for number, direction, position in ends:
        if direction == "from":
            begun[number] = (direction, position)
        elif number not in begun:
            problems.append(f"flow {number}: ends before it begins")
        else:
            flows.append((slices[begun.pop(number)[1]], slices[position]))
    problems += [f"flow {number}: has no end" for number in begun]
    return Read(tracks, slices, flows, dict(counters), problems)


def written(folder: Path, *traces: Trace) -> Read:
    exporting.write(traces, folder / "run.pftrace")
    return read(folder / "run.pftrace")


@pytest.mark.parametrize("kind", runs.KINDS)
def test_tracks_and_slices_are_those_of_the_run(kind: str, tmp_path: Path) -> None:
    trace = runs.trace(kind)
    found, servers = written(tmp_path, trace), trace.job.cluster.servers
    assert found.problems == []
    names = [name for _, name in found.tracks.values()]
    ranks = [f"server {rank}" for rank in range(servers)] + [f"worker {rank}" for rank in range(trace.n_workers)]
    assert names[: 1 + len(ranks)] == ["", *ranks]
    assert {process for process, _ in found.tracks.values()} == {"", exporting.title(trace)}
    slices = [s for s in found.slices if s.end_ns > s.begin_ns]
    expected = spans(trace)[["worker", "activity", "begin_ns", "end_ns"]].values.tolist()
    workers = [[int(s.track[1].removeprefix("worker ")), s.name, s.begin_ns, s.end_ns] for s in slices]
    assert sorted(workers) == sorted(expected)
    assert all(s.about["iteration"] >= 0 for s in slices)
    assert all(value == value for s in found.slices for value in s.about.values()), "what is not known is left out"
    assert {name for _, name in found.tracks.values()} - {"", *ranks} == {name for _, name in found.counters}


@pytest.mark.parametrize("kind", ["bsp", "asp", "dssp", "k-sync", "k-async", "easgd", "adsp", "async-diloco", "ashl"])
def test_flows_lead_from_pushes_to_their_updates_and_grants(kind: str, tmp_path: Path) -> None:
    trace = recorder.record(kind)
    found = written(tmp_path, trace)
    assert found.problems == []
    pushes, updates, grants = (trace.tables[name] for name in ("pushes", "updates", "grants"))
    applied = pushes[pushes["outcome"] == Outcome.APPLIED]
    to_updates = Counter(int(target.about["version"]) for _, target in found.flows if target.name == "update")
    assert to_updates == dict(zip(updates["version"].tolist(), updates["n_contributions"].tolist(), strict=True))
    sources = [
        (source.track[1], source.about["iteration"]) for source, target in found.flows if target.name == "update"
    ]
    assert sorted(sources) == sorted((f"worker {w}", i) for w, i in applied[["worker", "iteration"]].tolist())
    of_seq = {
        seq: (f"worker {worker}", iteration)
        for seq, worker, iteration in pushes[["seq", "worker", "iteration"]].tolist()
    }
    to_grants = [
        (source.track[1], source.about["iteration"], target.track[1], target.about["iteration"])
        for source, target in found.flows
        if target.name == "grant" and source.name in ("compute", "transfer")
    ]
    expected = []
    for worker, iteration, steps, by in grants[["worker", "iteration", "local_steps", "released_by"]].tolist():
        source = (f"worker {worker}", iteration - 1) if by == Release.OWN else of_seq.get(by)
        if source is not None and steps:
            expected.append((*source, f"worker {worker}", iteration))
    assert sorted(to_grants) == sorted(expected)
    assert len(to_grants) > 10


@pytest.mark.parametrize(("shift_s", "name"), [(0.0, "transfer"), (0.3, "compute")])
def test_flows_leave_the_last_span_that_begins_before_the_push_is_handled(
    shift_s: float, name: str, tmp_path: Path
) -> None:
    trace = recorder.record("asp")
    pushes = trace.tables["pushes"].copy()
    for column in ("end_s", "compute_s"):
        pushes[column] += shift_s
    assert ((pushes["end_s"] < pushes["now_s"]) == (shift_s == 0)).all()
    found = written(tmp_path, with_rows(trace, "pushes", pushes))
    assert found.problems == []
    assert {source.name for source, target in found.flows if target.name == "update"} == {name}


def test_times_that_elapse_are_on_the_track_of_the_deciding_server(tmp_path: Path) -> None:
    found = written(tmp_path, recorder.record("async-diloco", jitter=0.3))
    elapsed = {(s.track[1], *s.about) for s in found.slices if s.name == "time elapsed"}
    assert elapsed == {("server 0", "worker", "chosen")}


def test_other_events_release_workers_too(tmp_path: Path) -> None:
    trace = recorder.record("bsp", changes=[(3.9, 2)])
    died = [seq for seq, change in trace.tables["membership"][["seq", "change"]].tolist() if change == Change.DIED]
    released = trace.tables["grants"][np.isin(trace.tables["grants"]["released_by"], died)]
    flows = [target.track[1] for source, target in written(tmp_path, trace).flows if source.name == "died"]
    assert sorted(flows) == sorted(f"worker {worker}" for worker in released["worker"]) != []


def test_traces_that_do_not_know_who_released_have_no_such_flows(tmp_path: Path) -> None:
    trace = recorder.record("bsp")
    grants = trace.tables["grants"].copy()
    grants["released_by"] = 0
    flows = written(tmp_path, with_rows(trace, "grants", grants)).flows
    assert {target.name for _, target in flows} == {"update"}


def test_counters_follow_the_run(tmp_path: Path) -> None:
    trace = recorder.record("dssp")
    counters = {name: values for (_, name), values in written(tmp_path, trace).counters.items()}
    assert [value for _, value in counters["version"]] == trace.tables["updates"]["version"].tolist()
    assert counters["bytes"][-1][1] == trace.tables["pushes"]["wire_bytes"].sum()
    applied = trace.tables["pushes"][trace.tables["pushes"]["outcome"] == Outcome.APPLIED]
    assert sorted(value for _, value in counters["staleness"]) == sorted(applied["staleness"].tolist())
    assert len(counters["loss"]) == len(trace.tables["evaluations"]) > 0
    assert [at_ns for at_ns, _ in counters["version"]] == sorted(at_ns for at_ns, _ in counters["version"])


def test_several_runs_stand_side_by_side(tmp_path: Path) -> None:
    simulated = load(runs.simulated(tmp_path))
    real = Trace(tmp_path / "real" / "trace.h5", {**simulated.attributes, "engine": "mpi"}, simulated.tables)
    found, one = written(tmp_path, real, simulated), written(tmp_path, simulated)
    assert found.problems == []
    processes = {process for process, _ in found.tracks.values()} - {""}
    kinds = {process.partition(":")[0]: process.rpartition(", ")[2] for process in processes}
    assert kinds == {"real": "real", simulated.path.parent.name: "simulated"}
    assert (len(found.slices), len(found.flows)) == (2 * len(one.slices), 2 * len(one.flows))
    assert all(source.track[0] == target.track[0] for source, target in found.flows)


def test_overlapping_spans_and_flows_backwards_would_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = recorder.record("bsp")
    frame = spans(trace)
    with monkeypatch.context() as patch:
        patch.setattr(exporting, "spans_of_part", lambda _: frame.assign(end_ns=frame["end_ns"] + 1000))
        assert any("a slice within another" in problem for problem in written(tmp_path, trace).problems)
    early = [mark._replace(at_ns=0) for mark in exporting.marks(trace)]
    monkeypatch.setattr(exporting, "marks", lambda _: early)
    assert any("ends before it begins" in problem for problem in written(tmp_path, trace).problems)


@pytest.mark.parametrize("kind", runs.KINDS)
def test_a_run_in_parts_is_read_as_the_whole(kind: str, tmp_path: Path) -> None:
    trace = runs.trace(kind)
    whole, found = written(tmp_path, trace), written(tmp_path, in_slices(trace, 15))
    assert found.problems == []
    assert sorted(map(str, found.slices)) == sorted(map(str, whole.slices))
    assert sorted(map(str, found.flows)) == sorted(map(str, whole.flows))
    assert {key: sorted(values) for key, values in found.counters.items()} == {
        key: sorted(values) for key, values in whole.counters.items()
    }


def test_the_file_is_written_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = recorder.record("asp")
    exporting.write([trace], tmp_path / "whole.pftrace")
    monkeypatch.setattr(exporting, "BATCH", 7)
    exporting.write([trace], tmp_path / "parts.pftrace")
    assert (tmp_path / "whole.pftrace").read_bytes() == (tmp_path / "parts.pftrace").read_bytes()
