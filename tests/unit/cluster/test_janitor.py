"""Nothing of a run stays behind, whatever kills its driver."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vime.cluster.janitor import marked_processes
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
    subprocess.Popen([sys.executable, "-c", stubborn])
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
        _until(lambda: len(marked_processes(run_id)) == 3, "the three processes of the run")
        assert arena.exists()
        os.kill(driver.pid, signal.SIGKILL)
    driver.wait(60)
    _until(lambda: not marked_processes(run_id), "the end of the run's processes")
    _until(lambda: not arena.exists() and not folder.exists(), "the removal of the run's files")


def test_other_runs_are_left_alone(tmp_path: Path) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], env={**os.environ, RUN_VARIABLE: "another-run"}
    )
    try:
        subprocess.run([sys.executable, "-c", DRIVER, str(tmp_path / "t"), "return"], check=True, timeout=60)
        assert marked_processes("another-run") == [other.pid]
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
