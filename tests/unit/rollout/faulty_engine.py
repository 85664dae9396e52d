"""A server that speaks vLLM's token route and can be told to fail: for faults a real engine does not have on order.

Its "model" is a function of prompt and seed, like a real engine's sampling.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import Callable
from typing import Any

from aiohttp import web

from vime.types import EngineAddress


class FaultyEngine:
    """Runs in a thread of its own. ``faults`` are used up by the next requests, one each.

    Args:
        speak: (seed, prompt token ids) -> response token ids, the end token included.
        delay: (seed) -> seconds before the answer.
    """

    def __init__(
        self,
        speak: Callable[[int, list[int]], list[int]],
        index: int = 0,
        delay: Callable[[int], float] = lambda seed: 0.0,
    ) -> None:
        self.speak, self.index, self.delay = speak, index, delay
        self.faults: list[str] = []
        self.requests: list[dict[str, Any]] = []
        self.connections: list[Any] = []  # one per request, the same again where a connection was
        self.active = self.most_active = self.disconnected = 0
        self.killed = False
        self.answered = threading.Event()
        self.hold: threading.Event | None = None  # answers wait for it
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._started.wait(30)

    @property
    def address(self) -> EngineAddress:
        return EngineAddress(self.index, f"http://127.0.0.1:{self.port}", 1, None)

    def stop(self) -> None:
        """Gone at once: connections are cut, the port is closed."""
        self.killed = True
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(30)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        self._stopping = asyncio.Event()
        app = web.Application()
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_get("/health", self._health)
        runner = web.AppRunner(app, shutdown_timeout=0, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.port = runner.addresses[0][1]
        self._started.set()
        await self._stopping.wait()
        assert runner.server is not None
        for site in list(runner.sites):
            await site.stop()
        for _ in range(10):  # also those that were being accepted; a process that dies takes them all with it
            for connection in list(runner.server.connections):
                if connection.transport is not None:
                    connection.transport.abort()
            await asyncio.sleep(0.01)
        await runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=500 if "sick" in self.faults else 200)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.connections.append(request.transport)
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        try:
            return await self._answer(request, body)
        except asyncio.CancelledError:
            self.disconnected += 1
            raise
        finally:
            self.active -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        fault = self.faults.pop(0) if self.faults else None
        if fault in ("503", "400"):
            return web.json_response({"error": {"message": f"made to say {fault}"}}, status=int(fault))
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault == "close":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        params = body["sampling_params"]
        await asyncio.sleep(self.delay(params["seed"]))
        while self.hold is not None and not self.hold.is_set():
            await asyncio.sleep(0.01)
        tokens = self.speak(params["seed"], body["token_ids"])
        finish = "stop" if len(tokens) <= params["max_tokens"] else "length"
        tokens = tokens[: params["max_tokens"]]
        if fault == "abort":
            tokens, finish = tokens[:1], "abort"
        content = [{"token_id": token, "logprob": -1.0 / (1 + place)} for place, token in enumerate(tokens)]
        choice = {"token_ids": tokens, "finish_reason": finish, "logprobs": {"content": content}}
        choice["weight_versions"] = [{"version": "3"}]
        text = json.dumps({"choices": [choice]})
        self.answered.set()
        if fault == "truncated":
            return web.Response(text=text[: len(text) // 2], content_type="application/json")
        return web.Response(text=text, content_type="application/json")


def number(seed: int, below: int) -> int:
    """A small number that depends on the seed as a sampled answer would."""
    return int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=4).digest()) % below
