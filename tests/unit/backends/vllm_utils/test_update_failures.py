"""What only a real engine shows of a weight update that fails. Phase by phase: the trainer's test_failures.py."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import requests

if TYPE_CHECKING:
    from tests.engine import TinyEngine
    from tests.unit.backends.vllm_utils.one_rank import OneRank

PROMPT = [1, 5, 7, 9]


def answer(engine: TinyEngine) -> requests.Response:
    body = {"model": "policy", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    return requests.post(engine.url + "/v1/completions", json=body, timeout=60)


def tokens(engine: TinyEngine) -> list[int]:
    found = answer(engine)
    assert found.status_code == 200, found.text
    return found.json()["choices"][0]["token_ids"]


def refusal(engine: TinyEngine) -> str:
    """Why it does not generate, in its own words."""
    found = answer(engine)
    assert found.status_code == 503, found.text
    return found.json()["error"]["message"]


def synced(engine: TinyEngine, version: int, **options: Any) -> OneRank:
    """A trainer that has the engine's own checkpoint and has brought it there."""
    from tests.unit.backends.vllm_utils.one_rank import OneRank

    trainer = OneRank(engine, **options)
    trainer.load(engine.checkpoint)
    trainer.connect()
    trainer.update.update_weights(version)
    return trainer


def worker(engine: TinyEngine) -> psutil.Process:
    """The process that holds the weights, the last of them."""
    tree = [psutil.Process(pid) for pid in engine.process.pids()]
    leaves = [process for process in tree if not process.children() and "resource_tracker" not in _line(process)]
    return max(leaves, key=lambda process: process.memory_info().rss)


def _line(process: psutil.Process) -> str:
    return " ".join(process.cmdline())


@contextmanager
def stopped_when_weights_come(victim: psutil.Process, then: Callable[[], None]) -> Iterator[None]:
    """The worker stands still when the update reaches it, and the update has no answer. ``then`` is called once it has
    failed."""
    from vime.backends.megatron_utils.update_weight.engine_update import EngineUpdate

    send, close = EngineUpdate.send, EngineUpdate.close

    def send_to_stopped(self: Any, message: dict[str, Any]) -> None:
        victim.send_signal(signal.SIGSTOP)
        send(self, message)

    def close_after(self: Any) -> None:
        then()
        close(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineUpdate, "send", send_to_stopped)
        patch.setattr(EngineUpdate, "close", close_after)
        yield


def killed_in_the_middle(engine: TinyEngine, trainer: OneRank, version: int) -> Any:
    """Kill the worker once the update's request has reached the server. Returns the error."""
    from tests.engine import eventually
    from vime.errors import WeightSyncError

    victim, port = worker(engine), int(engine.url.rpartition(":")[2])

    def is_asked() -> bool:
        talking = [c for c in psutil.Process().net_connections("tcp") if c.raddr and c.raddr.port == port]
        return victim.status() == psutil.STATUS_STOPPED and any(c.status == "ESTABLISHED" for c in talking)

    def kill() -> None:
        eventually(is_asked, what="the update's request")
        victim.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    with stopped_when_weights_come(victim, lambda: None), pytest.raises(WeightSyncError) as caught:
        trainer.update.update_weights(version)
    killer.join(60)
    eventually(lambda: not engine.process.alive(), what="the end of the engine")
    return caught.value


@pytest.mark.parametrize("tensor_parallel", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_worker_killed_in_the_middle_of_an_update_ends_its_engine_and_a_new_one_is_synced(
    engine: TinyEngine, tmp_path: Path, tensor_parallel: int
) -> None:
    from tests.engine import start_engine
    from vime.types import EngineAddress, Slot

    mortal = start_engine(tmp_path, tensor_parallel, seed=2 + tensor_parallel)  # not what the other engine has
    try:
        trainer = synced(mortal, 1, weight_update_timeout=60.0)
        expected = tokens(mortal)
        error = killed_in_the_middle(mortal, trainer, 2)
    finally:
        mortal.client.close()
        mortal.process.terminate(grace=0)
    assert (error.phase, error.engines) == ("update", (0,))
    assert error.where == f"engine 0 ({mortal.url})"
    # Of itself vLLM says only that the call was cancelled.
    assert "one of its processes has died" in error.cause or "nobody answers at its address any more" in error.cause
    assert tokens(engine) != expected
    trainer.update.connect_rollout_engines([EngineAddress(0, engine.url, 1, Slot(0, 1))])
    trainer.update.update_weights(3, only=[0])
    assert tokens(engine) == expected
    assert engine.client.weight_version() == 3


@pytest.mark.parametrize("tensor_parallel", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_worker_that_stands_still_is_given_up_at_the_deadline_and_synced_when_it_goes_on(
    engine: TinyEngine, tmp_path: Path, tensor_parallel: int
) -> None:
    """Also with several workers, where vLLM's executor must not have stopped reading the answers."""
    from tests.engine import start_engine

    if tensor_parallel == 1:
        stands_still(engine)
        return
    several = start_engine(tmp_path, tensor_parallel)
    try:
        stands_still(several)
    finally:
        several.client.close()
        several.process.terminate(grace=0)


def stands_still(engine: TinyEngine) -> None:
    from vime.errors import WeightSyncError

    trainer = synced(engine, 10)
    expected, victim = tokens(engine), worker(engine)
    patient = trainer.update.options.weight_update_timeout
    trainer.update.options.weight_update_timeout = 2.0
    try:
        with (
            stopped_when_weights_come(victim, victim.resume),
            pytest.raises(WeightSyncError, match="no answer within") as caught,
        ):
            trainer.update.update_weights(11)
    finally:
        victim.resume()
        trainer.update.options.weight_update_timeout = patient
    assert (caught.value.phase, caught.value.engines) == ("update", (0,))
    assert "its last weight update failed half-way" in refusal(engine)
    assert engine.client.is_paused()
    trainer.update.update_weights(12)
    assert tokens(engine) == expected


def test_no_update_while_the_weights_are_asleep_and_no_answer_before_one_after_level_2(engine: TinyEngine) -> None:
    from vime.errors import WeightSyncError

    trainer = synced(engine, 20)
    expected = tokens(engine)
    engine.client.sleep(level=2)
    with pytest.raises(WeightSyncError, match="the weights are asleep: wake them") as caught:
        trainer.update.update_weights(21)
    assert (caught.value.phase, caught.value.engines) == ("start", (0,))
    engine.client.wake_up(["weights"])
    engine.client.wake_up(["kv_cache"])
    assert "sleep of level 2 has dropped its weights" in refusal(engine)
    trainer.update.update_weights(22)
    assert tokens(engine) == expected


def test_memory_that_cannot_be_shared_is_refused_before_the_engine_is_asked(engine: TinyEngine) -> None:
    from vime.errors import WeightSyncError

    trainer = synced(engine, 30)
    expected = tokens(engine)
    shared = dict(trainer.params)
    for key, param in shared.items():
        trainer.params[key] = param.clone()
    with pytest.raises(WeightSyncError, match="private memory, so no engine can read it") as caught:
        trainer.update.update_weights(31)
    assert (caught.value.phase, caught.value.where, caught.value.engines) == ("ready", "trainer rank 0", ())
    assert engine.client.weight_version() == 30
    assert tokens(engine) == expected  # it goes on with what it has
    trainer.params.update(shared)
    trainer.update.update_weights(32)
    assert engine.client.weight_version() == 32


@pytest.mark.parametrize("dies_before", ["start", "resume"])
def test_an_engine_that_a_dead_trainer_left_paused_generates_after_the_next_ones_update(
    engine: TinyEngine, dies_before: str
) -> None:
    from vime.backends.megatron_utils.update_weight.engine_update import EngineUpdate

    class Died(BaseException):
        pass

    def die(self: Any, *args: Any) -> None:
        raise Died

    dead, expected = synced(engine, 34), tokens(engine)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineUpdate, dies_before, die)
        with pytest.raises(Died):
            dead.update.update_weights(35)
    assert engine.client.is_paused()
    assert engine.client.is_paused_for_update()
    synced(engine, 36)
    assert not engine.client.is_paused()
    assert tokens(engine) == expected


def test_an_engine_whose_trainer_died_among_buckets_sleeps_when_the_next_one_has_connected(engine: TinyEngine) -> None:
    """Of a layer that is half loaded vLLM's sleep says "Cannot copy out of meta tensor"."""
    from tests.unit.backends.vllm_utils.one_rank import OneRank
    from vime.backends.megatron_utils.update_weight.engine_update import EngineUpdate
    from vime.errors import EngineError

    class Died(BaseException):
        pass

    send = EngineUpdate.send

    def send_and_die(self: Any, message: dict[str, Any]) -> None:
        message["bucket"]["last"] = False
        send(self, message)
        raise Died

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.config.weight_sync, "update_weight_transport", "bucketed")
        dead = synced(engine, 50)
        expected = tokens(engine)
        patch.setattr(EngineUpdate, "send", send_and_die)
        patch.setattr(EngineUpdate, "close", lambda self: None)
        with pytest.raises(Died):
            dead.update.update_weights(51)
    with pytest.raises(EngineError, match="a weight update is open: wait until it has ended"):
        engine.client.sleep(level=2)
    trainer = OneRank(engine)
    trainer.load(engine.checkpoint)
    trainer.connect()
    engine.client.sleep(level=2)
    engine.client.wake_up()
    trainer.update.update_weights(52)
    assert tokens(engine) == expected


def test_an_engine_that_somebody_has_paused_stays_so(engine: TinyEngine) -> None:
    trainer = synced(engine, 37)
    expected = tokens(engine)
    engine.client.pause("keep")
    try:
        trainer.update.update_weights(38)
        assert engine.client.is_paused()
        assert not engine.client.is_paused_for_update()
    finally:
        engine.client.resume()
    assert tokens(engine) == expected


def test_two_trainers_do_not_update_one_engine_at_once(engine: TinyEngine) -> None:
    """The second start clears the first, whose update then fails: it never mixes with the other's."""
    from vime.backends.megatron_utils.update_weight.engine_update import EngineUpdate
    from vime.errors import WeightSyncError

    first, second = synced(engine, 40), synced(engine, 41)
    expected = tokens(engine)
    start = EngineUpdate.start

    def start_twice(self: Any, *args: Any) -> None:
        start(self, *args)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(EngineUpdate, "start", start)
            second.update.update_weights(42)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineUpdate, "start", start_twice)
        with pytest.raises(WeightSyncError) as caught:
            first.update.update_weights(43)
    assert caught.value.engines == (0,)
    assert engine.client.weight_version() == 42
    assert tokens(engine) == expected
    first.connect()
    first.update.update_weights(44)
    assert tokens(engine) == expected
