"""Control calls against the real engine, and errors that say who, what and why."""

from __future__ import annotations

import pickle
import socket
import threading

import pytest
import requests

from tests.engine import TinyEngine
from vime.backends.vllm_utils.client import LOADED_AT_START, EngineClient
from vime.backends.vllm_utils.command import installed_version
from vime.backends.vllm_utils.protocol import error_message, listens
from vime.errors import EngineError


def test_state_calls(engine: TinyEngine) -> None:
    engine.client.health()
    assert engine.client.version().split("+")[0] == installed_version().split("+")[0]
    assert engine.client.get_world_size() == 1
    assert engine.client.weight_version() in (LOADED_AT_START, *range(100))


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_pause_and_resume(engine: TinyEngine, mode: str) -> None:
    assert not engine.client.is_paused()
    engine.client.pause(mode)  # pyright: ignore[reportArgumentType]
    assert engine.client.is_paused()
    engine.client.reset_prefix_cache()
    engine.client.resume()
    assert not engine.client.is_paused()


def test_sleep_and_wake_in_two_steps(engine: TinyEngine) -> None:
    """On a CPU vLLM frees nothing, but it keeps the state for real: asleep until both tags are awake.

    Not at level 2, which drops the weights: the engine, which other tests use, would rightly refuse to generate.
    """

    def is_sleeping() -> bool:
        return requests.get(f"{engine.client.url}/is_sleeping", timeout=60).json()["is_sleeping"]

    engine.client.sleep(level=1)
    assert is_sleeping()
    engine.client.wake_up(["weights"])
    assert is_sleeping()
    engine.client.wake_up(["kv_cache"])
    assert not is_sleeping()
    assert not engine.client.is_paused()


def test_an_engine_that_dies_in_the_middle_of_an_answer_is_unreachable() -> None:
    """It was told with the call how long that may take."""
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer_in_part() -> None:
            connection, _ = listening.accept()
            with connection:
                asked.append(connection.recv(1 << 16))
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")

        threading.Thread(target=answer_in_part, daemon=True).start()
        client = EngineClient(f"http://127.0.0.1:{listening.getsockname()[1]}", 3, timeout=30)
        with pytest.raises(EngineError, match=r"engine 3 .*POST /collective_rpc failed: connection lost") as caught:
            client.collective_rpc("anything")
        assert caught.value.unreachable
        assert b"\r\nx-vime-timeout: 30\r\n" in asked[0]


def test_collective_rpc(engine: TinyEngine) -> None:
    assert len(engine.client.collective_rpc("get_supported_tasks")) == 1
    with pytest.raises(EngineError, match=r"engine 0 .*POST /collective_rpc answered 500: .*no_such_method") as caught:
        engine.client.collective_rpc("no_such_method")
    assert caught.value.status == 500
    engine.client.health()


def test_vllms_own_words_are_in_the_error(engine: TinyEngine) -> None:
    with pytest.raises(EngineError, match=r"POST /pause answered 4\d\d: .*(abort|keep)") as caught:
        engine.client.pause("softly")  # pyright: ignore[reportArgumentType]
    assert not caught.value.retryable


def test_errors_travel_between_processes_whole() -> None:
    error = EngineError("engine 1: gone", retryable=True, unreachable=True, status=503)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.retryable, copy.unreachable, copy.status) == (str(error), True, True, 503)


def test_deadline_of_a_call_and_nobody_there() -> None:
    with socket.socket() as silent:  # accepts in the kernel, and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with (
            EngineClient(url, 2) as client,
            pytest.raises(EngineError, match=r"engine 2 .*no answer within 0.2 s") as slow,
        ):
            client.pause(timeout=0.2)
    assert slow.value.retryable
    assert not slow.value.unreachable
    with EngineClient(url, 2) as client, pytest.raises(EngineError, match="POST /resume failed: connection") as gone:
        client.resume()
    assert gone.value.unreachable


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"error": {"message": "no such thing", "code": 500}}', "no such thing"),
        ('{"error": "Failed to pause"}', "Failed to pause"),
        ('{"detail": "Invalid JSON format"}', "Invalid JSON format"),
        ('{"detail": [{"loc": ["query", "mode"]}]}', '[{"loc": ["query", "mode"]}]'),
        ("Internal Server Error", "Internal Server Error"),
        ("", "(no reason given)"),
    ],
)
def test_shapes_of_error_bodies(body: str, message: str) -> None:
    assert error_message(body) == message


def test_who_refuses_connections_does_not_listen() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert not listens(url)
        server.listen()
        assert listens(url)
    assert not listens(url)


def test_who_cannot_be_reached_at_the_moment_may_listen() -> None:
    assert listens("http://no-such-host.invalid:1")
