"""Whatever of an engine is killed, nothing of it stays: no process, no file under /dev/shm or /tmp."""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.engine import START_TIMEOUT, Leftovers, eventually, start_engine, tiny_command
from tests.tiny import make_checkpoint
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.engine import EngineProcess, _is_cause
from vime.errors import EngineError


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def process(checkpoint: str, tmp_path: Path) -> Iterator[EngineProcess]:
    process = EngineProcess(tiny_command(checkpoint), tmp_path / "engine.log")
    yield process
    process.terminate(grace=0)


def find(pids: list[int], *words: str) -> list[int]:
    """Those of the processes whose command line holds all the words."""
    return [pid for pid in pids if all(word in " ".join(psutil.Process(pid).cmdline()) for word in words)]


def engine_core(pids: list[int]) -> list[int]:
    (server,) = find(pids, "--supervisor")
    return [pid for pid in find(pids, "spawn_main") if psutil.Process(pid).ppid() == server]


def has_engine_core(process: EngineProcess) -> bool:
    pids = process.pids()
    try:
        return len(find(pids, "--supervisor")) == 1 and len(engine_core(pids)) == 1
    except psutil.NoSuchProcess:
        return False


def test_taken_port_then_kill_of_the_server(process: EngineProcess, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    reports: list[str] = []
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        process.command = process.command.with_port(taken)
        process.start()
        process.wait_ready(START_TIMEOUT, reports.append)
    assert process.command.port != taken
    assert f"port {taken} was taken" in caplog.text
    assert any(line.startswith("waiting for engine 0 to serve (") for line in reports)
    EngineClient(process.url).health()

    leftovers = Leftovers(process.pids())
    assert leftovers.remaining()
    os.kill(find(process.pids(), "--supervisor")[0], signal.SIGKILL)
    leftovers.expect_none()
    eventually(lambda: not process.alive())
    with pytest.raises(EngineError) as caught:
        EngineClient(process.url).health()
    assert caught.value.unreachable
    assert "vime: this engine's server was ended by signal 9\n" in process.log_path.read_text()
    process.terminate()


def test_kill_of_the_supervisor(process: EngineProcess) -> None:
    process.start()
    eventually(lambda: has_engine_core(process), START_TIMEOUT)
    leftovers = Leftovers(process.pids())
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    leftovers.expect_none()
    assert not process.alive()
    process.terminate()


def test_kill_of_the_ray_actor_that_owns_the_engine(checkpoint: str, tmp_path: Path) -> None:
    import ray

    @ray.remote(num_cpus=0)
    class Owner:
        def start(self) -> tuple[int, list[int]]:
            self.process = EngineProcess(tiny_command(checkpoint), tmp_path / "engine.log")
            self.process.start()
            eventually(lambda: has_engine_core(self.process), START_TIMEOUT)
            return os.getpid(), self.process.pids()

    repository = str(Path(__file__).parents[4])
    ray.init(num_cpus=1, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": repository}})
    try:
        owner = Owner.remote()
        actor_pid, pids = ray.get(owner.start.remote(), timeout=START_TIMEOUT)
        leftovers = Leftovers(pids)
        assert len(leftovers.processes) >= 3
        os.kill(actor_pid, signal.SIGKILL)
        leftovers.expect_none()
    finally:
        ray.shutdown()


def test_two_workers_serve_and_kill_of_their_engine_core(tmp_path: Path) -> None:
    """Tensor parallelism is what leaves files under /dev/shm: message queues and the CPU communicator."""
    engine = start_engine(tmp_path, tensor_parallel=2)
    try:
        assert engine.client.get_world_size() == 2
        assert len(engine.client.collective_rpc("get_supported_tasks")) == 2
        pids = engine.process.pids()
        leftovers = Leftovers(pids)
        assert leftovers.segments, "vLLM no longer uses shared memory here: look for what it uses instead"
        os.kill(engine_core(pids)[0], signal.SIGKILL)
        leftovers.expect_none()
        eventually(lambda: not engine.process.alive())
    finally:
        engine.process.terminate(grace=0)


def test_an_engine_that_cannot_start_says_why(checkpoint: str, tmp_path: Path) -> None:
    command = tiny_command(checkpoint, vllm={"no_such_flag": "1"})
    with EngineProcess(command, tmp_path / "engine.log") as process:
        process.start()
        with pytest.raises(EngineError, match="engine 0 ended while it started") as caught:
            process.wait_ready(START_TIMEOUT)
    assert "unrecognized arguments: --no-such-flag 1" in str(caught.value)
    assert str(tmp_path / "engine.log") in str(caught.value)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("ValueError: too many heads", True),
        ("vllm serve: error: unrecognized arguments: --no-such-flag 1", True),
        ("vime: this engine's server was ended by signal 9", True),
        ("RuntimeError: Engine core initialization failed. See root cause above.", False),
        ("INFO 11-30 15:13:48 [core.py:347] init engine took 25.83 s", False),
    ],
)
def test_lines_of_a_log_that_say_why(line: str, says: bool) -> None:
    assert _is_cause(line) == says


def test_an_engine_that_is_not_ready_in_time_is_ended(process: EngineProcess) -> None:
    process.start()
    leftovers = Leftovers(process.pids())
    with pytest.raises(EngineError, match=r"engine 0 did not serve within 0\.5 s") as caught:
        process.wait_ready(0.5)
    assert caught.value.retryable
    leftovers.expect_none(timeout=0.1)
    assert process.pids() == []
