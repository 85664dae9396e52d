"""A small process that outlives the driver, so that nothing of a run stays behind, whatever killed it.

It holds the read end of a pipe whose write end only the driver has. When the driver ends, in whatever way, the pipe
closes; the janitor then ends every process that carries the run's mark (Ray's, the trainer's, the engines', and their
children), and removes the run's shared memory and temporary folder. It imports nothing that is slow.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

from vime.cluster.process import RUN_VARIABLE

_TERM_SECONDS = 3.0
_KILL_SECONDS = 20.0


def marked_processes(run_id: str) -> list[int]:
    """Pids of this user's processes that were started with the run's mark: not the driver, which sets it later."""
    mark = f"{RUN_VARIABLE}={run_id}".encode()
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            environment = Path(entry.path, "environ").read_bytes().split(b"\0")
            state = Path(entry.path, "stat").read_text().rpartition(")")[2].split()[0]
            if mark in environment and state != "Z":
                found.append(int(entry.name))
    return found


def end_processes(run_id: str) -> list[int]:
    """SIGTERM, then SIGKILL, to every marked process until none is left; return those that had to be told."""
    told: set[int] = set()
    start = time.monotonic()
    while pids := marked_processes(run_id):
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
            [sys.executable, "-m", "vime.cluster.janitor", run_id, folder],
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
    run_id, folder = sys.argv[1:3]
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # it ends by the pipe alone
    sys.stdin.buffer.read()
    end_processes(run_id)
    remove_files(run_id, folder)


if __name__ == "__main__":
    main()
