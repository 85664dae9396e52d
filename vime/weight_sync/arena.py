"""Arenas: blocks of trainer memory that the workers of an engine map into their own address space.

The trainer's parameters live in the arena itself, so a sync reads them where they are and nothing is copied to be
sent. An arena is described by a small JSON-able *handle*; a process of the same user on the same node opens it. A
handle says its own checksum: a wrong one could map other memory, which then would be copied without a fault. (That the
memory holds the version that was told, a rank's stamp says; that it was copied unchanged, the copy's checksums.)

On a CPU an arena is a *memfd*: shared memory that has no name in any file system. Whoever knows the creator's pid and
the descriptor's number opens it through ``/proc/PID/fd/N``; the kernel frees it when the last process that has it open
or mapped is gone, so ``kill -9`` of everything leaves nothing behind, and the size of ``/dev/shm`` (64 MiB in many
containers) does not matter.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import socket
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vime.errors import VimeError

if TYPE_CHECKING:
    from vime.weight_sync.arena_cuda import CudaArena

Handle = dict[str, Any]

_ALIGNMENT = 4096


class ArenaError(VimeError):
    """Memory that cannot be had, shared, opened or read."""


def sealed(values: Handle) -> Handle:
    """A handle of these values, with their checksum."""
    return values | {"checksum": _checksum(values)}


def _checksum(values: Handle) -> str:
    kept = {key: value for key, value in values.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class Arena:
    """A block of shared memory owned by this process. ``tensor`` is all of it, flat uint8."""

    tensor: torch.Tensor
    fd: int

    def describe(self) -> Handle:
        """What another process needs for :func:`open_arena`."""
        status = os.fstat(self.fd)
        return sealed(
            {
                "kind": "memfd",
                "pid": os.getpid(),
                "fd": self.fd,
                "inode": status.st_ino,  # a recycled pid or descriptor would show another one
                "bytes": status.st_size,
            }
        )

    def close(self) -> None:
        """Give up the descriptor: nobody can open the arena any more; mappings, ours included, stay until dropped."""
        _ARENAS.pop(self.tensor.untyped_storage().data_ptr(), None)
        os.close(self.fd)


_ARENAS: dict[int, Arena] = {}  # by the address of the first byte; an arena lives until close() or the process's end


def create_arena(num_bytes: int, purpose: str = "weights") -> Arena:
    """A new zeroed arena of at least ``num_bytes``.

    Raises:
        ArenaError: less memory is free. Every page is taken now: memory that runs out at the first write instead
            would kill the process with SIGBUS, without a word.
    """
    size = max(-(-num_bytes // _ALIGNMENT) * _ALIGNMENT, _ALIGNMENT)
    free = free_memory()
    if size > free:
        raise ArenaError(
            f"{size / 2**30:.2f} GiB of shared memory are needed for the {purpose}, {free / 2**30:.2f} GiB are free; "
            "use a smaller model, fewer processes on this node, or more memory"
        )
    fd = os.memfd_create(f"vime-{purpose}", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, size)
        memory = mmap.mmap(fd, size)
    except OSError as error:
        os.close(fd)
        raise ArenaError(f"{size} bytes of shared memory for the {purpose}: {error}") from error
    arena = Arena(torch.frombuffer(memory, dtype=torch.uint8), fd)  # the tensor keeps the mapping alive
    _ARENAS[arena.tensor.data_ptr()] = arena
    return arena


def allocate(num_bytes: int) -> torch.Tensor:
    """The allocator for whoever lays out parameters: flat uint8 memory, in an arena of its own."""
    return create_arena(num_bytes).tensor


def arena_of(tensor: torch.Tensor) -> tuple[Arena | CudaArena, int]:
    """The arena that ``tensor`` lies in, and its offset there in bytes.

    Raises:
        ArenaError: other processes cannot map this memory.
    """
    if tensor.is_cuda:
        from vime.weight_sync.arena_cuda import cuda_arena_of

        return cuda_arena_of(tensor)
    storage = tensor.untyped_storage()
    arena = _ARENAS.get(storage.data_ptr())
    if arena is None:
        raise ArenaError(
            f"a parameter of {storage.nbytes()} bytes lies in private memory, so no engine can read it; "
            "parameters must be laid out in memory from vime.weight_sync.arena.allocate"
        )
    return arena, int(tensor.storage_offset()) * tensor.element_size()


def open_arena(handle: Handle) -> torch.Tensor:
    """Map another process's arena, read-only: flat uint8, [bytes]. Dropping the tensor unmaps it.

    Raises:
        ArenaError: the handle is not what its owner has made, the owner is gone, or this process may not look into it.
    """
    if handle.get("checksum") != _checksum(handle):
        raise ArenaError(
            f"the handle of the trainer's memory has changed on its way: its checksum is {_checksum(handle)}, it says "
            f"{handle.get('checksum')}: {handle}"
        )
    if handle.get("kind") == "cuda_ipc":
        from vime.weight_sync.arena_cuda import open_cuda_arena

        return open_cuda_arena(handle)
    if handle.get("kind") != "memfd":
        raise ArenaError(f"arena of unknown kind {handle.get('kind')!r}; trainer and engine run different versions?")
    path = f"/proc/{handle['pid']}/fd/{handle['fd']}"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ArenaError(
            f"cannot open the trainer's memory at {path}: {error.strerror}; the trainer process must be alive, on this "
            "node, and of the same user and PID namespace as the engine"
        ) from error
    try:
        status = os.fstat(fd)
        if (status.st_ino, status.st_size) != (handle["inode"], handle["bytes"]):
            raise ArenaError(f"{path} is no longer the arena it was: the trainer process has been replaced")
        memory = mmap.mmap(fd, status.st_size, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    with warnings.catch_warnings():  # torch has no read-only tensors; a stray write shall fault rather than hit weights
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(memory, dtype=torch.uint8)


class Stamp:
    """A page per trainer rank that says which version of the weights its arenas hold.

    A rank stamps the version when its weights are final and before it says so to anybody; a reader that finds another
    number would copy weights it was not told of, and refuses.
    """

    WRITING = -1  # the optimizer may be changing the weights

    def __init__(self) -> None:
        self.arena = create_arena(_ALIGNMENT, "version stamp")
        self._version, self._meetings = self.arena.tensor[:16].view(torch.int64).unbind()
        self.set(self.WRITING)

    def set(self, version: int) -> None:
        self._version.fill_(version)

    def count_meeting(self) -> None:
        """The rank is about to meet the others; who waits for it in vain can see how far it came."""
        self._meetings.add_(1)

    @staticmethod
    def meetings(page: torch.Tensor) -> int:
        return int(page[8:16].view(torch.int64))

    @staticmethod
    def read(page: torch.Tensor) -> int:
        return int(page[:8].view(torch.int64))


def free_memory() -> int:
    """Bytes that this process could still take: of the machine, and of the control group where there is one."""
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(meminfo["MemAvailable"].split()[0]) << 10
    for folder, limit, used, reclaimable in (
        ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            most = (Path(folder) / limit).read_text().strip()
            taken = int((Path(folder) / used).read_text())
            stat = dict(line.split() for line in (Path(folder) / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue  # this version of control groups is not there
        if most != "max":
            free = min(free, int(most) - taken + int(stat.get(reclaimable, 0)))
    return free


def node_name() -> str:
    """Names the place within which one process can open another's memory: the machine, and its PID namespace.

    Machines are told apart by when their kernel started: hosts that were cloned have one name, and the first PID
    namespace has the same number everywhere.
    """
    parts = [socket.gethostname()]
    for read in (lambda: os.readlink("/proc/self/ns/pid"), lambda: Path("/proc/sys/kernel/random/boot_id").read_text()):
        with contextlib.suppress(OSError):
            parts.append(read().strip())
    return " ".join(parts)
