"""Selection of the GPU that a rank uses, or the reason why it uses none.

Importing this module loads neither torch nor CuPy.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from hpcsync.config.errors import JobError, shown
from hpcsync.system import rank_environment

if TYPE_CHECKING:
    import torch

WINDOWS = ("mpi", "ipc", "staged")  # values of cluster.window that need a GPU


class Found(NamedTuple):
    """GPUs found by a process.

    Attributes
    ----------
    devices
        Number of GPUs that this process can see.
    why
        Reason why none of them can be used; "" if they can.
    """

    devices: int
    why: str

    @property
    def unused(self) -> str:
        """Line to print if there are GPUs that cannot be used; otherwise ""."""
        return f"GPUs are not used: {self.why}\n" if self.devices and self.why else ""


class Gpu(NamedTuple):
    """A GPU: its name and its address on the PCI bus of its host, such as 0000:01:00.0."""

    name: str
    bus_id: str


def found() -> Found:
    """Return the GPUs that both torch and CuPy can use. Never raises."""
    try:
        import torch

        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        none = "torch sees no GPU" if torch.version.cuda else "torch is built without CUDA"
    except Exception as error:
        return Found(0, f"torch does not work: {_line(error)}")
    return Found(devices, _cupy_fails() if devices else none)


def _cupy_fails() -> str:
    """Return why CuPy cannot be used; "" if it can."""
    name = "CuPy"
    try:
        import cupy

        name = f"CuPy {cupy.__version__}"
        cupy.cuda.runtime.getDeviceCount()  # unlike is_available, it raises an error with the reason
        return "" if cupy.cuda.is_available() else f"{name} sees no GPU"
    except ModuleNotFoundError as error:
        if error.name == "cupy":
            return "CuPy is not installed"
        return f"{name} does not work: {_line(error)}"
    except Exception as error:
        return f"{name} does not work: {_line(error)}"


def _line(error: Exception) -> str:
    """Return the first line of an error message: those of CuPy fill a page."""
    return next((line.strip() for line in str(error).splitlines() if line.strip(" =")), type(error).__name__)


def common(all_ranks: Sequence[tuple[int, str, Found]]) -> Found:
    """Combine what all ranks found.

    Parameters
    ----------
    all_ranks : sequence of (int, str, Found)
        Rank, host and result of `found`, for each rank.

    Returns
    -------
    Found
        The largest number of devices, and the reason of the first rank that cannot use its GPUs.
    """
    devices = max(found.devices for _, _, found in all_ranks)
    if all(found.why == all_ranks[0][2].why for _, _, found in all_ranks):
        return Found(devices, all_ranks[0][2].why)
    return Found(devices, next(f"rank {rank} on {host}: {found.why}" for rank, host, found in all_ranks if found.why))


def needed(device: str, window: str) -> bool:
    """Return True if these values of cluster.device and cluster.window need a GPU."""
    return device == "cuda" or window in WINDOWS


def choose(device: str, window: str, found: Found) -> str:
    """Return "cuda" or "cpu" for these values of cluster.device and cluster.window.

    Raises
    ------
    JobError
        If they need a GPU and none can be used.
    """
    if found.devices and not found.why:
        return "cpu" if device == "cpu" or window == "host" else "cuda"
    if device == "cuda":
        raise JobError(f'cluster.device = {shown(device)}: must be "auto" or "cpu" here: {found.why}')
    if window in WINDOWS:
        raise JobError(f'cluster.window = {shown(window)}: must be "auto" or "host" here: {found.why}')
    return "cpu"


def index(environ: Mapping[str, str] = os.environ, devices: int | None = None) -> int:
    """Return the index of this process's GPU among the `devices` that it can see, by default all that torch finds.

    The ranks of a node take the GPUs in turn, and share them if there are more ranks than GPUs.
    """
    if devices is None:
        import torch

        devices = torch.cuda.device_count()
    return rank_environment.local_rank(environ) % devices


def claim(device: str) -> torch.device:
    """Return the device to compute on; for "cuda" make this process's GPU current in torch and CuPy (this thread)."""
    import torch

    if device == "cpu":
        return torch.device("cpu")
    import cupy

    i = index()
    torch.cuda.set_device(i)
    cupy.cuda.Device(i).use()
    return torch.device("cuda", i)


def describe(device: torch.device) -> Gpu:
    """Return the name and the address of a claimed GPU."""
    import cupy
    import torch

    return Gpu(torch.cuda.get_device_name(device), cupy.cuda.runtime.deviceGetPCIBusId(device.index))


def versions() -> dict[str, str]:
    """Return the versions of CuPy and CUDA."""
    import cupy
    import torch

    return {"cupy_version": cupy.__version__, "cuda_version": str(torch.version.cuda)}


def users(rows: Sequence[tuple[int, str, Gpu]]) -> list[str]:
    """Return a line for each GPU with the ranks that use it.

    Parameters
    ----------
    rows : sequence of (int, str, Gpu)
        Rank, host and GPU, for each rank that has a GPU.
    """
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
