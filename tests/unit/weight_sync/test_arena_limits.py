"""Where memory for arenas ends, and where it does not: limits of the process, and a full /dev/shm. Real limits, in
processes of their own."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from vime.weight_sync import arena

ROOT = Path(arena.__file__).parents[2]

NEEDS_16_MIB = """
import os
from vime.weight_sync.arena import ArenaError, Stamp, create_arena
stamp = Stamp()
descriptors = len(os.listdir("/proc/self/fd"))
try:
    create_arena(16 << 20)
except ArenaError as error:
    print(error)
assert len(os.listdir("/proc/self/fd")) == descriptors
create_arena(1 << 16).tensor.fill_(1)  # a smaller one is to be had
"""

SYNC_IN_A_FULL_DEV_SHM = """
import os
from tests.unit.backends.megatron_utils.update_weight.toy_engine import Rank, ToyEngine, digests, expected_digests
from vime.models.layout import ParallelLayout
from vime.types import Slot

if __name__ == "__main__":
    with open("/dev/shm/full", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            print("filled:", error.strerror)
    engine, rank = ToyEngine(0, Slot(0, 1)), Rank(0, ParallelLayout(world_size=1))
    rank.update.connect_rollout_engines([engine.address])
    rank.train(1)
    rank.update.update_weights(1)
    print("synced:", digests(engine.address) == expected_digests(1, 1))
    print("left:", os.statvfs("/dev/shm").f_bavail, os.listdir("/dev/shm"))
    engine.stop()
"""


# What would happen if an arena were a file there.
FILE_IN_A_FULL_DEV_SHM = SYNC_IN_A_FULL_DEV_SHM.replace(
    "import os\n",
    "import os, sys\n"
    "def file(name, flags): return os.open(f'/dev/shm/{name}', os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)\n"
    "os.memfd_create = file\n"
    "sys.excepthook = lambda kind, error, _: print(f'{kind.__name__}: {error}')\n",
    1,
)


def run(*command: str, **options: object) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, env=env, **options)  # type: ignore[call-overload]


def limit_file_size() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))


def test_memory_that_the_kernel_refuses_is_one_error_in_words() -> None:
    done = run(sys.executable, "-c", NEEDS_16_MIB, preexec_fn=limit_file_size)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "16777216 bytes of shared memory for the weights: [Errno 27] File too large"


def test_address_space_that_ends_is_one_error_in_words() -> None:
    code = NEEDS_16_MIB.replace(
        "descriptors =",
        "import resource\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20), used + (8 << 20)))\n"
        "descriptors =",
    )
    done = run(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "16777216 bytes of shared memory for the weights: [Errno 12] Cannot allocate memory"


def with_small_dev_shm(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program with a /dev/shm of 64 KiB of its own."""
    mount = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"'
    namespace = ("unshare", "--mount", "--propagation", "private", "sh", "-c", mount, "sh")
    try:
        allowed = run(*namespace, "true")
    except FileNotFoundError:
        pytest.skip("util-linux's unshare is not installed, so /dev/shm cannot be made small for one process")
    if allowed.returncode != 0:
        pytest.skip(f"this user may not mount in a namespace of its own: {allowed.stderr.strip()}")
    script = folder / "sync.py"
    script.write_text(code)
    return run(*namespace, sys.executable, str(script))


def test_a_full_dev_shm_does_not_matter(tmp_path: Path) -> None:
    """A sync of a toy engine: arenas have no file in /dev/shm."""
    done = with_small_dev_shm(SYNC_IN_A_FULL_DEV_SHM, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["filled: No space left on device", "synced: True", "left: 0 ['full']"]


def test_a_full_file_system_would_be_one_error_in_words(tmp_path: Path) -> None:
    done = with_small_dev_shm(FILE_IN_A_FULL_DEV_SHM, tmp_path)
    errors = [line for line in done.stdout.splitlines() if "Error" in line]
    assert len(errors) == 1, done.stdout + done.stderr
    assert re.fullmatch(
        r"ArenaError: \d+ bytes of shared memory for the weights: \[Errno 28\] No space left on device", errors[0]
    )
