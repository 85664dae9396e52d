"""What a device is: an NVIDIA GPU (``cuda``) or a process on the CPU (``cpu``). All above the kernels is the same."""

from __future__ import annotations

import ctypes
import ctypes.util
from functools import cache
from typing import Literal

from vime.errors import ConfigError

Device = Literal["cuda", "cpu"]


@cache
def gpu_count() -> int:
    """GPUs that this process may use, asked of the driver itself: importing torch to know this would take seconds."""
    try:
        driver = ctypes.CDLL(ctypes.util.find_library("cuda") or "libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def resolve_device(requested: str) -> Device:
    """``--device`` as asked, or what is there.

    Raises:
        ConfigError: ``cuda`` was asked for and the driver shows no GPU.
    """
    if requested == "cpu":
        return "cpu"
    if gpu_count() > 0:
        return "cuda"
    if requested == "cuda":
        raise ConfigError(["--device cuda: the CUDA driver shows no GPU here; leave it out or say --device cpu"])
    return "cpu"
