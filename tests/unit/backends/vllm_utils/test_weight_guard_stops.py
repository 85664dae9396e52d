"""Who has stopped an engine, who may start it again, and where requests wait meanwhile: the guard, call by call."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from tests.unit.backends.vllm_utils.guarded import Server, generate, rpc
from vime.backends.vllm_utils import weight_guard


def test_no_update_while_asleep_and_no_answers_from_dropped_weights() -> None:
    async def run() -> None:
        server = Server()
        await server.post("/sleep", query="level=2&mode=abort")
        code, text = await server.post("/start_weight_update")
        assert code == 409
        assert "asleep" in text
        await server.post("/wake_up", query="tags=kv_cache")
        assert (await server.post("/start_weight_update"))[0] == 409
        await server.post("/wake_up", query="tags=weights")
        code, text = await server.post("/v1/completions")
        assert code == 503
        assert "sleep of level 2 has dropped its weights" in text
        await server.post("/start_weight_update")
        await server.post("/finish_weight_update")
        assert await generate(server) == 200
        await server.post("/sleep", query="level=1")  # keeps the weights on the host
        await server.post("/wake_up")
        assert await generate(server) == 200

    asyncio.run(run())


def test_no_sleep_while_an_update_is_open() -> None:
    async def run() -> None:
        server = Server()
        await server.start()
        for query in ("", "level=1", "level=2&mode=abort", "level=3"):
            code, text = await server.post("/sleep", query=query)
            assert code == 409
            assert "a weight update is open" in text
        for query in ("level=0", "level=-1", "level=deep", "level=1.5"):  # no memory is touched; vLLM's to refuse
            assert (await server.post("/sleep", query=query))[0] == 200
        await server.post("/collective_rpc", rpc("abort_weight_update"), seconds=60)
        assert (await server.post("/sleep", query="level=2"))[0] == 200
        assert server.seen[-1][0] == "/sleep"

    asyncio.run(run())


@pytest.mark.parametrize("status", [200, 500, 0])
def test_an_engine_that_a_dead_trainer_left_paused_says_so_and_refuses_after_the_deadline(
    monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """Also where the pause itself did not end: its caller has died meanwhile."""
    monkeypatch.setattr(weight_guard, "_GRACE", 0.0)

    async def run() -> None:
        server = Server()
        assert not await server.paused_for_update()
        server.status["/pause"] = status
        with pytest.raises(ConnectionError) if status == 0 else contextlib.nullcontext():
            await server.pause(seconds=0.02)
        assert await server.paused_for_update()
        code, text = await asyncio.wait_for(server.post("/v1/completions"), 30)
        assert code == 503
        assert "paused for an update past its deadline" in text
        assert server.seen[-1][0] == "/pause"  # vLLM would have let it wait
        server.status.clear()
        await server.pause()  # the next trainer
        waiting = asyncio.create_task(generate(server))
        await asyncio.sleep(0)
        assert not waiting.done()
        await server.resume()
        assert not await server.paused_for_update()
        assert await waiting == 200

    asyncio.run(run())


@pytest.mark.parametrize("fails", [False, True])
def test_requests_that_come_after_the_pause_do_not_wait_in_vllm(fails: bool) -> None:
    """Resumed after an update that failed, it would answer them from half of either version."""

    async def run() -> None:
        server = Server()
        await server.pause()
        waiting = asyncio.create_task(generate(server))
        await server.start()
        server.status["/collective_rpc"] = 500 if fails else 200
        await server.post("/collective_rpc", rpc("update_weights"), seconds=60)
        server.status.clear()
        await server.post("/finish_weight_update", seconds=60)
        await server.post("/reset_prefix_cache", seconds=60)
        await asyncio.sleep(0)
        assert waiting.done() == fails
        if fails:  # as the trainer does when it leaves
            await server.post("/pause", query="mode=abort", headers={"x-vime-for-update": "1"})
        assert (await server.resume()) == 200
        assert await waiting == await generate(server) == (503 if fails else 200)

    asyncio.run(run())


@pytest.mark.parametrize("path", ["/resume", "/wake_up", "/wake_up?tags=scheduling"])
@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_nobody_lets_vllm_go_on_with_half_an_update(path: str, mode: str) -> None:
    """With none that is open, and after one that failed not with what may be queued: a pause to wait for what runs
    leaves what does not run yet, one to keep also what does."""

    async def run() -> None:
        server, route = Server(), (path.partition("?")[0], None, path.partition("?")[2])
        assert (await server.post("/pause", query=f"mode={mode}"))[0] == 200
        await server.post("/collective_rpc", rpc("start_weight_update"), seconds=60)
        code, text = await server.post(*route)
        assert (code, "a weight update is open" in text) == (409, True)
        await server.post("/collective_rpc", rpc("abort_weight_update"), seconds=60)
        if mode != "abort":
            code, text = await server.post(*route)
            assert (code, "what it has queued would be answered: end that first" in text) == (409, True)
            await server.post("/pause")
        assert (await server.post(*route))[0] == 200
        assert await generate(server) == 503

    asyncio.run(run())


def test_an_engine_that_was_put_to_sleep_has_nothing_queued_whatever_an_update_says_of_waiting() -> None:
    async def run() -> None:
        server = Server()
        await server.post("/sleep", query="level=2")
        await server.pause()  # an update is tried: 409
        assert (await server.post("/wake_up"))[0] == 200

    asyncio.run(run())


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_that_keeps_requests_does_not_wake_for_weights_that_are_not_there(level: int) -> None:
    async def run() -> None:
        server = Server()
        await server.start()
        await server.post("/collective_rpc", rpc("abort_weight_update"), seconds=60)
        await server.post("/sleep", query=f"level={level}&mode=keep")  # what that pause has left waiting
        assert (await server.post("/resume"))[0] == 409  # what is asleep does not run
        assert (await server.post("/wake_up", query="tags=weights"))[0] == 200
        assert (await server.post("/wake_up", query="tags=kv_cache"))[0] == 409
        await server.post("/collective_rpc", rpc("start_weight_update"), seconds=60)
        await server.post("/finish_weight_update", seconds=60)
        await server.post("/reset_prefix_cache", seconds=60)
        assert (await server.post("/wake_up", query="tags=kv_cache"))[0] == 200
        assert await generate(server) == 200
        await server.post("/sleep", query=f"level={level}")
        assert (await server.post("/wake_up"))[0] == 200
        assert await generate(server) == (200 if level == 1 else 503)

    asyncio.run(run())


@pytest.mark.parametrize("stop", ["/pause", "/sleep?level=1", "/pause?mode=wait"])
@pytest.mark.parametrize("status", [200, 500])
def test_requests_that_come_while_an_engine_is_being_stopped_wait_here(stop: str, status: int) -> None:
    """vLLM ends what runs, and then moves memory for seconds, while it queues what comes."""

    async def run() -> None:
        server = Server()
        began, may_end = server.stall(stop.partition("?")[0])
        server.status[stop.partition("?")[0]] = status
        stopping = asyncio.create_task(server.post(stop.partition("?")[0], query=stop.partition("?")[2]))
        await began.wait()
        waiting = asyncio.create_task(generate(server))
        await asyncio.sleep(0)
        assert not waiting.done()
        may_end.set()
        await stopping
        if status == 200:
            await asyncio.sleep(0)
            assert not waiting.done()
            await server.post("/wake_up")
        assert await asyncio.wait_for(waiting, 30) == 200

    asyncio.run(run())


def test_a_request_whose_body_is_slow_is_looked_at_when_it_is_there() -> None:
    async def run() -> None:
        server, body_may_come = Server(), asyncio.Event()

        async def receive() -> Any:
            await body_may_come.wait()
            return {"type": "http.request", "body": b"{}", "more_body": False}

        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}
        slow = asyncio.create_task(server.guard(scope, receive, send))
        await asyncio.sleep(0)
        await server.start()
        await server.post("/collective_rpc", rpc("abort_weight_update"), seconds=60)
        body_may_come.set()
        await slow
        assert sent[0]["status"] == 503

    asyncio.run(run())


def test_a_prefix_cache_that_could_not_be_reset_confirms_nothing() -> None:
    async def run() -> None:
        server = Server()
        await server.start()
        await server.post("/finish_weight_update", seconds=60)
        server.body["/reset_prefix_cache"] = b'{"success": false}'
        assert (await server.post("/reset_prefix_cache", seconds=60))[0] == 200
        waiting = asyncio.create_task(generate(server))
        await asyncio.sleep(0)
        assert not waiting.done()
        await server.post("/collective_rpc", rpc("abort_weight_update"), seconds=60)
        assert await waiting == 503

    asyncio.run(run())


def test_an_update_that_ends_while_somebody_puts_the_engine_to_sleep_leaves_it_to_him() -> None:
    async def run() -> None:
        server = Server()
        await server.pause()
        began, may_end = server.stall("/sleep")
        sleeping = asyncio.create_task(server.post("/sleep", query="level=1"))
        await began.wait()
        assert await server.resume() == 200
        assert not server.seen or server.seen[-1][0] != "/resume"
        may_end.set()
        assert (await sleeping)[0] == 200
        assert (await server.post("/wake_up"))[0] == 200
        assert await generate(server) == 200

    asyncio.run(run())


def test_no_update_begins_on_an_engine_that_somebody_has_resumed() -> None:
    """Its answers would be of both versions."""

    async def run() -> None:
        server = Server()
        await server.pause()
        await server.post("/resume")
        code, text = await server.post("/collective_rpc", rpc("start_weight_update"), seconds=60)
        assert (code, "somebody has resumed it" in text) == (409, True)
        assert await generate(server) == 200
        assert await server.start() == 200

    asyncio.run(run())


@pytest.mark.parametrize("stop", ["/pause", "/sleep?level=0", "/sleep?level=1", "/release_kv_cache_memory"])
def test_requests_that_come_to_a_stopped_engine_do_not_wait_in_vllm(stop: str) -> None:
    """But what ends others passes."""

    async def run() -> None:
        server = Server()
        await server.post(stop.partition("?")[0], query=stop.partition("?")[2])
        waiting = asyncio.create_task(generate(server))
        for path in ("/abort_requests", "/inference/v1/abort_requests", "/v1/responses/7/cancel"):
            assert (await asyncio.wait_for(server.post(path), 30))[0] == 200
        assert not waiting.done()
        if "release" in stop:
            await server.post("/resume")  # refused: its cache has no memory
            await asyncio.sleep(0)
            assert not waiting.done()
        await server.post("/wake_up")
        assert await waiting == 200

    asyncio.run(run())


@pytest.mark.parametrize("query", ["level=2", "level=0"])
def test_an_update_does_not_end_a_pause_that_came_in_its_course(query: str) -> None:
    async def run() -> None:
        server = Server()
        await server.pause()
        if query == "level=0":
            await server.post("/collective_rpc", rpc("start_weight_update"), seconds=60)
        await server.post("/sleep", query=query)
        if query == "level=0":
            await server.post("/finish_weight_update", seconds=60)
            await server.post("/reset_prefix_cache", seconds=60)
        assert await server.resume() == 200
        assert server.seen[-1][0] != "/resume"
        assert not await server.paused_for_update()

    asyncio.run(run())


def test_a_pause_that_is_answered_after_a_resume_has_no_say() -> None:
    async def run() -> None:
        server = Server()
        began, may_end = server.stall("/pause")
        pausing = asyncio.create_task(server.post("/pause", query="mode=wait"))
        await began.wait()
        await server.post("/resume")
        may_end.set()
        assert (await pausing)[0] == 200
        await server.pause()
        assert await server.paused_for_update()

    asyncio.run(run())


@pytest.mark.parametrize("tags", ["tags=weights&tags=kv_cache", "tags=x", "tags="])
def test_a_wake_up_with_a_tag_that_is_awake_wakes_nothing(tags: str) -> None:
    """vLLM says 200 then as well."""

    async def run() -> None:
        server = Server()
        await server.post("/sleep", query="level=1")
        await server.post("/wake_up", query="tags=weights")
        await server.post("/wake_up", query=tags)
        await server.pause()
        assert not await server.paused_for_update()
        assert (await server.post("/resume"))[0] == 409
        await server.post("/wake_up", query="tags=kv_cache")
        assert (await server.post("/resume"))[0] == 200

    asyncio.run(run())


@pytest.mark.parametrize(
    ("first", "second"), [("start", "sleep"), ("sleep", "start"), ("sleep", "resume"), ("sleep", "wake")]
)
def test_what_mixes_with_a_call_that_is_under_way_is_refused(first: str, second: str) -> None:
    async def run() -> None:
        server = Server()
        await server.pause()
        began, may_end = server.stall("/sleep" if first == "sleep" else "/collective_rpc")
        calls = {
            "start": lambda: server.post("/collective_rpc", rpc("start_weight_update"), seconds=60),
            "sleep": lambda: server.post("/sleep", query="level=1"),
            "resume": lambda: server.post("/resume"),
            "wake": lambda: server.post("/wake_up"),
        }
        beginning = asyncio.create_task(calls[first]())
        await began.wait()
        assert (await calls[second]())[0] == 409
        may_end.set()
        assert (await beginning)[0] == 200

    asyncio.run(run())


def test_a_strangers_call_that_fails_is_not_the_updates() -> None:
    async def run() -> None:
        server = Server()
        await server.start()
        server.status["/collective_rpc"] = 500
        await server.post("/collective_rpc", {"method": "nope"})
        server.status.clear()
        await server.post("/finish_weight_update", seconds=60)
        await server.post("/reset_prefix_cache", seconds=60)
        await server.resume()
        assert await generate(server) == 200

    asyncio.run(run())


@pytest.mark.parametrize(
    ("status", "level", "code"),
    [(500, 2, 503), (0, 2, 503), (422, 2, 200), (500, 1, 200), (422, 3, 200), (200, 3, 503)],
)
def test_a_sleep_may_have_dropped_the_weights_whatever_is_answered(status: int, level: int, code: int) -> None:
    async def run() -> None:
        server = Server()
        server.status["/sleep"] = status
        with pytest.raises(ConnectionError) if status == 0 else contextlib.nullcontext():
            await server.post("/sleep", query=f"level={level}")
        assert await generate(server) == code

    asyncio.run(run())


@pytest.mark.parametrize("query", ["level=0&level=2", "level=01", "level=1.0"])
def test_a_sleeps_level_is_read_as_vllm_reads_it(query: str) -> None:
    async def run() -> None:
        server = Server()
        await server.post("/sleep", query=query)
        assert (await server.post("/start_weight_update"))[0] == 409

    asyncio.run(run())


def test_a_second_trainers_pause_does_not_shorten_the_deadline_of_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_guard, "_GRACE", 0.0)

    async def run() -> None:
        server = Server()
        await server.pause()
        await server.post("/collective_rpc", rpc("start_weight_update"), seconds=60)
        await server.pause(1e-6)
        waiting = asyncio.create_task(generate(server))
        await asyncio.sleep(0)
        assert not waiting.done()
        await server.post("/collective_rpc", rpc("abort_weight_update"), seconds=60)
        assert await waiting == 503

    asyncio.run(run())


@pytest.mark.parametrize(
    ("stop", "go_on"),
    [
        (["/pause"], ["/resume"]),
        (["/sleep?level=0"], ["/wake_up?tags=scheduling"]),
        (["/sleep?level=1"], ["/wake_up"]),
        (["/sleep?level=2"], ["/wake_up?tags=weights", "/wake_up?tags=kv_cache"]),
        (["/sleep?level=1", "/wake_up?tags=weights"], ["/wake_up?tags=kv_cache"]),
    ],
)
def test_whoever_stops_an_engine_himself_starts_it_again(
    monkeypatch: pytest.MonkeyPatch, stop: list[str], go_on: list[str]
) -> None:
    """Not an update in between, and not one before it."""
    monkeypatch.setattr(weight_guard, "_GRACE", 0.0)

    async def run() -> None:
        server = Server()

        async def call(paths: list[str]) -> None:
            for path in paths:
                await server.post(path.partition("?")[0], query=path.partition("?")[2], seconds=60)

        for before in (False, True):
            if before:
                await server.pause(1e-6)
            await call(stop)
            await server.pause(1e-6)
            assert not await server.paused_for_update()
            for path in go_on:
                assert not await server.paused_for_update()
                await call([path])
            await server.pause(1e-6)
            assert await server.paused_for_update()
            await server.post("/resume")

    asyncio.run(run())
