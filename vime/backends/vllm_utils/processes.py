"""The processes and files of one engine: find them, end them, remove them.

An engine is a tree: the supervisor (launcher.py), vLLM's API server, its EngineCore, and with tensor parallelism one
worker per GPU. A server that is killed leaves files in /dev/shm (message queues ``psm_*``, the CPU communicator's
``vllm_dist_*``) and in its temporary directory. The latter is a private one per engine, so it goes as a whole; which
segments are the engine's is read from the memory maps of its processes while they live, and noted in that directory.
Python's own it also tells its *resource tracker*, a process per tree, which removes them once everybody else is dead.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

SHARED_MEMORY = "/dev/shm/"
# What vLLM, torch, NCCL and multiprocessing create there. Not the arenas of trainers, which workers map as well.
PREFIXES = ("psm_", "vllm_dist_", "torch_", "nccl-", "sem.mp-")
_NOTE = "segments"
_TRACKER_GRACE = 5.0  # seconds a resource tracker may take to remove what the dead have left


def descendants(pid: int) -> list[psutil.Process]:
    """Living processes below ``pid``; empty when ``pid`` is gone."""
    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [child for child in children if living(child)]


class Spawned:
    """The processes that ``multiprocessing`` has started for ``pid``: EngineCore, if that is an API server.

    Looked at from the start on: once it has imported vLLM, a process may give itself another title (wherever
    setproctitle is installed, as beside every GPU build), and then nothing shows any more how it was started.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._seen: set[psutil.Process] = set()

    def lost(self) -> bool:
        """Look again; whether any that was ever seen has died."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                    if living(child) and any("spawn_main" in word for word in child.cmdline()):
                        self._seen.add(child)
        return not all(living(process) for process in self._seen)


def living(process: psutil.Process) -> bool:
    """Whether it has a thread left. One whose main thread has ended before the others looks like a zombie, and has all
    its memory still: of a GPU gigabytes, which take a while to be given back."""
    try:
        return process.is_running() and (process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1)
    except psutil.NoSuchProcess:
        return False


def segments_of(pids: Iterable[int]) -> set[str]:
    """Names under /dev/shm that these processes map and that an engine could have created."""
    inodes = set()
    for pid in pids:
        # A process may end while its maps are read; what it shared stands in the others' maps too.
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as maps:
            # By inode: glibc makes a semaphore under another name, which is the one that the maps go on to show.
            inodes |= {int(line.split(maxsplit=5)[4]) for line in maps if SHARED_MEMORY in line}
    with os.scandir(SHARED_MEMORY) as entries:
        return {entry.name for entry in entries if entry.inode() in inodes and entry.name.startswith(PREFIXES)}


def note_segments(scratch: Path, pids: Iterable[int]) -> None:
    """Remember in the engine's directory which segments its processes map now, for :func:`remove_leftovers`."""
    new = segments_of(pids) - _noted(scratch)
    if new:
        with contextlib.suppress(FileNotFoundError), open(scratch / _NOTE, "a") as note:
            note.write("".join(f"{name}\n" for name in sorted(new)))


def _noted(scratch: Path) -> set[str]:
    try:
        return set((scratch / _NOTE).read_text().split())
    except FileNotFoundError:
        return set()


def remove_leftovers(scratch: Path) -> None:
    """Remove the engine's segments, save those that a living process still maps, and then its directory."""
    names = {name for name in _noted(scratch) if os.path.exists(SHARED_MEMORY + name)}
    if names:
        names -= segments_of(psutil.pids())
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(SHARED_MEMORY + name)
    shutil.rmtree(scratch, ignore_errors=True)


def kill(find: Callable[[], list[psutil.Process]], timeout: float = 30.0) -> list[int]:
    """SIGKILL everything that ``find`` returns until it returns nothing, and return the pids that survived ``timeout``.

    It asks again because a process may fork between being listed and being killed. Resource trackers end by themselves
    after the rest, and are killed only if they do not: what a process created in its last moment only they know of.
    """
    deadline = time.monotonic() + timeout
    spare_until = None
    while processes := find():
        now = time.monotonic()
        if now > deadline:
            return [process.pid for process in processes]
        doomed = [process for process in processes if not is_resource_tracker(process)]
        if not doomed:
            spare_until = spare_until or now + _TRACKER_GRACE
            doomed = processes if now > spare_until else []
        for process in doomed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(doomed or processes, timeout=0.2)
    return []


def is_resource_tracker(process: psutil.Process) -> bool:
    """Whether it is the one of :mod:`multiprocessing`, which ends once every process that it serves has ended."""
    with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    return False
