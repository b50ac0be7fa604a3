"""Which GPU a rank uses, or why it uses none. Importing this loads neither torch nor CuPy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from hpcsync.config.errors import JobError, shown
from hpcsync.system import launcher

if TYPE_CHECKING:
    import torch

WINDOWS = ("mpi", "ipc", "staged")  # values of cluster.window that need a GPU


class Found(NamedTuple):
    """`devices`: the GPUs that this process can see. `why`: why none of them can be used; "" if they can."""

    devices: int
    why: str

    @property
    def unused(self) -> str:
        """What to tell where there are GPUs and a run takes the CPU all the same; "" where there is nothing to tell."""
        return f"GPUs are not used: {self.why}\n" if self.devices and self.why else ""


class Gpu(NamedTuple):
    """`bus_id`: its place on the PCI bus of its host, such as 0000:01:00.0."""

    name: str
    bus_id: str


def found() -> Found:
    """What there is for torch and CuPy to use together. Raises nothing."""
    try:
        import torch

        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        none = "torch sees no GPU" if torch.version.cuda else "torch is built without CUDA"
    except Exception as error:
        return Found(0, f"torch does not work: {_line(error)}")
    return Found(devices, _cupy_fails() if devices else none)


def _cupy_fails() -> str:
    name = "CuPy"
    try:
        import cupy

        name = f"CuPy {cupy.__version__}"
        cupy.cuda.runtime.getDeviceCount()  # unlike is_available it says what is wrong
        return "" if cupy.cuda.is_available() else f"{name} sees no GPU"
    except ModuleNotFoundError as error:
        if error.name == "cupy":
            return "CuPy is not installed"
        return f"{name} does not work: {_line(error)}"
    except Exception as error:
        return f"{name} does not work: {_line(error)}"


def _line(error: Exception) -> str:
    """The first words of an error: CuPy's go on for a page."""
    return next((line.strip() for line in str(error).splitlines() if line.strip(" =")), type(error).__name__)


def common(everybody: Sequence[tuple[int, str, Found]]) -> Found:
    """What all ranks have to use: as many devices as the best, and why not from the first that has none to use.

    everybody: rank, host and what it found.
    """
    devices = max(found.devices for _, _, found in everybody)
    if all(found.why == everybody[0][2].why for _, _, found in everybody):
        return Found(devices, everybody[0][2].why)
    return Found(devices, next(f"rank {rank} on {host}: {found.why}" for rank, host, found in everybody if found.why))


def needed(device: str, window: str) -> bool:
    """Whether these values of cluster.device and cluster.window leave no choice but a GPU."""
    return device == "cuda" or window in WINDOWS


def choose(device: str, window: str, found: Found) -> str:
    """ "cuda" or "cpu", for these values of cluster.device and cluster.window.

    Raises JobError if they need a GPU and there is none to use.
    """
    if found.devices and not found.why:
        return "cpu" if device == "cpu" or window == "host" else "cuda"
    if device == "cuda":
        raise JobError(f'cluster.device = {shown(device)}: must be "auto" or "cpu" here: {found.why}')
    if window in WINDOWS:
        raise JobError(f'cluster.window = {shown(window)}: must be "auto" or "host" here: {found.why}')
    return "cpu"


def index(environ: Mapping[str, str] | None = None, devices: int | None = None) -> int:
    """The number of this process's GPU among those that it can see, by default all that torch finds: ranks of a node
    take them in turn, and share them where there are more ranks."""
    if devices is None:
        import torch

        devices = torch.cuda.device_count()
    return launcher.local_rank(environ) % devices


def claim(device: str) -> torch.device:
    """The device to compute on: for "cuda" this process's GPU, from now on the current one of torch and of CuPy in this
    thread; for "cpu" the CPU."""
    import torch

    if device == "cpu":
        return torch.device("cpu")
    import cupy

    i = index()
    torch.cuda.set_device(i)
    cupy.cuda.Device(i).use()
    return torch.device("cuda", i)


def describe(device: torch.device) -> Gpu:
    """What the others are told of a claimed GPU."""
    import cupy
    import torch

    return Gpu(torch.cuda.get_device_name(device), cupy.cuda.runtime.deviceGetPCIBusId(device.index))


def versions() -> dict[str, str]:
    """Of what computes on GPUs here."""
    import cupy
    import torch

    return {"cupy_version": cupy.__version__, "cuda_version": str(torch.version.cuda)}


def users(rows: Sequence[tuple[int, str, Gpu]]) -> list[str]:
    """One line for each GPU: which ranks use it. `rows`: rank, host and GPU, one row for each rank that has one."""
    ranks: dict[tuple[str, Gpu], list[int]] = {}
    for rank, host, gpu in sorted(rows):
        ranks.setdefault((host, gpu), []).append(rank)
    return [f"GPU {gpu.bus_id} ({gpu.name}) of host {host}: {_ranks(its)}" for (host, gpu), its in ranks.items()]


def _ranks(ranks: list[int]) -> str:
    first, last = ranks[0], ranks[-1]
    if first == last:
        return f"rank {first}"
    if len(ranks) == 2:
        words = f"{first} and {last}"
    elif ranks == list(range(first, last + 1)):
        words = f"{first} to {last}"
    else:
        words = ", ".join(map(str, ranks))
    return f"ranks {words}, which share it"
