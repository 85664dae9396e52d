"""The engines as one: each request goes to the least loaded that serves; what fails is asked for again."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from vime.errors import EngineError

if TYPE_CHECKING:
    from vime.backends.vllm_utils.generate import Generation
    from vime.backends.vllm_utils.sampling import SamplingParams

logger = logging.getLogger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 10.0  # seconds before a request is repeated, doubled each time
_HEALTH_SECONDS = 10.0


class Client(Protocol):
    """What the pool needs of an engine's client (:class:`vime.backends.vllm_utils.generate.AsyncEngineClient`)."""

    index: int
    url: str
    log: str | None  # path of the engine's log

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, request_id: str, timeout: float | None = None
    ) -> Generation: ...

    async def health(self, timeout: float = ...) -> None: ...

    async def close(self) -> None: ...


@dataclass
class _Engine:
    client: Client
    load: int = 0
    age: int = 0  # how often it was replaced
    recovery: asyncio.Task[None] | None = field(default=None, repr=False)


class EnginePool:
    """Bounded, retried requests to several engines. They are made in the event loop that this was made in; whoever asks
    may be in another one, as a user's own generate function is.

    Args:
        clients: one per engine.
        recover: called with an engine's index and URL when it cannot be reached: returns a client of the engine that
            took its place (which may have happened long before), or None if it lives there; raises when it cannot be
            replaced, which ends every request. Called once at a time per engine, while the others go on. None: engines
            are not replaced.
        concurrency: requests at once per engine; more wait here, not in the engine.
        timeout: seconds one request may take at an engine.
        retries: times a request is repeated. A repeat because an engine was replaced does not count.
    """

    def __init__(
        self,
        clients: Sequence[Client],
        recover: Callable[[int, str], Awaitable[Client | None]] | None = None,
        *,
        concurrency: int = 256,
        timeout: float = 1800.0,
        retries: int = 3,
    ) -> None:
        if not clients:
            raise ValueError("no engines")
        self._engines = [_Engine(client) for client in clients]
        self._recover, self._concurrency, self._timeout, self._retries = recover, concurrency, timeout, retries
        self._loop = asyncio.get_running_loop()
        # Who waits for room, in the order of asking, and the engine each would rather not have again. One is woken per
        # place that gets free: thousands may wait, and to wake them all each time is work of the square of that.
        self._waiting: deque[tuple[asyncio.Future[_Engine], _Engine | None]] = deque()
        self._fatal: BaseException | None = None

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams, request_id: str) -> Generation:
        """One whole answer to one prompt. An aborted one (the engine was paused) is asked for again.

        Raises:
            EngineError: refused, failed more than ``retries`` times, or an engine that could not be replaced.
        """
        asked = self._ask(token_ids, sampling, request_id)
        if asyncio.get_running_loop() is self._loop:
            return await asked
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asked, self._loop))

    async def _ask(self, token_ids: Sequence[int], sampling: SamplingParams, request_id: str) -> Generation:
        failures, cause, log, pause, last = 0, "", None, _FIRST_PAUSE, None
        for attempt in itertools.count():
            engine = await self._acquire(avoid=last)
            age, error, log = engine.age, None, engine.client.log
            try:
                # A new id each time: vLLM may still be at work on the one before.
                generation = await engine.client.generate(
                    token_ids, sampling, f"{request_id}-{attempt}" if attempt else request_id, timeout=self._timeout
                )
                if generation.finish_reason != "abort":
                    return generation
                cause = f"engine {engine.client.index} aborted it after {len(generation.token_ids)} tokens"
            except EngineError as raised:
                error, cause = raised, str(raised)
                if not error.retryable:
                    raise
            finally:
                self._release(engine)
            last = engine
            if error is not None and await self._look_after(engine, age, error):
                pause = _FIRST_PAUSE
                continue
            failures += 1
            if failures > self._retries:
                break
            logger.info("request %s: %s; asking again in %g s", request_id, cause, pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        where = f"\n  its log may say why: {log}" if log else ""
        raise EngineError(
            f"request {request_id} failed {failures} times (--request-retries {self._retries}): {cause}{where}"
        )

    async def close(self) -> None:
        for engine in self._engines:
            if engine.recovery is not None:
                engine.recovery.cancel()
                await asyncio.gather(engine.recovery, return_exceptions=True)
            await engine.client.close()

    async def _acquire(self, avoid: _Engine | None) -> _Engine:
        """Wait for room at an engine that serves; ``avoid`` is taken only if it is the only one that does."""
        if self._fatal is not None:
            raise self._fatal
        place: asyncio.Future[_Engine] = self._loop.create_future()
        self._waiting.append((place, avoid))
        self._give_room()
        try:
            return await place
        except asyncio.CancelledError:
            if not place.cancelled() and place.exception() is None:  # it was given in the same turn of the loop
                self._release(place.result())
            raise

    def _release(self, engine: _Engine) -> None:
        engine.load -= 1
        self._give_room()

    def _give_room(self) -> None:
        """Wake those who wait, first come first served, as far as there is room; all of them after a fatal error."""
        serving = [engine for engine in self._engines if engine.recovery is None]
        passed_over: list[tuple[asyncio.Future[_Engine], _Engine | None]] = []
        while self._waiting and (self._fatal or any(engine.load < self._concurrency for engine in serving)):
            place, avoid = self._waiting.popleft()
            if place.done():  # cancelled
                continue
            if self._fatal is not None:
                place.set_exception(self._fatal)
                continue
            others = [engine for engine in serving if engine is not avoid] or serving
            chosen = min(others, key=lambda engine: engine.load)
            if chosen.load < self._concurrency:
                chosen.load += 1
                place.set_result(chosen)
            else:
                passed_over.append((place, avoid))
        self._waiting.extendleft(reversed(passed_over))

    async def _look_after(self, engine: _Engine, age: int, error: EngineError) -> bool:
        """After a failure: replace the engine if it is gone. True: it was replaced since the request was sent."""
        if self._recover is None or self._fatal is not None:
            return False
        if engine.age != age:
            return True  # another request's failure has seen to it
        if engine.recovery is None:
            if not error.unreachable and await self._healthy(engine):
                return False
            if engine.age == age and engine.recovery is None:
                engine.recovery = asyncio.create_task(self._replace(engine))
                self._give_room()  # who avoids an engine takes it once it is the only one
        if engine.recovery is not None and all(other.recovery is not None for other in self._engines):
            await asyncio.wait([engine.recovery])  # nobody else can answer meanwhile
        return engine.age != age

    async def _healthy(self, engine: _Engine) -> bool:
        try:
            await engine.client.health(timeout=_HEALTH_SECONDS)
        except EngineError:
            return False
        return True

    async def _replace(self, engine: _Engine) -> None:
        assert self._recover is not None
        try:
            client = await self._recover(engine.client.index, engine.client.url)
        except Exception as error:  # noqa: BLE001 - handed to everyone who waits for an answer
            self._fatal = error
        else:
            if client is not None:
                await engine.client.close()
                engine.client, engine.age = client, engine.age + 1
        finally:
            engine.recovery = None
            self._give_room()
