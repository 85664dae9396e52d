"""Nothing of a run stays behind, whatever kills its driver."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from vime.cluster.janitor import RunProcesses, end_processes
from vime.cluster.process import RUN_VARIABLE

DRIVER = """
import os, subprocess, sys, time
from vime.cluster.janitor import Janitor
from vime.cluster.process import start_of_process
run_id = start_of_process()
folder = sys.argv[1]
os.makedirs(folder + "/session")
open(f"/dev/shm/vime-{run_id}-arena", "w").close()
# one that dies of SIGTERM, one that does not, and a grandchild in a session of its own
stubborn = "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);" \\
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True); time.sleep(600)"
with Janitor(run_id, folder):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    os.makedirs(folder + "-engine/vime-engine-1/cache")  # of an engine whose supervisor is killed in its clean-up
    subprocess.Popen([sys.executable, "-c", stubborn, "--scratch", folder + "-engine/vime-engine-1"])
    print(run_id, flush=True)
    if sys.argv[2] == "wait":
        time.sleep(600)
    if sys.argv[2] == "raise":
        raise RuntimeError("the run failed")
"""


def _until(condition, what: str, seconds: float = 40) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        time.sleep(0.05)


@pytest.mark.parametrize("end", ["kill", "return", "raise"])
def test_processes_files_and_folder_are_gone(end: str, tmp_path: Path) -> None:
    folder = tmp_path / "temporary"
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(folder), "wait" if end == "kill" else end],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert driver.stdout is not None
    run_id = driver.stdout.readline().strip()
    arena = Path(f"/dev/shm/vime-{run_id}-arena")
    if end == "kill":
        _until(lambda: len(RunProcesses(run_id).look()) == 3, "the three processes of the run")
        assert arena.exists()
        os.kill(driver.pid, signal.SIGKILL)
    driver.wait(60)
    _until(lambda: not RunProcesses(run_id).look(), "the end of the run's processes")
    scratch = Path(f"{folder}-engine", "vime-engine-1")
    assert scratch.parent.exists()
    left = [arena, folder, scratch]
    _until(lambda: not any(path.exists() for path in left), "the removal of the run's files")


def test_other_runs_are_left_alone(tmp_path: Path) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], env={**os.environ, RUN_VARIABLE: "another-run"}
    )
    try:
        subprocess.run([sys.executable, "-c", DRIVER, str(tmp_path / "t"), "return"], check=True, timeout=60)
        assert RunProcesses("another-run").look() == [other.pid]
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


# Ray's agents write their titles over their environment, mark included: these processes never have the mark. The parent
# says its child's pid and waits; the child holds a file open, or does not.
PARENT = """
import subprocess, sys, time
child = "import sys, time; held = [open(name, 'w') for name in sys.argv[1:]]; print(flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", child, *sys.argv[1:]], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


@contextmanager
def _unmarked(*held: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, *map(str, held)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        yield parent, child
    finally:
        parent.kill()
        parent.wait()
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def test_a_process_is_known_by_the_file_it_holds_when_its_mark_and_its_parent_are_gone(tmp_path: Path) -> None:
    folder, beside = tmp_path / "vime-a", tmp_path / "vime-ab"  # the name of one begins the other's
    folder.mkdir()
    beside.mkdir()
    with _unmarked(folder / "agent.log") as (parent, child), _unmarked(beside / "agent.log"):
        parent.kill()
        parent.wait()
        assert RunProcesses("no-such-mark", str(folder)).look() == [child]


def test_a_process_is_known_by_its_descent_when_its_mark_and_its_parent_are_gone(tmp_path: Path) -> None:
    with _unmarked() as (parent, child):
        processes = RunProcesses("no-such-mark", str(tmp_path), driver=os.getpid())
        assert {parent.pid, child} <= set(processes.look(traces=False))
        parent.kill()
        parent.wait()
        found = processes.look(traces=False)
        assert child in found
        assert os.getpid() not in found
        # Not a descendant any more, so one that looks only now does not see it.
        assert child not in RunProcesses("no-such-mark", str(tmp_path), driver=os.getpid()).look()


def test_a_process_lives_until_its_last_thread_has_ended() -> None:
    """A killed rank's memory is given back by whichever thread is the last; by then the first may long be gone."""
    threads = (
        "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(600,)).start();"
        "input(); ctypes.CDLL(None).pthread_exit(None)"
    )
    environment = os.environ | {RUN_VARIABLE: "threads"}
    with subprocess.Popen([sys.executable, "-c", threads], stdin=subprocess.PIPE, env=environment) as process:
        assert process.stdin is not None
        try:
            run = RunProcesses("threads")
            _until(lambda: run.look() == [process.pid], "the mark")
            process.stdin.write(b"\n")
            process.stdin.flush()
            stat = Path(f"/proc/{process.pid}/stat")
            _until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z", "the end of the main thread")
            assert run.look() == [process.pid]
            assert end_processes(run) == [process.pid]
            assert run.look() == []
        finally:
            process.kill()


def test_the_driver_is_not_ended_for_what_it_holds(tmp_path: Path) -> None:
    with open(tmp_path / "driver.log", "w"):
        assert os.getpid() not in RunProcesses("no-such-mark", str(tmp_path), driver=os.getpid()).look()
