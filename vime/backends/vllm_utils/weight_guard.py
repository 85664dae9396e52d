"""An engine never answers with weights that are half one version and half another.

ASGI middleware in front of vLLM's server (``--middleware``). It watches the control calls that pass through it:

* while a weight update is open, generation requests are held, and go on when it has finished: one of vime's trainer
  when that resets the prefix cache, which it does once every worker has confirmed the version (vLLM answers to
  ``finish`` with 200 also if a worker has refused it); any other one with vLLM's ``finish``. Not for ever: every call
  of vime's trainer says how long the update may still take, and when that has passed (the trainer has died), they get
  503; of others, when nothing has come for ten minutes. So do new ones of an engine that vime's trainer has paused for
  an update and left so; the next trainer's update ends that pause, and no other one (GET PAUSED_PATH says whose it is);
* after an update that failed, and after a sleep of level 2 (which drops the weights), they are answered with 503 and
  the reason, until an update has finished;
* an update is refused with 409 while the weights are asleep, and so is a sleep while an update is open: layers that
  are being loaded have no memory that vLLM could put away, and what it woke would be half of each version.

vLLM itself would generate from whatever is in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qs

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MIDDLEWARE = "vime.backends.vllm_utils.weight_guard.WeightGuard"
_GENERATES = ("/v1/", "/v2/", "/inference/", "/generate", "/invocations", "/pooling", "/score", "/classify", "/rerank")
_UPDATES = ("/start_weight_update", "/update_weights", "/finish_weight_update", "/collective_rpc")
_FINISH, _CONFIRM = "/finish_weight_update", "/reset_prefix_cache"
_CONTROLS = (*_UPDATES, _CONFIRM, "/pause", "/resume", "/sleep", "/wake_up")
TIMEOUT_HEADER = "x-vime-timeout"  # of a call: the seconds that its caller waits for it
PAUSED_PATH = "/vime/paused"  # GET: {"for_update": whether vime's trainer has paused it for an update, and nobody else}
FOR_UPDATE_HEADER = "x-vime-for-update"  # of a call of /pause: it is vime's trainer's, for an update
_SILENCE = 600.0  # seconds between two calls of an update, of a caller that does not say how long it may take
_GRACE = 30.0  # seconds for which more than that the trainer's ranks wait for each other
_TAGS = frozenset({"weights", "kv_cache"})  # vLLM's, of what a sleep frees
_BY_UPDATE, _BY_OTHERS = "update", "others"
_START, _ENDS = "vime_start_weight_update", ("vime_abort_weight_update", "vime_disconnect")  # methods of plugin.py


class WeightGuard:
    """One per API server; vime runs one API server per engine."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._refuses: str | None = None  # why generation is refused
        self._sleeping: set[str] = set()  # "weights", "kv_cache"
        self._paused: str | None = None  # by whom: _BY_UPDATE or _BY_OTHERS, who end it themselves
        self._open = False
        self._ours = False  # the open update is of vime's trainer
        self._finished = False  # and vLLM has said so
        self._until = 0.0  # when the open update's deadline passes (time.monotonic)
        self._settled: asyncio.Event | None = None  # set when no update is open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] == "http" and (scope["method"], path) == ("GET", PAUSED_PATH):
            await _answer(send, 200, {"for_update": self._paused == _BY_UPDATE})
        elif scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
        elif path in _CONTROLS:
            await self._control(path, scope, receive, send)
        elif path.startswith(_GENERATES):
            late = None if await self._no_update_is_open() else "a weight update has been open past its deadline"
            if (why := late or self._refuses or self._left_paused()) is not None:
                await _refuse(send, 503, f"this engine does not generate: {why}")
            else:
                await self._app(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _no_update_is_open(self) -> bool:
        """Wait for that; False if the open one's deadline has passed. It may still end well."""
        while self._open and self._settled is not None:
            left = self._until - time.monotonic()
            if left <= 0:
                return False
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._settled.wait(), left)
        return True

    def _left_paused(self) -> str | None:
        """vLLM would let a request wait for as long as nobody resumes it."""
        if self._paused == _BY_UPDATE and time.monotonic() > self._until:
            return "it is paused for a weight update whose deadline has passed"
        return None

    async def _control(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _read(receive)
        told = _seconds(scope)
        until = math.inf if told is None else time.monotonic() + told + _GRACE  # inf: not while it lasts
        if self._open and (told is not None or not self._ours):  # others may call meanwhile
            self._until = max(self._until, until)
        if path == "/pause" and _header(scope, FOR_UPDATE_HEADER) and self._paused != _BY_OTHERS:
            # From now on, since it may fail or its caller die while vLLM lets answers in flight end.
            self._paused, self._until = _BY_UPDATE, until
        if "weights" in self._sleeping and _starts(path, body):
            await _refuse(send, 409, "the weights are asleep: wake them (/wake_up?tags=weights) before an update")
            return
        if self._open and path == "/sleep" and _level(scope) >= 1:
            await _refuse(
                send, 409, "a weight update is open: sleep when it, or the next trainer's connection, has ended it"
            )
            return
        status = 0

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                # Before the answer is sent: whoever gets it may generate at once.
                self._after(path, scope, body, status, until)
            await send(message)

        try:
            await self._app(scope, _replay(body, receive), watch)
        finally:
            if not status:  # the caller has gone, or the server failed without an answer
                self._after(path, scope, body, 500, until)
            if self._until == math.inf:
                self._until = time.monotonic() + _SILENCE

    def _after(self, path: str, scope: Scope, body: bytes, status: int, until: float) -> None:
        if path == "/sleep" and status == 200:
            self._paused = _BY_OTHERS
            if _level(scope) >= 1:
                self._sleeping |= _TAGS
            if _level(scope) == 2:
                self._refuses = "a sleep of level 2 has dropped its weights, and no weight update has finished since"
        elif path == "/wake_up" and status == 200:
            self._sleeping -= set(_query(scope).get("tags", _TAGS))
            if not self._sleeping:
                self._paused = None  # vLLM resumes when all is awake
        elif path == "/resume" and status == 200:
            self._paused = None
        elif path == "/pause" and status == 200 and not _header(scope, FOR_UPDATE_HEADER):
            self._paused = _BY_OTHERS
        elif _starts(path, body) and status == 200:
            self._open, self._until, self._settled = True, until, self._settled or asyncio.Event()
            self._settled.clear()
            self._ours, self._finished = _calls(path, body) == _START, False
        elif self._open and self._ours and path == _FINISH and status == 200:
            self._finished = True
        elif self._open and path == (_CONFIRM if self._finished else _FINISH) and status == 200:
            self._close(None)
        elif self._open and path in _UPDATES and (status != 200 or _calls(path, body) in _ENDS):
            self._close("its last weight update failed half-way, and none has finished since")

    def _close(self, refuses: str | None) -> None:
        self._open, self._refuses = False, refuses
        if self._settled is not None:
            self._settled.set()


def _starts(path: str, body: bytes) -> bool:
    return path == "/start_weight_update" or _calls(path, body) == _START


def _calls(path: str, body: bytes) -> str | None:
    if path != "/collective_rpc":
        return None
    try:
        return json.loads(body).get("method")
    except (ValueError, AttributeError):
        return None


def _query(scope: Scope) -> dict[str, list[str]]:
    return parse_qs(scope.get("query_string", b"").decode())


def _level(scope: Scope) -> int:
    """Of a sleep; -1 of one that vLLM refuses."""
    level = _query(scope).get("level", ["1"])[0]
    return int(level) if level in ("0", "1", "2") else -1


def _seconds(scope: Scope) -> float | None:
    """How long the caller waits, if it says so."""
    try:
        return float(_header(scope, TIMEOUT_HEADER))
    except ValueError:
        return None


def _header(scope: Scope, name: str) -> bytes:
    return dict(scope.get("headers", ())).get(name.encode(), b"")


async def _read(receive: Receive) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if message["type"] != "http.request" or not message.get("more_body", False):
            return body


def _replay(body: bytes, receive: Receive) -> Receive:
    sent = False

    async def replayed() -> Message:
        nonlocal sent
        if sent:
            return await receive()  # the caller's disconnection
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


async def _refuse(send: Send, status: int, text: str) -> None:
    await _answer(send, status, {"error": {"message": text, "type": "weights_not_synced", "code": status}})


async def _answer(send: Send, status: int, content: dict[str, Any]) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
