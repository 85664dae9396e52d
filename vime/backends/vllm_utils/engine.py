"""One vLLM engine as a child process: start, wait until it serves, end it with everything it left behind."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import requests

from vime.backends.vllm_utils import launcher, processes
from vime.backends.vllm_utils.command import EngineCommand
from vime.errors import EngineError

logger = logging.getLogger(__name__)

PORT_ATTEMPTS = 5
_PORT_TAKEN = "address already in use"
_REPORT_INTERVAL = 10.0  # seconds between log lines while waiting, when nobody asked for reports


def free_port(host: str = "127.0.0.1") -> int:
    """A port nobody listens on now. Should another process take it first, ``wait_ready`` tries the next."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


class EngineProcess:
    """A vLLM server with its EngineCore and workers, owned by this process and ended with it (launcher.py).

    Args:
        command: what to run; without a port, a free one is picked.
        log_path: file that takes the output of all its processes (appended to).
    """

    def __init__(self, command: EngineCommand, log_path: str | Path) -> None:
        self.command = command
        self.log_path = Path(log_path)
        self.name = f"engine {command.index}"
        self.start_seconds: float | None = None  # from start() until it served
        self._process: subprocess.Popen[bytes] | None = None
        self._scratch: Path | None = None
        self._log_start = 0
        self._started = 0.0

    @property
    def url(self) -> str:
        return f"http://{self.command.host}:{self.command.port}"

    @property
    def pid(self) -> int | None:
        """Of the supervisor, the root of the engine's process tree; None before the start."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start it and return at once; :meth:`wait_ready` waits."""
        if self._process is not None:
            raise EngineError(f"{self.name} was started already")
        self._started = time.monotonic()
        self._launch()

    def _launch(self) -> None:
        if self.command.port is None:
            self.command = self.command.with_port(free_port(self.command.host))
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        # A short path: vLLM puts Unix sockets there, whose names may have 107 characters.
        self._scratch = Path(tempfile.mkdtemp(prefix="vime-engine-"))
        argv = ["--parent", str(os.getpid()), "--scratch", str(self._scratch), *self.command.full_argv()]
        with open(self.log_path, "ab") as log:
            log.write(f"{self.name}: {self.command} --port {self.command.port}\n".encode())
            log.flush()
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-m", launcher.MODULE, *argv],
                env=self.command.environment(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in a terminal reaches us, and we end the engine in order
            )

    def wait_ready(self, timeout: float, report: Callable[[str], None] | None = None) -> None:
        """Wait until it serves.

        Args:
            timeout: seconds since :meth:`start` that it may take.
            report: called about once a second with a line that says what is waited for (default: the log, every 10 s).

        Raises:
            EngineError: it ended (with what its log says) or is not ready in time (it is then ended).
        """
        deadline = self._started + timeout
        attempts = 1
        reported = time.monotonic()
        while True:
            if not self.alive():
                if attempts < PORT_ATTEMPTS and self._lost_port():
                    attempts += 1
                    logger.warning("%s: port %s was taken meanwhile, trying another", self.name, self.command.port)
                    self.terminate()
                    self.command = self.command.with_port(free_port(self.command.host))
                    self._launch()
                    continue
                raise EngineError(f"{self.name} ended while it started{self.describe_end()}", unreachable=True)
            if self._answers():
                self.start_seconds = time.monotonic() - self._started
                logger.info("%s serves at %s after %.1f s", self.name, self.url, self.start_seconds)
                return
            now = time.monotonic()
            if now > deadline:
                last = self.last_line()
                self.terminate(grace=0)
                raise EngineError(
                    f"{self.name} did not serve within {timeout:g} s (--engine-start-timeout); it was at: {last}\n"
                    f"  its log: {self.log_path}",
                    retryable=True,
                )
            if now - reported > (1.0 if report else _REPORT_INTERVAL):
                reported = now
                waited = f"{now - self._started:.0f} of {timeout:g} s"
                (report or logger.info)(f"waiting for {self.name} to serve ({waited}): {self.last_line()}")
            time.sleep(0.1)

    def _answers(self) -> bool:
        try:
            return requests.get(self.url + "/health", timeout=5).status_code == 200
        except requests.RequestException:
            return False

    def _lost_port(self) -> bool:
        return _PORT_TAKEN in self._log().lower()

    def alive(self) -> bool:
        """Whether its supervisor and server run. (A server whose EngineCore died ends by itself.)"""
        return self._process is not None and self._process.poll() is None

    def pids(self) -> list[int]:
        """Every living process of the engine, the supervisor first."""
        if self._process is None or not self.alive():
            return []
        return [self._process.pid, *(child.pid for child in processes.descendants(self._process.pid))]

    def terminate(self, grace: float = 10.0) -> None:
        """End the whole tree and remove its files. Safe to call twice, and after it died.

        Args:
            grace: seconds it may take to end in order before it is killed.
        """
        if self._process is None:
            return
        supervisor = self._process
        tree = [psutil.Process(pid) for pid in self.pids() if psutil.pid_exists(pid)]
        for signal_number, wait in ((signal.SIGTERM, grace), (signal.SIGTERM, 35.0), (signal.SIGKILL, 5.0)):
            if supervisor.poll() is not None:
                break
            supervisor.send_signal(signal_number)  # the supervisor kills the rest at the second SIGTERM
            with contextlib.suppress(subprocess.TimeoutExpired):
                supervisor.wait(wait)
        self._process = None
        left = processes.kill(lambda: [process for process in tree if processes.living(process)])
        if self._scratch is not None:
            processes.remove_leftovers(self._scratch)  # the supervisor did so, unless it was killed
        if left:
            raise EngineError(f"{self.name}: processes {left} did not die of SIGKILL")

    def last_line(self) -> str:
        """The newest line of its log, shortened: what it is doing. (What is said here may stand in the same file.)"""
        ours = f" {logger.name}: "
        lines = [line for line in self._log(8192).splitlines() if line.strip() and ours not in line]
        # "(EngineCore pid=7) INFO 11-29 14:39:54 [cpu_model_runner.py:68] Starting to load model ..."
        return lines[-1].rpartition("] ")[2].strip()[:160] if lines else "Python imports vLLM"

    def describe_end(self) -> str:
        """Exit status and the lines of its log that say why it ended, for an error message."""
        status = self._process.poll() if self._process else None
        lines = [line.strip() for line in self._log().splitlines() if line.strip()]
        causes = [line for line in lines if _is_cause(line)] or lines[-8:]
        shown = "\n".join(f"    {line[-400:]}" for line in dict.fromkeys(causes[-8:]))
        return f" (exit status {status}):\n{shown}\n  its log: {self.log_path}"

    def _log(self, tail: int | None = 256 << 10) -> str:
        """What it wrote since this start, at most the last ``tail`` bytes."""
        try:
            with open(self.log_path, "rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, size - (tail or size)))
                return log.read().decode(errors="replace")
        except FileNotFoundError:
            return ""

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.terminate()


def _is_cause(line: str) -> bool:
    """Whether a line of vLLM's log ends a traceback ("ValueError: ..."), is an argument parser's complaint, or the
    launcher's word.

    The server's own "Engine core initialization failed" only says that the cause stands above.
    """
    if "Engine core initialization failed" in line:
        return False
    words = [word for word in line.split() if word.endswith(":")]
    return line.startswith("vime: ") or any(word[:-1].endswith(("Error", "Exception", "error")) for word in words)
