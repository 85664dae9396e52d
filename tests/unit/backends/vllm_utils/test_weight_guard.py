"""The guard in front of a real engine, and its state machine call by call."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
import requests

from tests.unit.backends.vllm_utils.guarded import Server, generate, rpc
from vime.backends.vllm_utils import weight_guard

if TYPE_CHECKING:
    from tests.engine import TinyEngine


def test_generation_waits_for_an_open_update_and_goes_on_with_it() -> None:
    async def run() -> None:
        server = Server()
        assert await generate(server) == 200
        await server.post("/start_weight_update")
        waiting = asyncio.create_task(generate(server))
        await server.post("/update_weights")
        assert not waiting.done()
        assert await server.post("/health", query="") == (200, "{}")
        await server.post("/finish_weight_update")
        assert await waiting == 200

    asyncio.run(run())


def test_an_update_of_the_trainer_ends_when_every_worker_has_confirmed() -> None:
    """Not with vLLM's finish, to which it answers 200 whatever the workers say."""

    async def run(confirmed: bool) -> None:
        server = Server()
        await server.start()
        waiting = asyncio.create_task(generate(server))
        await server.post("/collective_rpc", rpc("update_weights"))
        assert (await server.post("/finish_weight_update"))[0] == 200
        await server.post("/collective_rpc", rpc("weight_state"))
        await asyncio.sleep(0)
        assert not waiting.done()
        if confirmed:
            await server.post("/reset_prefix_cache")
        else:
            await server.post("/collective_rpc", rpc("abort_weight_update"))
        await server.resume()
        assert await waiting == (200 if confirmed else 503)
        assert await generate(server) == (200 if confirmed else 503)

    asyncio.run(run(True))
    asyncio.run(run(False))


@pytest.mark.parametrize("told", [True, False])
def test_generation_does_not_wait_for_an_update_whose_trainer_has_died(
    monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    """But for one that is late, and ends well."""
    monkeypatch.setattr(weight_guard, "_GRACE", 0.0)
    monkeypatch.setattr(weight_guard, "_SILENCE", 0.02)

    async def run() -> None:
        server = Server()
        await server.post("/reset_prefix_cache", seconds=60)
        await server.start(0.02 if told else None)
        waiting = asyncio.create_task(generate(server))
        await server.post("/collective_rpc", rpc("update_weights"), seconds=0.01 if told else None)
        await server.post("/reset_prefix_cache")  # of somebody else
        assert await asyncio.wait_for(waiting, 30) == 503
        assert await generate(server) == 503
        await server.post("/finish_weight_update", seconds=60)
        waiting = asyncio.create_task(generate(server))
        await asyncio.sleep(0)
        assert not waiting.done()
        await server.post("/reset_prefix_cache", seconds=60)
        await server.resume()
        assert await waiting == 200
        assert await generate(server) == 200

    asyncio.run(run())


def test_somebody_elses_call_does_not_shorten_the_deadline_of_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_guard, "_GRACE", 0.0)

    async def run() -> None:
        server = Server()
        await server.start()
        await server.post("/reset_prefix_cache", seconds=1e-6)
        waiting = asyncio.create_task(generate(server))
        await asyncio.sleep(0)
        assert not waiting.done()
        await server.post("/collective_rpc", rpc("abort_weight_update"), seconds=60)
        assert await waiting == 503

    asyncio.run(run())


def test_a_call_that_has_no_deadline_is_not_late_while_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update of another trainer's."""
    monkeypatch.setattr(weight_guard, "_SILENCE", 0.0)

    async def run() -> None:
        server = Server()
        began, may_end = server.stall("/update_weights")
        await server.post("/start_weight_update")
        updating = asyncio.create_task(server.post("/update_weights"))
        await began.wait()
        waiting = asyncio.create_task(generate(server))
        await asyncio.sleep(0)
        assert not waiting.done()
        may_end.set()
        await updating
        await server.post("/finish_weight_update")
        assert await waiting == 200

    asyncio.run(run())


def test_a_call_without_a_deadline_whose_caller_has_gone_is_late_at_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_guard, "_SILENCE", 0.02)

    async def run() -> None:
        server = Server()
        began, may_end = server.stall("/update_weights")
        await server.post("/start_weight_update")
        updating = asyncio.create_task(server.post("/update_weights"))
        await began.wait()
        waiting = asyncio.create_task(generate(server))
        await asyncio.sleep(0)
        may_end.set()
        await updating
        assert await asyncio.wait_for(waiting, 30) == 503

    asyncio.run(run())


def test_resetting_the_prefix_cache_ends_no_update_that_has_not_finished() -> None:
    """It is an ordinary route, which others may call at any time."""

    async def run() -> None:
        server = Server()
        await server.start()
        waiting = asyncio.create_task(generate(server))
        await server.post("/reset_prefix_cache")
        await asyncio.sleep(0)
        assert not waiting.done()
        await server.post("/finish_weight_update")
        await server.post("/collective_rpc", rpc("start_weight_update"))  # the proof's second path
        await server.post("/reset_prefix_cache")
        await asyncio.sleep(0)
        assert not waiting.done()
        await server.post("/collective_rpc", rpc("abort_weight_update"))
        assert await waiting == 503

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "status", "body"),
    [
        ("/update_weights", 500, None),
        ("/update_weights", 0, None),
        ("/finish_weight_update", 500, None),
        ("/start_weight_update", 500, None),
        ("/collective_rpc", 500, {"method": "vime_poison_weights"}),
        ("/collective_rpc", 200, {"method": "vime_abort_weight_update"}),
        ("/collective_rpc", 200, {"method": "vime_disconnect"}),
    ],
)
def test_after_a_failed_update_generation_is_refused_until_one_succeeds(path: str, status: int, body: Any) -> None:
    async def run() -> None:
        server = Server()
        await server.post("/start_weight_update")
        waiting = asyncio.create_task(generate(server))
        server.status[path] = status
        try:
            await server.post(path, body, parts=3)
        except ConnectionError:
            assert status == 0
        if status != 0:
            assert server.seen[-1] == (path, json.dumps(body or {}).encode())  # the whole body reached the server
        assert await waiting == 503
        code, text = await server.post("/v1/completions")
        assert code == 503
        assert "its last weight update failed half-way" in text
        server.status.clear()
        await server.post("/start_weight_update")
        await server.post("/update_weights")
        await server.post("/finish_weight_update")
        assert await generate(server) == 200

    asyncio.run(run())


def test_a_failure_outside_an_update_changes_nothing() -> None:
    async def run() -> None:
        server = Server()
        server.status = {"/start_weight_update": 500, "/update_weights": 500, "/collective_rpc": 500}
        for path in server.status:
            assert (await server.post(path))[0] == 500
        assert (await server.post("/collective_rpc", {"method": "vime_abort_weight_update"}))[0] == 500
        assert await generate(server) == 200

    asyncio.run(run())


# ---------------------------------------------------------------- a real engine


def complete(engine: TinyEngine, timeout: float = 60) -> requests.Response:
    body = {"model": "policy", "prompt": [1, 5, 7, 9], "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    return requests.post(engine.url + "/v1/completions", json=body, timeout=timeout)


def test_a_real_engine_refuses_half_written_weights_and_serves_after_a_full_sync(engine: TinyEngine) -> None:
    from tests.unit.backends.vllm_utils.one_rank import OneRank
    from vime.errors import WeightSyncError

    trainer = OneRank(engine)
    trainer.load(engine.checkpoint)
    trainer.connect()
    before = complete(engine).json()["choices"][0]["token_ids"]
    stats = trainer.update.update_weights(1)  # proven: planned and bucketed leave the same bytes
    assert stats["proof_seconds"] > 0
    assert complete(engine).json()["choices"][0]["token_ids"] == before
    assert engine.client.weight_version() == 1

    arena = next(iter(trainer.params.values()))
    trainer.update._prepare = lambda version: trainer.update._own.stamp.set(version - 1)  # type: ignore[method-assign]
    with pytest.raises(WeightSyncError, match="holds version 1, expected version 2") as caught:
        trainer.update.update_weights(2)
    assert (caught.value.phase, caught.value.engines) == ("version", (0,))
    refused = complete(engine)
    assert refused.status_code == 503
    assert "failed half-way" in refused.json()["error"]["message"]

    del trainer.update._prepare
    trainer.update.update_weights(3)
    assert complete(engine).json()["choices"][0]["token_ids"] == before
    assert engine.client.weight_version() == 3
    assert arena.isfinite().all()


def test_vllms_stuck_update_is_cleared_and_an_unfinished_one_can_be_followed(engine: TinyEngine) -> None:
    """A trainer died after start: vLLM would refuse every later update with "already active"."""
    from tests.unit.backends.vllm_utils.one_rank import OneRank

    trainer = OneRank(engine)
    trainer.load(engine.checkpoint)
    trainer.connect()
    engine.client.pause("wait", for_update=True)
    engine.client.start_weight_update()
    trainer.update.update_weights(4)
    assert engine.client.weight_version() == 4
    assert complete(engine).status_code == 200
