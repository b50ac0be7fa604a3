"""Notices of MPI: buffered whole, however they arrive, and written unless they are redundant."""

import io
import os
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from hpcsync.system.launch_output import NoticeFilter, Output, print_at_once, wait_until_read

RULE = b"-" * 74 + b"\n"
ABORT = RULE + b"MPI_ABORT was invoked on rank 0 in communicator MPI_COMM_WORLD\n  Errorcode: 75\n\nNOTE: ...\n" + RULE
EXITED = RULE + b"prterun detected that one or more processes exited with non-zero status,\n  Exit code: 2\n" + RULE
CLOSED = (
    b"[n2:00000] *** An error occurred in Socket closed\n[n2:00000] *** reported by process [173735937,1]\n"
    b"[n2:00000] *** on a NULL communicator\n[n2:00000] *** Unknown error\n"
    b"[n2:00000] *** MPI_ERRORS_ARE_FATAL (processes in this communicator will now abort,\n"
    b"[n2:00000] ***    and MPI will try to terminate your MPI job as well)\n"
)
OTHERS = CLOSED.replace(b"n2", b"n3")
MIXED = b"".join(map(b"".join, zip(CLOSED.splitlines(True), OTHERS.splitlines(True), strict=True)))
LOST = RULE + b"An MPI communication peer process has unexpectedly disconnected.  This\nusually ...\n" + RULE
MPICH = b"Abort(75) on node 0 (rank 0 in comm 0): application called MPI_Abort(MPI_COMM_WORLD, 75) - process 0\n"
LATER = b"1 more process has sent help message help-mpi-api.txt / mpi-abort\n"
KILLED = (
    b"=" * 83 + b"\n=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n=   EXIT CODE: 9\n" + b"=" * 83 + b"\n"
    b"YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)\n"
    b"Please see the FAQ page for debugging suggestions\n"
)
TOLD = b"hpcsync: interrupted; use --resume to resume from checkpoint 1\n"


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_notices_are_buffered_and_other_text_passes(size: int) -> None:
    text, found = TOLD + ABORT + b"between\n" + EXITED + MPICH + KILLED + b"loss 0.25", NoticeFilter()
    passed = b"".join(found.feed(text[i : i + size]) for i in range(0, len(text), size)) + found.end()
    assert passed == TOLD + b"between\nloss 0.25"
    assert [notice.text for notice in found.notices] == [ABORT, EXITED, MPICH, KILLED]
    assert [notice.on_purpose for notice in found.notices] == [True, True, True, False]
    assert found.explained


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_notice_within_a_line_of_a_rank(size: int) -> None:
    text, found = TOLD.rstrip() + ABORT + b"\nlater\n\n", NoticeFilter()
    passed = b"".join(found.feed(text[i : i + size]) for i in range(0, len(text), size)) + found.end()
    assert passed == TOLD + b"later\n\n"
    assert [notice.text for notice in found.notices] == [ABORT]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_lines_of_other_ranks_between_those_of_a_notice_pass(size: int) -> None:
    lines = MIXED.splitlines(True)
    text, found = b"".join([*lines[:5], TOLD, *lines[5:], LOST, b"later\n"]), NoticeFilter()
    passed = b"".join(found.feed(text[i : i + size]) for i in range(0, len(text), size)) + found.end()
    assert passed == TOLD + b"later\n"
    assert b"".join(notice.text for notice in found.notices) == MIXED + LOST
    assert found.explained


@pytest.mark.parametrize(
    "text",
    [
        b"  1.0 s\r  2.0 s",
        RULE + b"a table\n" + RULE + RULE + b"another\n" + RULE,
        b"a\0b\n",
        b"Abort(no)\n",
        CLOSED.partition(b"\n")[2],  # of another error
    ],
)
def test_text_that_resembles_a_notice_passes(text: bytes) -> None:
    found = NoticeFilter()
    assert (found.feed(text) + found.end(), found.notices, found.explained) == (text, [], False)


def test_a_part_of_a_line_passes_at_once() -> None:
    found = NoticeFilter()
    assert [found.feed(part) for part in (b"[##", b"  ]\n")] == [b"[##", b"  ]\n"]
    assert [found.feed(part) for part in (b"  1.0 s", b"\r  2.0 s", b" samples\n-", b"-\n")] == [
        b"  1.0 s",
        b"\r  2.0 s",
        b" samples\n",
        b"--\n",
    ]


@pytest.mark.parametrize(
    ("err", "stopped", "expected"),
    [
        (TOLD + ABORT + b"\0" + LATER, False, TOLD),
        (b"Traceback (most recent call last):\n" + MPICH, False, b"Traceback (most recent call last):\n"),
        (TOLD + LOST + CLOSED + b"later\n", False, TOLD + b"later\n"),
        (ABORT, False, ABORT),
        (ABORT + KILLED, True, b""),
        (TOLD + KILLED, False, TOLD + KILLED),
    ],
)
def test_redundant_notices_are_dropped(
    err: bytes, stopped: bool, expected: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    code = f"import os; os.write(2, {err!r})"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    output = Output()
    output.forward(process.stdout, process.stderr)
    assert process.wait(200) == 0
    output.end(stopped, on_terminal=False)
    assert os.fsencode(capfd.readouterr().err) == expected


@pytest.mark.parametrize(("stopped", "interrupted"), [(False, False), (True, False), (False, True)])
def test_a_slow_reader_gets_all_unless_the_launch_was_ended(
    stopped: bool, interrupted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcsync.system.launch_output.DRAIN_S", 0.2)
    written: list[bytes] = []
    reads = threading.Event()

    def write(target: int, data: bytes) -> None:
        reads.wait()
        written.append(data)

    process = subprocess.Popen(["printf", "page\nof a pager"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    output = Output(write)
    output.forward(process.stdout, process.stderr)
    process.wait(200)
    if not stopped and not interrupted:
        threading.Timer(1.5, reads.set).start()
    output.end(stopped, False, lambda: interrupted)
    assert b"".join(written) == (b"" if stopped or interrupted else b"page\nof a pager")
    reads.set()


def test_a_pipe_that_a_leftover_process_holds_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcsync.system.launch_output.DRAIN_S", 0.2)
    process = subprocess.Popen(["sleep", "300"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    output, begin_s = Output(lambda target, data: None), time.monotonic()
    output.forward(process.stdout, process.stderr)
    output.end(False, False)
    assert time.monotonic() - begin_s < 60
    process.kill()
    process.wait()


def test_a_rank_waits_until_what_it_has_printed_is_read() -> None:
    reader, writer = os.pipe()
    os.write(writer, TOLD)
    begin_s = time.monotonic()
    threading.Timer(0.3, os.read, (reader, 1 << 16)).start()
    wait_until_read((writer,), 300)
    assert 0.2 < time.monotonic() - begin_s < 60
    os.write(writer, TOLD)  # nobody reads
    begin_s = time.monotonic()
    wait_until_read((writer,), 0.2)
    assert time.monotonic() - begin_s >= 0.2
    os.close(reader)
    os.close(writer)
    wait_until_read((writer,), 20)


def test_lines_that_belong_together_are_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    sizes: list[int] = []

    class Counted(io.FileIO):
        def write(self, data: Any) -> int:
            sizes.append(len(data))
            return super().write(data)

    trace = "".join(f"line {i}\n" for i in range(100))
    with io.TextIOWrapper(io.BufferedWriter(Counted(writer, "w")), line_buffering=True) as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        print_at_once(trace)
        assert sizes == [len(trace)]
        print("two", "words", sep="\n", file=stream)  # the control: a write for each line
        assert len(sizes) > 2
    os.close(reader)


@pytest.mark.parametrize(
    ("out", "stopped", "expected"),
    [("2.0 s", True, "2.0 s\n"), ("2.0 s\n", True, "2.0 s\n"), ("2.0 s", False, "2.0 s")],
)
def test_lines_after_an_interrupted_bar_begin_below_it(
    out: str, stopped: bool, expected: str, capfd: pytest.CaptureFixture[str]
) -> None:
    for on_terminal in (True, False):
        process = subprocess.Popen(["printf", out], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None and process.stderr is not None
        output = Output()
        output.forward(process.stdout, process.stderr)
        process.wait(200)
        output.end(stopped, on_terminal)
        assert capfd.readouterr().out == (expected + "\x1b[?25h" if on_terminal else out)
