"""What is here to run on: devices and memory, found out without importing torch."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from vime.cluster.device import Device, gpu_count, resolve_device
from vime.config import Config

GIB = 1 << 30


@dataclass(frozen=True)
class Machine:
    """Devices of this machine. In a cluster the other nodes are taken to be like it."""

    device: Device
    gpus: int
    gpu_bytes: int | None  # memory of the smallest GPU; None if unknown
    gpu_name: str
    host_bytes: int  # memory that processes may use, a container's limit included
    joined: bool = False  # an existing Ray cluster, whose other nodes are not looked at

    def __str__(self) -> str:
        if self.device == "cpu":
            return f"CPU, {self.host_bytes / GIB:.0f} GiB"
        memory = f", {self.gpu_bytes / GIB:.0f} GiB each" if self.gpu_bytes else ""
        return f"{self.gpus} x {self.gpu_name or 'GPU'}{memory}; host {self.host_bytes / GIB:.0f} GiB"


def size(count: float) -> str:
    """Bytes as a person reads them: "1.5 GiB"."""
    for unit, name in ((GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= 0.95 * unit:
            return f"{count / unit:.1f} {name}"
    return f"{count:.0f} bytes" if count else "0"


def look(config: Config) -> Machine:
    """The machine as this process sees it.

    Raises:
        ConfigError: ``--device cuda`` and no GPU.
    """
    joined = config.cluster.existing_ray is not None
    device = resolve_device(config.cluster.device)
    size, name = _gpu_memory() if device == "cuda" else (None, "")
    return Machine(device, gpu_count() if device == "cuda" else 0, size, name, host_memory(), joined)


def host_memory() -> int:
    """Bytes of memory here: physical, or the container's limit where that is less."""
    import psutil

    total = int(psutil.virtual_memory().total)
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(file).read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return total


def _gpu_memory() -> tuple[int | None, str]:
    command = ["nvidia-smi", "--query-gpu=memory.total,name", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout
        rows = [line.split(",", 1) for line in output.strip().splitlines()]
        return min(int(row[0]) for row in rows) << 20, rows[0][1].strip()
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None, ""
