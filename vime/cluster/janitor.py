"""A small process that outlives the driver, so that nothing of a run stays behind, whatever killed it.

It holds the read end of a pipe whose write end only the driver has. When the driver ends, in whatever way, the pipe
closes; the janitor then ends every process of the run (Ray's, the trainer's, the engines', and their children), and
removes the run's shared memory and temporary folder. It imports nothing that is slow.

No single trace of a process lasts: Ray writes the titles of its processes over the memory that ``/proc/PID/environ``
shows, mark included, and a process whose parent died first belongs to init. So the janitor goes by three: the mark in
the environment, a file held open below the run's folder, and descent from the driver, which it looks at every second
while the driver lives.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from vime.cluster.process import RUN_VARIABLE

_LOOK_SECONDS = 1.0
_TERM_SECONDS = 3.0
_KILL_SECONDS = 20.0
_SCRATCH = "--scratch"  # vime.backends.vllm_utils.launcher's option


class _Process(NamedTuple):
    """One process: its pid may come again, its pid and start time (clock ticks since boot) never do."""

    pid: int
    started: str


class RunProcesses:
    """The processes of one run, found again at every look and never forgotten while they live."""

    def __init__(self, run_id: str, folder: str | None = None, driver: int | None = None) -> None:
        """Args: ``folder`` is the run's temporary folder; ``driver`` the pid whose descendants belong to the run."""
        self._mark = f"{RUN_VARIABLE}={run_id}".encode()
        self._below = f"{os.path.realpath(folder)}/" if folder else None
        self._not_ours = {process for process, _ in _living() if process.pid in (os.getpid(), driver)}
        self._driver = next((process for process in self._not_ours if process.pid == driver), None)
        self._known: set[_Process] = set()
        self.scratch: set[str] = set()  # engines' temporary folders, which stand in their command lines

    def look(self, *, traces: bool = True) -> list[int]:
        """Pids of the run's living processes: not the driver's, nor the caller's own.

        Without ``traces`` only descendants are looked for: that reads one file of each process of the machine.
        """
        parents = dict(_living())
        by_pid = {process.pid: process for process in parents}
        known = self._known & parents.keys()
        if traces:
            known |= {process for process in parents.keys() - known if self._has_trace(process.pid)}
        known -= self._not_ours
        # In /proc a child can stand before its parent: repeat until none is added.
        rest = {process: by_pid.get(parent) for process, parent in parents.items() if process not in self._not_ours}
        while children := {
            process
            for process, parent in rest.items()
            if process not in known and (parent in known or (parent is not None and parent == self._driver))
        }:
            known |= children
        self._known = known
        for process in known:
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{process.pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
                self.scratch |= {after for word, after in itertools.pairwise(words) if word == _SCRATCH}
        return sorted(process.pid for process in known)

    def _has_trace(self, pid: int) -> bool:
        with contextlib.suppress(OSError):
            if self._mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return True
            if self._below:
                for descriptor in os.scandir(f"/proc/{pid}/fd"):
                    with contextlib.suppress(OSError):
                        if os.readlink(descriptor.path).startswith(self._below):
                            return True
        return False


def _living() -> Iterator[tuple[_Process, int]]:
    """Each process that is not a zombie, with its parent's pid. One whose main thread has ended before the others looks
    like one, and has all its memory still: of a GPU gigabytes, which take a while to be given back. (It shows no trace
    any more, so it must be known by then, or a descendant.)"""
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, parent, *rest = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
                if state not in "ZX" or int(rest[15]) > 1:  # field 20: num_threads
                    yield _Process(int(entry.name), rest[17]), int(parent)  # field 22 of proc(5): starttime


def end_processes(processes: RunProcesses) -> list[int]:
    """SIGTERM, then SIGKILL, to every process of the run until none is left; return those that had to be told."""
    told: set[int] = set()
    start = time.monotonic()
    while pids := processes.look():
        elapsed = time.monotonic() - start
        if elapsed > _KILL_SECONDS:
            break
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if pid not in told:
                    os.kill(pid, signal.SIGTERM)
                elif elapsed > _TERM_SECONDS:
                    os.kill(pid, signal.SIGKILL)
            told.add(pid)
        time.sleep(0.1)
    return sorted(told)


def remove_scratch(folders: Iterable[str]) -> None:
    """What engines leave whose supervisors were killed before they had cleaned up."""
    for folder in folders:
        if os.path.isdir(folder) and os.path.basename(folder).startswith("vime-engine-"):
            from vime.backends.vllm_utils.processes import remove_leftovers  # imports psutil, seldom needed

            remove_leftovers(Path(folder))


def remove_files(run_id: str, folder: str | None) -> list[str]:
    """Remove the run's segments in /dev/shm and its temporary folder; return what was there."""
    removed = []
    for path in Path("/dev/shm").glob(f"*vime-{run_id}*"):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
            removed.append(str(path))
    if folder and os.path.isdir(folder):
        shutil.rmtree(folder, ignore_errors=True)
        removed.append(folder)
    return removed


class Janitor:
    """The driver's side: start it, and wait for it at the end."""

    def __init__(self, run_id: str, folder: str) -> None:
        """Args: ``folder`` is the run's temporary folder, removed at the end."""
        environment = {key: value for key, value in os.environ.items() if key != RUN_VARIABLE}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "vime.cluster.janitor", run_id, folder, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # a Ctrl-C in the terminal must not reach it
        )

    def __enter__(self) -> Janitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_TERM_SECONDS + _KILL_SECONDS + 10)
        except subprocess.TimeoutExpired:
            self._process.kill()


def main() -> None:
    run_id, folder, driver = sys.argv[1:4]
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # it ends by the pipe alone
    processes = RunProcesses(run_id, folder, int(driver))
    while not select.select([sys.stdin], [], [], _LOOK_SECONDS)[0]:  # readable at its end only: nothing is written
        processes.look(traces=False)
    end_processes(processes)
    remove_scratch(processes.scratch)
    remove_files(run_id, folder)


if __name__ == "__main__":
    main()
