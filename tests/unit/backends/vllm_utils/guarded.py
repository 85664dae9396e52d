"""An app behind the weight guard that answers what it is told to: for the guard's state machine, call by call."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from vime.backends.vllm_utils.weight_guard import WeightGuard


def rpc(method: str) -> dict[str, Any]:
    return {"method": f"vime_{method}", "args": ["token"]}


class Server:
    """A guarded app that answers what it is told to."""

    def __init__(self) -> None:
        self.status: dict[str, int] = {}
        self.body: dict[str, bytes] = {}
        self.stalled: dict[str, tuple[asyncio.Event, asyncio.Event]] = {}
        self.seen: list[tuple[str, bytes]] = []
        self.guard = WeightGuard(self._app)

    async def _app(
        self, scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
    ) -> None:
        if scope["path"] in self.stalled:
            began, may_end = self.stalled.pop(scope["path"])
            began.set()
            await may_end.wait()
        body = (await receive())["body"]
        self.seen.append((scope["path"], body))
        status = self.status.get(scope["path"], 200)
        if status == 0:
            raise ConnectionError("the caller has gone")
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": self.body.get(scope["path"], b"{}")})

    async def post(
        self,
        path: str,
        body: Any = None,
        query: str = "",
        parts: int = 1,
        seconds: float | None = None,
        headers: dict[str, str] | None = None,
        method: str = "POST",
    ) -> tuple[int, str]:
        data = json.dumps(body or {}).encode()
        step = -(-len(data) // parts)
        chunks = [data[start : start + step] for start in range(0, len(data), step)]
        messages = [
            {"type": "http.request", "body": chunk, "more_body": number < len(chunks) - 1}
            for number, chunk in enumerate(chunks)
        ]
        sent: list[Any] = []

        async def receive() -> Any:
            return messages.pop(0)

        async def send(message: Any) -> None:
            sent.append(message)

        said = {"host": "localhost", **({"x-vime-timeout": f"{seconds:g}"} if seconds else {}), **(headers or {})}
        scope = {"type": "http", "method": method, "path": path, "query_string": query.encode()}
        scope["headers"] = [(name.encode(), value.encode()) for name, value in said.items()]
        await self.guard(scope, receive, send)
        return sent[0]["status"], b"".join(message.get("body", b"") for message in sent).decode()

    def stall(self, path: str) -> tuple[asyncio.Event, asyncio.Event]:
        """The next call of ``path`` stands still in the app: when it has come there, and whether it may go on."""
        began, may_end = asyncio.Event(), asyncio.Event()
        self.stalled[path] = (began, may_end)
        return began, may_end

    async def pause(self, seconds: float | None = 60) -> int:
        """As vime's trainer does."""
        return (await self.post("/pause", query="mode=wait", seconds=seconds, headers={"x-vime-for-update": "1"}))[0]

    async def start(self, seconds: float | None = 60) -> int:
        """An update of vime's trainer, which pauses first."""
        assert await self.pause(seconds) == 200
        return (await self.post("/collective_rpc", rpc("start_weight_update"), seconds=seconds))[0]

    async def resume(self) -> int:
        """As vime's trainer does."""
        return (await self.post("/resume", seconds=60, headers={"x-vime-for-update": "1"}))[0]

    async def paused_for_update(self) -> bool:
        status, text = await self.post("/vime/paused", method="GET")
        assert status == 200
        return json.loads(text)["for_update"]


async def generate(server: Server) -> int:
    return (await server.post("/inference/v1/generate"))[0]
