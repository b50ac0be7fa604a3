"""Runs as a trace for Perfetto (https://ui.perfetto.dev): one process a run, one track a server and a worker.

Spans are what workers did; instants are updates, grants, changes of membership, stalls and decisions. Flows lead from a
push to its update, and from a push, or another event, to the grants that it released. Counters follow version,
staleness, bytes and evaluations. Times count from the start of each run, so that several runs lie below each other.

The file is a sequence of packets that are written in batches, as the format allows: memory holds a part of a run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as schema

from hpcsync.export.flows import GRANTS, Flows, counters, marks
from hpcsync.export.spans import SERVERS, nanoseconds, spans_of_part
from hpcsync.export.window import Part, parts
from hpcsync.system.atomic_files import whole
from hpcsync.trace.reader import Trace, TraceFile

BATCH = 10_000  # packets written at once
BEGIN, END, INSTANT, COUNTER = (
    getattr(schema.TrackEvent, f"TYPE_{name}") for name in ("SLICE_BEGIN", "SLICE_END", "INSTANT", "COUNTER")
)
BEGINS = schema.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
OF_COMPUTATION = ("version_read", "staleness", "batch_size", "local_steps", "loss", "wire_bytes", "peer")
Packet = Any  # schema.TracePacket


def write(traces: Sequence[Trace | TraceFile], file: Path, from_s: float = 0.0, to_s: float = math.inf) -> None:
    """Write these seconds of runs into one file. Raises NotWritten if that is not possible."""
    packets = chain.from_iterable(run(trace, number, from_s, to_s) for number, trace in enumerate(traces, start=1))
    with whole(file) as path, path.open("wb") as out:
        while batch := list(islice(packets, BATCH)):
            out.write(schema.Trace(packet=batch).SerializeToString())


def run(trace: Trace | TraceFile, number: int, from_s: float = 0.0, to_s: float = math.inf) -> Iterator[Packet]:
    """Yield the packets of a run, part by part; `number`, from 1, is that of its process."""
    first = number << 40  # identifiers of the run's tracks and flows are from here on
    servers, workers = trace.job.cluster.servers, trace.n_workers
    names = [*(f"server {rank}" for rank in range(servers)), *(f"worker {worker}" for worker in range(workers))]
    process = schema.ProcessDescriptor(pid=number, process_name=title(trace))
    yield _described(number, schema.TrackDescriptor(uuid=first, process=process), sequence_flags=BEGINS)
    for rank, name in enumerate(names):
        yield _described(number, schema.TrackDescriptor(uuid=first + 1 + rank, parent_uuid=first, name=name))
    of_worker = {SERVERS: first + 1} | {worker: first + 1 + servers + worker for worker in range(workers)}
    flows, places, n_bytes = Flows(), dict[str, int](), 0
    for part in parts(trace, from_s, to_s):
        for fields in events(part, of_worker, flows, first):
            yield schema.TracePacket(trusted_packet_sequence_id=number, **fields)
        for name, unit, now_s, values in counters(part.trace, n_bytes):
            if name not in places:
                places[name] = first + 1 + len(names) + len(places)
                yield _described(number, _counter(places[name], first, name, unit))
            if name == "bytes" and len(values):
                n_bytes = int(values[-1])
            for at_ns, value in zip(nanoseconds(now_s).tolist(), values.tolist(), strict=True):
                event = schema.TrackEvent(type=COUNTER, track_uuid=places[name], double_counter_value=value)
                yield schema.TracePacket(trusted_packet_sequence_id=number, timestamp=at_ns, track_event=event)


def _counter(uuid: int, process: int, name: str, unit: str) -> Any:
    described = schema.CounterDescriptor(unit_name=unit)
    return schema.TrackDescriptor(uuid=uuid, parent_uuid=process, name=name, counter=described)


def title(trace: Trace | TraceFile) -> str:
    """Return the name of a run's process: folder, paradigm, and whether it was real."""
    kind = "simulated" if trace.attributes.get("engine") == "simulator" else "real"
    return f"{trace.path.absolute().parent.name}: {trace.job.paradigm.label}, {kind}"


def events(part: Part, tracks: Mapping[int, int], flows: Flows, first: int) -> Iterator[dict[str, Any]]:
    """Yield time and event of each packet of the workers' and servers' tracks, ordered by time within a part.

    At the same time spans end first, then come events, then the grants that these released, and then spans begin:
    Perfetto follows a flow from the packet that comes first.
    """
    bars, instants = spans_of_part(part), marks(part.trace)
    flows.add(part.trace)
    leaving = flows.of_spans(bars)
    known = _known(part.with_earlier)
    found: list[tuple[int, int, int, dict[str, Any]]] = []  # time, order, track, fields of the event
    for position, worker, iteration, activity, begin_ns, end_ns in bars.itertuples(name=None):
        about = {"iteration": iteration} | (known[worker, iteration] if activity == "compute" else {})
        flow_ids = [first + seq for seq in leaving.get(position, ())]
        found.append(
            (begin_ns, 3, tracks[worker], {"type": BEGIN, "name": activity, "about": about, "flow_ids": flow_ids})
        )
        found.append((end_ns, 0, tracks[worker], {"type": END, "about": {}}))
    for mark in instants:
        instant = {"type": INSTANT, "name": mark.name, "about": mark.about}
        instant["flow_ids"] = [first + seq for seq in flows.leaving.pop(mark.key, ())]
        instant["terminating_flow_ids"] = [first + seq for seq in flows.arriving.pop(mark.key, ())]
        found.append((mark.at_ns, 2 if mark.name in GRANTS else 1, tracks[mark.worker], instant))
    found.sort(key=lambda event: event[:2])
    for at_ns, _, track, fields in found:
        annotations = [_annotation(*item) for item in fields.pop("about").items()]
        yield {
            "timestamp": at_ns,
            "track_event": schema.TrackEvent(track_uuid=track, debug_annotations=annotations, **fields),
        }


def _known(trace: Trace) -> dict[tuple[int, int], dict[str, float | int]]:
    """Return what the trace says of each worker's iteration, by name; without what is not known."""
    rows = trace.tables["pushes" if trace.job.has_servers else "exchanges"]
    names = [name for name in OF_COMPUTATION if name in (rows.dtype.names or ())]
    return {
        (worker, iteration): {name: value for name, value in zip(names, values, strict=True) if value == value}
        for worker, iteration, *values in rows[["worker", "iteration", *names]].tolist()
    }


def _annotation(name: str, value: float | int) -> Any:
    kind = "double_value" if isinstance(value, float) else "int_value"
    return schema.DebugAnnotation(name=name, **{kind: value})


def _described(number: int, track: Any, **fields: Any) -> Packet:
    return schema.TracePacket(trusted_packet_sequence_id=number, track_descriptor=track, **fields)
