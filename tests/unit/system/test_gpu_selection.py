"""Choice of the device with and without GPUs. No test needs a GPU."""

import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from hpcsync.system import gpu_selection
from hpcsync.system.gpu_selection import Found, Gpu
from tests.unit.jobs import refusal

NONE = Found(0, "torch sees no GPU")
TWO = Found(2, "")
UNUSABLE = Found(2, "CuPy is not installed")


class CuPy(ModuleType):
    """Replacement of CuPy with this many GPUs, or with a failure."""

    __version__ = "14.2.0"

    def __init__(self, devices: int, error: Exception | None = None) -> None:
        super().__init__("cupy")
        self.used: list[int] = []

        def count() -> int:
            if error is not None:
                raise error
            return devices

        runtime = SimpleNamespace(getDeviceCount=count, deviceGetPCIBusId="0000:{:02x}:00.0".format)
        device = lambda i: SimpleNamespace(use=lambda: self.used.append(i))  # noqa: E731
        self.cuda = SimpleNamespace(runtime=runtime, is_available=lambda: devices > 0, Device=device)


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> CuPy:
    """Simulate a machine with two GPUs."""
    cupy = CuPy(2)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return cupy


# ---- what there is ----


def test_two_gpus_are_found(two: CuPy) -> None:
    assert gpu_selection.found() == TWO


@pytest.mark.parametrize(("built_for", "why"), [("13.0", NONE.why), (None, "torch is built without CUDA")])
def test_torch_has_no_gpu(two: CuPy, monkeypatch: pytest.MonkeyPatch, built_for: str | None, why: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    assert gpu_selection.found() == Found(0, why)


@pytest.mark.parametrize(("found", "line"), [(NONE, ""), (TWO, ""), (UNUSABLE, f"GPUs are not used: {UNUSABLE.why}\n")])
def test_unused_gpus_are_reported(found: Found, line: str) -> None:
    assert found.unused == line


def test_torch_that_fails(two: CuPy, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> bool:
        raise RuntimeError("no driver\nat all")

    monkeypatch.setattr(torch.cuda, "is_available", fail)
    assert gpu_selection.found() == (0, "torch does not work: no driver")


@pytest.mark.parametrize(
    ("cupy", "why"),
    [
        (None, "CuPy is not installed"),
        (CuPy(0), "CuPy 14.2.0 sees no GPU"),
        (CuPy(2, RuntimeError("old driver\nmore")), "CuPy 14.2.0 does not work: old driver"),
        (
            CuPy(2, ImportError("\n=====\nFailed to import CuPy.\n")),
            "CuPy 14.2.0 does not work: Failed to import CuPy.",
        ),
        (CuPy(2, OSError()), "CuPy 14.2.0 does not work: OSError"),
    ],
)
def test_cupy_that_does_not_work(two: CuPy, monkeypatch: pytest.MonkeyPatch, cupy: CuPy | None, why: str) -> None:
    if cupy is None:
        monkeypatch.delitem(sys.modules, "cupy")
        monkeypatch.setattr(sys, "path", [])
    else:
        monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert gpu_selection.found() == (2, why)


def test_found_needs_neither_gpu_nor_cupy() -> None:
    """Runs on any machine."""
    found = gpu_selection.found()
    assert (found.devices > 0) or found.why.startswith("torch ")


def test_import_loads_neither_torch_nor_cupy() -> None:
    code = (
        "import sys, hpcsync.system.gpu_selection, hpcsync.mpi.transport.subprocess_probe;"
        "sys.exit(bool({'torch', 'cupy', 'mpi4py'} & sys.modules.keys()))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- what is chosen ----


@pytest.mark.parametrize(
    ("device", "window", "found", "chosen"),
    [
        ("auto", "auto", TWO, "cuda"),
        ("auto", "auto", NONE, "cpu"),
        ("auto", "auto", UNUSABLE, "cpu"),
        ("auto", "host", TWO, "cpu"),
        ("auto", "host", NONE, "cpu"),
        ("auto", "ipc", TWO, "cuda"),
        ("cpu", "auto", TWO, "cpu"),
        ("cpu", "host", TWO, "cpu"),
        ("cpu", "auto", NONE, "cpu"),
        ("cuda", "auto", TWO, "cuda"),
        ("cuda", "staged", TWO, "cuda"),
    ],
)
def test_the_device_of_a_run(device: str, window: str, found: Found, chosen: str) -> None:
    assert gpu_selection.choose(device, window, found) == chosen


@pytest.mark.parametrize(
    ("device", "window", "found", "message"),
    [
        ("cuda", "auto", NONE, 'cluster.device = "cuda": must be "auto" or "cpu" here: torch sees no GPU'),
        ("cuda", "ipc", NONE, 'cluster.device = "cuda": must be "auto" or "cpu" here: torch sees no GPU'),
        ("cuda", "auto", UNUSABLE, 'cluster.device = "cuda": must be "auto" or "cpu" here: CuPy is not installed'),
        ("auto", "mpi", NONE, 'cluster.window = "mpi": must be "auto" or "host" here: torch sees no GPU'),
        ("auto", "ipc", UNUSABLE, 'cluster.window = "ipc": must be "auto" or "host" here: CuPy is not installed'),
        ("auto", "staged", NONE, 'cluster.window = "staged": must be "auto" or "host" here: torch sees no GPU'),
    ],
)
def test_a_job_that_needs_a_gpu_is_refused_without_one(device: str, window: str, found: Found, message: str) -> None:
    assert gpu_selection.needed(device, window)
    assert refusal(gpu_selection.choose, device, window, found) == message


def test_values_that_need_no_gpu() -> None:
    assert not any(
        gpu_selection.needed(*asked) for asked in [("auto", "auto"), ("auto", "host"), ("cpu", "auto"), ("cpu", "host")]
    )


# ---- which GPU ----


@pytest.mark.parametrize(("local_rank", "devices", "index"), [(0, 1, 0), (3, 1, 0), (1, 4, 1), (5, 4, 1), (7, 2, 1)])
def test_ranks_of_a_node_take_gpus_in_turn(local_rank: int, devices: int, index: int) -> None:
    assert gpu_selection.index({"OMPI_COMM_WORLD_LOCAL_RANK": str(local_rank)}, devices) == index


def test_a_claimed_gpu_is_current_for_both(two: CuPy, monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU of {device}")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "3")
    device = gpu_selection.claim("cuda")
    assert (device, current, two.used) == (torch.device("cuda", 1), [1], [1])
    assert gpu_selection.describe(device) == Gpu("GPU of cuda:1", "0000:01:00.0")


def test_claiming_the_cpu_changes_nothing() -> None:
    assert gpu_selection.claim("cpu") == torch.device("cpu")


# ---- who shares ----

A, B = Gpu("NVIDIA H200", "0000:01:00.0"), Gpu("NVIDIA H200", "0000:02:00.0")


@pytest.mark.parametrize(
    ("rows", "lines"),
    [
        ([], []),
        ([(0, "n1", A)], ["GPU 0000:01:00.0 (NVIDIA H200) of host n1: rank 0"]),
        (
            [(3, "n1", A), (1, "n1", A), (0, "n1", A), (2, "n1", A)],
            ["GPU 0000:01:00.0 (NVIDIA H200) of host n1: ranks 0 to 3, which share it"],
        ),
        (
            [(rank, "n1", (A, B)[rank % 2]) for rank in range(5)],
            [
                "GPU 0000:01:00.0 (NVIDIA H200) of host n1: ranks 0, 2, 4, which share it",
                "GPU 0000:02:00.0 (NVIDIA H200) of host n1: ranks 1 and 3, which share it",
            ],
        ),
        (
            [(1, "n2", A), (0, "n1", A)],
            [
                "GPU 0000:01:00.0 (NVIDIA H200) of host n1: rank 0",
                "GPU 0000:01:00.0 (NVIDIA H200) of host n2: rank 1",
            ],
        ),
    ],
)
def test_one_line_for_each_gpu(rows: list[tuple[int, str, Gpu]], lines: list[str]) -> None:
    assert gpu_selection.users(rows) == lines


NOTHING, HERE = Found(0, "torch sees no GPU"), Found(2, "")


@pytest.mark.parametrize(
    ("all_ranks", "common"),
    [
        ([HERE, HERE], HERE),
        ([HERE, Found(4, "")], Found(4, "")),
        ([NOTHING, NOTHING], NOTHING),
        ([HERE, NOTHING], Found(2, "rank 1 on n1: torch sees no GPU")),
        ([Found(2, "CuPy is not installed"), HERE], Found(2, "rank 0 on n0: CuPy is not installed")),
    ],
)
def test_gpus_are_used_only_if_all_ranks_can(all_ranks: list[Found], common: Found) -> None:
    assert gpu_selection.common([(rank, f"n{rank}", found) for rank, found in enumerate(all_ranks)]) == common
