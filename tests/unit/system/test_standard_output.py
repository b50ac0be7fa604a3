"""Standard output into a pipe that nobody reads any more, onto a full disk, and none at all."""

import os
import subprocess
import sys

import pytest

from hpcsync.system.standard_output import READER_LEFT

BEGIN = "import sys; from hpcsync.system.standard_output import reader_left, may_fail\n"
FORGIVING = (
    BEGIN
    + """
with may_fail():
    for line in range(3):
        print(line, flush=True)
    print("to its end", reader_left(), file=sys.stderr)
    sys.exit({status})
"""
)
PLAIN = "import sys; print(0, flush=True); print('to its end', file=sys.stderr)"


def without_a_reader(*arguments: str) -> subprocess.CompletedProcess[str]:
    read, write = os.pipe()
    os.close(read)
    try:
        return subprocess.run(
            [sys.executable, *arguments], stdout=write, stderr=subprocess.PIPE, text=True, check=False, timeout=200
        )
    finally:
        os.close(write)


@pytest.mark.parametrize(("status", "expected"), [(0, READER_LEFT), (2, 2)])
def test_a_program_comes_to_its_end(status: int, expected: int) -> None:
    program = without_a_reader("-c", FORGIVING.format(status=status))
    assert (program.returncode, program.stderr) == (expected, "to its end True\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_unbuffered_output_is_written_when_it_is_printed(monkeypatch: pytest.MonkeyPatch, unbuffered: str) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    program = without_a_reader("-c", FORGIVING.format(status=0).replace(", flush=True", ""))
    assert (program.returncode, program.stderr) == (READER_LEFT, f"to its end {bool(unbuffered)}\n")


def test_one_with_plain_output_does_not() -> None:
    program = without_a_reader("-c", PLAIN)
    assert "BrokenPipeError" in program.stderr and "to its end" not in program.stderr.splitlines()


def test_a_reader_that_stays_reads_everything() -> None:
    line = [sys.executable, "-c", FORGIVING.format(status=0)]
    program = subprocess.run(line, capture_output=True, text=True, check=False, timeout=200)
    assert (program.returncode, program.stdout, program.stderr) == (0, "0\n1\n2\n", "to its end False\n")


@pytest.mark.parametrize("arguments", [("cite", "--help"), ("plan", "--help")])
def test_a_command_ends_without_a_message(arguments: tuple[str, ...]) -> None:
    program = without_a_reader("-m", "hpcsync", *arguments)
    assert (program.returncode, program.stderr) == (READER_LEFT, "")


@pytest.mark.parametrize(("status", "expected"), [(0, 1), (2, 2)])
def test_a_program_comes_to_its_end_if_the_disk_is_full(status: int, expected: int) -> None:
    line = [sys.executable, "-c", FORGIVING.format(status=status)]
    with open("/dev/full", "w") as full:
        program = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=200)
    message = "hpcsync: standard output: No space left on device\n"
    assert (program.returncode, program.stderr) == (expected, f"to its end False\n{message}")


@pytest.mark.parametrize("opens", [True, False])
def test_closed_standard_streams_are_replaced_before_another_file_gets_their_number(opens: bool) -> None:
    code = "import os; from hpcsync.system.standard_output import prepare; "
    code += ("prepare(); " if opens else "") + "os._exit(os.open('/dev/null', os.O_RDONLY) == 1)"
    line = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-c", code]
    assert subprocess.run(line, check=False, timeout=200).returncode == (not opens)


def test_a_command_needs_no_standard_output() -> None:
    line = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-m", "hpcsync", "launch", "-n", "1", "true"]
    assert subprocess.run(line, check=False, timeout=200).returncode == 0


@pytest.mark.parametrize("columns", ["0", "40"])
def test_an_unknown_width_hides_nothing(columns: str) -> None:
    code = "from hpcsync.system.standard_output import prepare; prepare(); "
    code += "from rich.console import Console; Console().print('seen')"
    environ = {**os.environ, "COLUMNS": columns}
    program = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, check=False, timeout=200)
    assert program.stdout == b"seen\n"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_characters_that_the_encoding_lacks_are_escaped(encoding: str) -> None:
    code = "from hpcsync.system.standard_output import prepare; prepare(); print('\\u2192 \\udcff')"
    environ = {**os.environ, "PYTHONIOENCODING": encoding}
    program = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, check=False, timeout=200)
    arrow = "\u2192" if encoding == "utf-8" else "\\u2192"
    assert (program.returncode, program.stdout.decode()) == (0, f"{arrow} \\udcff\n")
