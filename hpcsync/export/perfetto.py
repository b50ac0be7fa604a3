"""Runs as a trace for Perfetto (https://ui.perfetto.dev): one process a run, one track a server and a worker.

Spans are what workers did; instants are updates, grants, changes of membership, stalls and decisions. Flows lead from a
push to its update, and from a push, or another event, to the grants that it released. Counters follow version,
staleness, bytes and evaluations. Times count from the start of each run, so that several runs lie below each other.

The file is a sequence of packets that are written in batches, as the format allows: memory holds one run, not its file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as schema

from hpcsync.export.flows import GRANTS, Flow, counters, flows, marks
from hpcsync.export.spans import SERVERS, nanoseconds, spans
from hpcsync.system.atomic_files import whole
from hpcsync.trace.reader import Trace

BATCH = 10_000  # packets written at once
BEGIN, END, INSTANT, COUNTER = (
    getattr(schema.TrackEvent, f"TYPE_{name}") for name in ("SLICE_BEGIN", "SLICE_END", "INSTANT", "COUNTER")
)
BEGINS = schema.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
OF_COMPUTATION = ("version_read", "staleness", "batch_size", "local_steps", "loss", "wire_bytes", "peer")
Packet = Any  # schema.TracePacket


def write(traces: Sequence[Trace], file: Path) -> None:
    """Write these runs into one file. Raises NotWritten if that is not possible."""
    packets = chain.from_iterable(run(trace, number) for number, trace in enumerate(traces, start=1))
    with whole(file) as path, path.open("wb") as out:
        while batch := list(islice(packets, BATCH)):
            out.write(schema.Trace(packet=batch).SerializeToString())


def run(trace: Trace, number: int) -> Iterator[Packet]:
    """Yield the packets of a run; `number`, from 1, is that of its process."""
    first = number << 40  # identifiers of the run's tracks and flows are from here on
    servers, workers = trace.job.cluster.servers, trace.n_workers
    names = [*(f"server {rank}" for rank in range(servers)), *(f"worker {worker}" for worker in range(workers))]
    process = schema.ProcessDescriptor(pid=number, process_name=title(trace))
    yield _described(number, schema.TrackDescriptor(uuid=first, process=process), sequence_flags=BEGINS)
    for rank, name in enumerate(names):
        yield _described(number, schema.TrackDescriptor(uuid=first + 1 + rank, parent_uuid=first, name=name))
    of_worker = {SERVERS: first + 1} | {worker: first + 1 + servers + worker for worker in range(workers)}
    for fields in events(trace, of_worker, first):
        yield schema.TracePacket(trusted_packet_sequence_id=number, **fields)
    for place, (name, unit, now_s, values) in enumerate(counters(trace), start=1 + len(names)):
        counter = schema.CounterDescriptor(unit_name=unit)
        yield _described(
            number, schema.TrackDescriptor(uuid=first + place, parent_uuid=first, name=name, counter=counter)
        )
        for at_ns, value in zip(nanoseconds(now_s).tolist(), values.tolist(), strict=True):
            event = schema.TrackEvent(type=COUNTER, track_uuid=first + place, double_counter_value=value)
            yield schema.TracePacket(trusted_packet_sequence_id=number, timestamp=at_ns, track_event=event)


def title(trace: Trace) -> str:
    """Return the name of a run's process: folder, paradigm, and whether it was real."""
    kind = "simulated" if trace.attributes.get("engine") == "simulator" else "real"
    return f"{trace.path.absolute().parent.name}: {trace.job.paradigm.label}, {kind}"


def events(trace: Trace, tracks: Mapping[int, int], first: int) -> Iterator[dict[str, Any]]:
    """Yield time and event of each packet of the workers' and servers' tracks, ordered by time.

    At the same time spans end first, then come events, then the grants that these released, and then spans begin:
    Perfetto follows a flow from the packet that comes first.
    """
    bars, instants = spans(trace), marks(trace)
    leaving, arriving = _identifiers(flows(trace, bars, instants) if trace.job.has_servers else (), first)
    known = _known(trace)
    found: list[tuple[int, int, int, dict[str, Any]]] = []  # time, order, track, fields of the event
    for position, worker, iteration, activity, begin_ns, end_ns in bars.itertuples(name=None):
        about = {"iteration": iteration} | (known[worker, iteration] if activity == "compute" else {})
        begin = {"type": BEGIN, "name": activity, "about": about, "flow_ids": leaving.get(position, ())}
        found.append((begin_ns, 3, tracks[worker], begin))
        found.append((end_ns, 0, tracks[worker], {"type": END, "about": {}}))
    for position, mark in enumerate(instants, start=len(bars)):
        instant = {"type": INSTANT, "name": mark.name, "about": mark.about, "flow_ids": leaving.get(position, ())}
        instant["terminating_flow_ids"] = arriving.get(position, ())
        found.append((mark.at_ns, 2 if mark.name in GRANTS else 1, tracks[mark.worker], instant))
    found.sort(key=lambda event: event[:2])
    for at_ns, _, track, fields in found:
        annotations = [_annotation(*item) for item in fields.pop("about").items()]
        yield {
            "timestamp": at_ns,
            "track_event": schema.TrackEvent(track_uuid=track, debug_annotations=annotations, **fields),
        }


def _identifiers(found: Iterable[Flow], first: int) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Return the identifiers of the flows that leave and reach each position."""
    leaving: dict[int, list[int]] = defaultdict(list)
    arriving: dict[int, list[int]] = defaultdict(list)
    for identifier, flow in enumerate(found, start=first):
        leaving[flow.source].append(identifier)
        arriving[flow.target].append(identifier)
    return leaving, arriving


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
