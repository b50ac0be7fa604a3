"""Several hosts on one machine, for tests and benchmarks.

A host is a network namespace on a bridge, with its own address, host name, /dev/shm and processes. The file system is
shared, as a cluster's home is.

    with Hosts(3) as hosts:
        hosts.run([*hosts.mpiexec([1, 2, 3]), "-n", "3", "hostname"], Path.cwd(), os.environ)

The launcher runs on the host `head`, which holds the bridge. A host is a process that reads its standard input; when
this process ends, however it does, that input ends, and with it the host, its processes, its address and its cable.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from hpcsync.system import launcher

NETWORK = "10.87.0"
AGENT = Path(__file__).with_name("host_agent")
TOOLS = ("ip", "unshare", "nsenter", "mount", "hostname")

HEAD = "unshare --net --uts --mount"
HOST = "unshare --net --uts --mount --ipc --pid --fork --kill-child --mount-proc"
BOOT = """
set -e
hostname {name}
mount --bind {folder}/hosts /etc/hosts
ip link set lo up
{more}
echo up
exec cat
"""
OWN = """
mount -t tmpfs tmpfs /dev/shm
mount -t sysfs sysfs /sys
"""
CONGESTION = "echo {} > /proc/sys/net/ipv4/tcp_congestion_control"
BRIDGE = f"""
ip link add br0 type bridge
ip address add {NETWORK}.254/24 dev br0
ip link set br0 up
"""


class Unavailable(Exception):
    """Hosts cannot be made on this machine or by this user, for the reason in the message."""


class Hosts:
    """Hosts n1 to n{n} and head, until `close`.

    Parameters
    ----------
    n
        Number of hosts.
    rate
        Rate at which both ends of every cable send at most, as tc writes it; None for no limit.
    congestion
        TCP's congestion control on the hosts; None for that of the machine.
    burst
        Bytes that pass a cable at once after a pause, as tc writes them.

    Raises
    ------
    Unavailable
        If hosts cannot be made.
    """

    def __init__(self, n: int, rate: str | None = None, congestion: str | None = None, burst: str = "128kb") -> None:
        if os.geteuid() != 0:
            raise Unavailable("only root may make network namespaces")
        if missing := [tool for tool in TOOLS if not shutil.which(tool)]:
            raise Unavailable(f"not installed: {', '.join(missing)}")
        self.n = n
        self._processes: list[subprocess.Popen[str]] = []
        self._folder = Path(tempfile.mkdtemp(prefix="hpcsync-hosts-", dir="/run"))
        names = {f"n{i}": f"{NETWORK}.{i}" for i in range(1, n + 1)}
        addresses = {"localhost": "127.0.0.1", "head": f"{NETWORK}.254", **names}
        (self._folder / "hosts").write_text("".join(f"{a} {name}\n" for name, a in addresses.items()))
        try:
            self._head = self._boot("head", HEAD, BRIDGE)
            for name, address in names.items():
                own = OWN if congestion is None else f"{OWN}\n{CONGESTION.format(congestion)}"
                self._plug(name, self._boot(name, HOST, own), address, rate, burst)
        except (OSError, subprocess.CalledProcessError) as error:
            self.close()
            raise Unavailable(f"hosts cannot be made here: {error}") from None

    def _boot(self, name: str, unshare: str, more: str) -> int:
        """Start a host; the id of the process that holds its namespaces."""
        script = BOOT.format(name=name, folder=self._folder, more=more)
        with open(self._folder / f"{name}.log", "w+") as log:
            process = subprocess.Popen(
                [*unshare.split(), "sh", "-c", script],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
            self._processes.append(process)
            assert process.stdout is not None
            if process.stdout.readline() != "up\n":
                log.seek(0)
                raise OSError(f"{name}: {log.read().strip()}")
        pid = process.pid
        if "--fork" in unshare:
            pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text())
        (self._folder / name).write_text(str(pid))
        return pid

    def _plug(self, name: str, pid: int, address: str, rate: str | None, burst: str) -> None:
        """Connect the bridge and the host by a cable, whose both ends send at `rate` at most."""
        head, host = (["nsenter", "--target", str(target), "--net"] for target in (self._head, pid))
        port = f"to-{name}"
        lines = [
            [*head, *f"ip link add {port} type veth peer name eth0 netns {pid}".split()],
            [*head, *f"ip link set {port} master br0 up".split()],
            [*host, *f"ip address add {address}/24 dev eth0".split()],
            [*host, *"ip link set eth0 up".split()],
        ]
        if rate is not None:
            shape = f"root tbf rate {rate} burst {burst} latency 100ms".split()
            lines += [[*head, "tc", "qdisc", "add", "dev", port, *shape]]
            lines += [[*host, "tc", "qdisc", "add", "dev", "eth0", *shape]]
        for line in lines:
            subprocess.run(line, check=True, capture_output=True)

    def mpiexec(self, numbers: Iterable[int], per_host: int = 1) -> list[str]:
        """Return the command line of this Python's MPI launcher, for `per_host` ranks on each of these hosts."""
        names = [f"n{i}" for i in numbers]
        line = launcher.mpiexec()
        version = subprocess.run([*line, "--version"], capture_output=True, text=True, check=True).stdout
        if "HYDRA" in version:
            return [
                *line,
                "-launcher",
                "ssh",
                "-launcher-exec",
                str(AGENT),
                "-hosts",
                ",".join(names),
                "-ppn",
                f"{per_host}",
            ]
        hosts = ",".join(f"{name}:{per_host}" for name in names)
        given = ("-x", "PYTHONPATH", "-x", "OMP_NUM_THREADS")  # the hosts share this machine's cores
        return [*line, "--prtemca", "plm_ssh_agent", str(AGENT), *given, "--host", hosts]

    def inside(self, host: str, cwd: Path, line: Sequence[str]) -> list[str]:
        """Return the command line that runs a program on a host: n1 and so on, or head."""
        spaces = ["--net", "--uts", "--mount", *(["--ipc", "--pid"] if host != "head" else [])]
        return ["nsenter", "--target", f"{self.pid(host)}", *spaces, "env", f"--chdir={cwd}", *line]

    def pid(self, host: str) -> int:
        """Return the id of the process that holds a host's namespaces."""
        return int((self._folder / host).read_text())

    def environ(self) -> dict[str, str]:
        """Return the variable by which the launcher's agent finds the hosts."""
        return {"HPCSYNC_HOSTS": str(self._folder)}

    def run(
        self, line: Sequence[str], cwd: Path, environ: Mapping[str, str], timeout_s: float = 240.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on head to its end. Raises subprocess.TimeoutExpired, the program killed."""
        return subprocess.run(
            self.inside("head", cwd, line),
            env={**environ, **self.environ()},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def received_bytes(self, number: int) -> int:
        """Return the bytes that have come to host n{number} through its cable so far."""
        line = f"nsenter --target {self._head} --net ip -json -stats link show to-n{number}".split()
        (port,) = json.loads(subprocess.run(line, check=True, capture_output=True, text=True).stdout)
        return int(port["stats64"]["tx"]["bytes"])

    def close(self) -> None:
        """Remove every host with all that runs there; harmless when repeated."""
        for process in self._processes:
            assert process.stdin is not None and process.stdout is not None
            process.kill()
            process.stdin.close()
            process.stdout.close()
            process.wait(10)
        self._processes.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
