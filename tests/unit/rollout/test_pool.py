"""Who gets room at an engine, and when. The clients' answers come when a test lets them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import pytest

from vime.backends.vllm_utils.generate import Generation
from vime.backends.vllm_utils.sampling import SamplingParams
from vime.errors import EngineError
from vime.rollout.pool import Client, EnginePool

T = TypeVar("T")
SAMPLING = SamplingParams(max_tokens=4)


class HeldClient:
    """Answers each request once its name is in ``let``."""

    def __init__(self, index: int = 0) -> None:
        self.index, self.url = index, f"http://127.0.0.1:{index + 1}"
        self.log: str | None = f"logs/engine-{index}.log"
        self.asked: list[str] = []
        self.held: dict[str, asyncio.Future[None]] = {}

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, request_id: str, timeout: float | None = None
    ) -> Generation:
        self.asked.append(request_id)
        self.held[request_id] = asyncio.get_running_loop().create_future()
        await self.held[request_id]
        return Generation([1], [-1.0], "stop", None, [])

    def let(self, request_id: str) -> None:
        self.held[request_id].set_result(None)

    def fail(self, request_id: str) -> None:
        self.held[request_id].set_exception(EngineError("made to fail", retryable=True, unreachable=True))

    async def health(self, timeout: float = 10.0) -> None:
        pass

    async def close(self) -> None:
        pass


def run(main: Coroutine[Any, Any, T]) -> T:
    async def within_deadline() -> T:
        async with asyncio.timeout(30):
            return await main

    return asyncio.run(within_deadline())


def ask(pool: EnginePool, name: str) -> asyncio.Task[Generation]:
    return asyncio.create_task(pool.generate([1], SAMPLING, name), name=name)


async def settle() -> None:
    """Everything that can go on without an answer has gone on."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_first_come_first_served_and_one_woken_per_place() -> None:
    async def main() -> None:
        client = HeldClient()
        pool = EnginePool([client], concurrency=2)
        tasks = [ask(pool, f"r{number}") for number in range(100)]
        await settle()
        assert client.asked == ["r0", "r1"]
        for number in (1, 0, *range(2, 98)):
            client.let(f"r{number}")
            await settle()
            assert len(client.asked) == min(len([task for task in tasks if task.done()]) + 2, 100)
        assert client.asked == [f"r{number}" for number in range(100)]
        client.let("r98")
        client.let("r99")
        await asyncio.gather(*tasks)

    run(main())


@pytest.mark.parametrize("number", [100, 400])
def test_an_answer_wakes_one_request_however_many_wait(number: int) -> None:
    """All of them each time would be work of the square of a rollout's answers, of which there may be ten thousand."""

    async def main() -> int:
        client = HeldClient()
        pool = EnginePool([client], concurrency=2)
        tasks = [ask(pool, f"r{place}") for place in range(number)]
        await settle()
        loop, steps = asyncio.get_running_loop(), 0
        call_soon = loop.call_soon

        def counted(*args, **kwargs):
            nonlocal steps
            steps += 1
            return call_soon(*args, **kwargs)

        loop.call_soon = counted  # type: ignore[method-assign]
        client.let("r0")
        while not tasks[0].done() or len(client.asked) < 3:
            await asyncio.sleep(0)
        loop.call_soon = call_soon  # type: ignore[method-assign]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return steps

    assert run(main()) < 50


def test_the_least_loaded_engine_is_asked() -> None:
    async def main() -> None:
        clients: list[HeldClient] = [HeldClient(0), HeldClient(1)]
        pool = EnginePool(clients, concurrency=2)
        tasks = [ask(pool, f"r{number}") for number in range(5)]
        await settle()
        assert [client.asked for client in clients] == [["r0", "r2"], ["r1", "r3"]]
        clients[1].let("r3")
        await settle()
        assert clients[1].asked == ["r1", "r3", "r4"]
        for client, name in ((0, "r0"), (1, "r1"), (0, "r2"), (1, "r4")):
            clients[client].let(name)
        await asyncio.gather(*tasks)

    run(main())


@pytest.mark.parametrize("given", [False, True], ids=["while it waits", "in the turn in which it is given room"])
def test_whoever_gives_up_leaves_its_room_to_the_next(given: bool) -> None:
    async def main() -> None:
        pool = EnginePool([HeldClient()], concurrency=1)
        engine = await pool._acquire(avoid=None)
        second, third = (asyncio.create_task(pool._acquire(avoid=None)) for _ in range(2))
        await settle()
        for step in (lambda: pool._release(engine), second.cancel) if given else (second.cancel, lambda: None):
            step()
        await settle()
        assert second.cancelled()
        if not given:
            pool._release(engine)
        assert await third is engine
        assert engine.load == 1

    run(main())


def test_a_request_that_is_given_up_at_work_leaves_its_room() -> None:
    async def main() -> None:
        client = HeldClient()
        pool = EnginePool([client], concurrency=1)
        first, second = ask(pool, "first"), ask(pool, "second")
        await settle()
        first.cancel()
        await settle()
        client.let("second")
        assert (await second).token_ids == [1]
        assert first.cancelled()

    run(main())


def test_a_repeat_avoids_the_engine_that_failed_and_lets_others_by() -> None:
    """Its own engine has room, which a later request may take; it waits for the other one."""

    async def main() -> None:
        clients: list[Client] = [HeldClient(0), HeldClient(1)]
        bad, good = clients
        assert isinstance(bad, HeldClient)
        assert isinstance(good, HeldClient)
        pool = EnginePool(clients, concurrency=1)
        failing, other = ask(pool, "failing"), ask(pool, "other")
        await settle()
        assert (bad.asked, good.asked) == (["failing"], ["other"])
        waiting = asyncio.create_task(pool._acquire(avoid=pool._engines[0]))
        bad.let("failing")
        await failing
        later = ask(pool, "later")
        await settle()
        assert bad.asked == ["failing", "later"]
        assert not waiting.done()
        good.let("other")
        assert await waiting is pool._engines[1]
        pool._release(pool._engines[1])
        bad.let("later")
        await asyncio.gather(other, later)

    run(main())


def test_a_repeat_takes_the_engine_that_failed_once_no_other_serves() -> None:
    async def main() -> None:
        clients = [HeldClient(0), HeldClient(1)]
        replaced = asyncio.Event()

        async def recover(index: int, url: str) -> Client | None:
            await replaced.wait()
            return None

        pool = EnginePool(clients, recover, concurrency=1, retries=0)
        broken = ask(pool, "broken")
        await settle()
        holds = ask(pool, "holds")
        await settle()
        waiting = asyncio.create_task(pool._acquire(avoid=pool._engines[0]))
        clients[0].fail("broken")  # engine 0 is being replaced
        await settle()
        clients[1].let("holds")
        assert await waiting is pool._engines[1]
        repeat = asyncio.create_task(pool._acquire(avoid=pool._engines[1]))
        await settle()
        assert not repeat.done()
        pool._release(pool._engines[1])
        await settle()
        assert repeat.done()
        replaced.set()
        await asyncio.gather(broken, holds, return_exceptions=True)

    run(main())


def test_who_waits_is_told_that_an_engine_cannot_be_replaced() -> None:
    async def main() -> None:
        client = HeldClient()

        async def recover(index: int, url: str) -> Client | None:
            raise EngineError("engine 0 is lost")

        pool = EnginePool([client], recover, concurrency=1)
        tasks = [ask(pool, f"r{number}") for number in range(3)]
        await settle()
        client.fail("r0")
        await settle()  # r1 has r0's room by now, at the same engine
        client.fail("r1")
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(ended, EngineError)
            assert "engine 0 is lost" in str(ended)
        with pytest.raises(EngineError, match="engine 0 is lost"):
            await ask(pool, "later")

    run(main())


def test_the_last_error_names_the_log_of_the_engine_it_came_from() -> None:
    """vLLM tells a client little: "EngineCore encountered an issue. See stack trace"."""

    async def main() -> None:
        clients = [HeldClient(0), HeldClient(1)]
        pool = EnginePool(clients, retries=0)
        asked = ask(pool, "a"), ask(pool, "b")
        await settle()
        clients[1].fail("b")
        with pytest.raises(EngineError, match=r"b failed 1 times .* fail\n  its log may say why: logs/engine-1"):
            await asked[1]
        clients[0].let("a")
        await asked[0]

    run(main())
