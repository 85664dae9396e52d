"""An engine never answers with weights that are half one version and half another.

ASGI middleware in front of vLLM's server (``--middleware``). It watches the control calls that pass through it:

* generation requests are held here, not in vLLM, while the engine is paused, asleep, or an update is open. They go on
  when it does: after an update of vime's trainer, when that has reset the prefix cache, which it does once every worker
  has confirmed the version (vLLM answers to ``finish`` with 200 also if a worker has refused it), and has resumed;
  after any other update with vLLM's ``finish``. An update does not hold them for ever: every call of vime's trainer
  says how long the update may still take, and when that has passed (the trainer has died), they get 503; of others,
  when ten minutes have passed since their last call was answered.
* after an update that failed, and after a sleep of level 2 (which drops the weights), they are answered with 503 and
  the reason, until an update has finished;
* calls that would mix these are refused with 409: an update of an engine that is asleep, or that somebody has resumed
  meanwhile; a sleep while an update is open (layers that are being loaded have no memory that could be put away); and
  what lets vLLM go on while an update is open, or with what it may have queued for weights that are not there.
* whoever has paused an engine or put it to sleep, starts it again: vime's trainer marks its pause and its resume
  (FOR_UPDATE_HEADER), and the latter passes only if the pause is an update's, of this trainer or of one that has died.

vLLM itself would generate from whatever is in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MIDDLEWARE = "vime.backends.vllm_utils.weight_guard.WeightGuard"
TIMEOUT_HEADER = "x-vime-timeout"  # of a call: the seconds that its caller waits for it
FOR_UPDATE_HEADER = "x-vime-for-update"  # of /pause and /resume: for a weight update, by vime's trainer
PAUSED_PATH = "/vime/paused"  # GET: {"for_update": whether an update has paused it, and nobody else}
_GENERATES = ("/v1/", "/v2/", "/inference/", "/generate", "/generative_scoring", "/invocations", "/pooling", "/score")
_GENERATES += ("/classify", "/rerank", "/cohere/")
_CANCELS = ("/abort_requests", "/cancel")  # ends of paths that begin likewise
_UPDATES = ("/start_weight_update", "/update_weights", "/finish_weight_update", "/collective_rpc")
_FINISH, _CONFIRM = "/finish_weight_update", "/reset_prefix_cache"
_CONTROLS = (*_UPDATES, _CONFIRM, "/pause", "/resume", "/sleep", "/wake_up", "/release_kv_cache_memory")
_SILENCE = 600.0  # seconds between two calls of an update, of a caller that does not say how long it may take
_GRACE = 30.0  # seconds for which more than that the trainer's ranks wait for each other
_START, _ENDS = "vime_start_weight_update", ("vime_abort_weight_update", "vime_disconnect")  # methods of plugin.py
_TAGS = frozenset({"weights", "kv_cache"})  # vLLM's, of what a sleep frees
_BY_UPDATE, _BY_OTHERS = "update", "others"
_FAILED = "its last weight update failed half-way, and none has finished since"
_DROPPED = "a sleep of level 2 has dropped its weights, and no weight update has finished since"
_ASLEEP = "the weights are asleep: wake them (/wake_up?tags=weights) before an update"
_FALLING_ASLEEP = "a sleep is under way: wait until it has ended"
_OPEN = (
    "a weight update is open: wait until it has ended; if its trainer has died, connect the next one, or end it "
    "(/collective_rpc with the method vime_abort_weight_update)"
)


@dataclass(frozen=True)
class _Call:
    path: str
    method: str | None  # of a /collective_rpc
    query: dict[str, list[str]]
    seconds: float | None  # that its caller waits, if it says so
    for_update: bool

    @property
    def starts(self) -> bool:
        return self.path == "/start_weight_update" or self.method == _START

    @property
    def level(self) -> int:
        """Of a sleep, as vLLM reads it; -1 of one that it refuses, and of other calls."""
        if self.path != "/sleep":
            return -1
        try:
            level = float(self.query.get("level", ["1"])[-1])
        except ValueError:
            return -1
        return min(int(level), 2) if level.is_integer() and level >= 0 else -1  # 0.26 drops the weights for 3 as well

    @property
    def stops(self) -> bool:
        return self.path in ("/pause", "/sleep")

    @property
    def kinds(self) -> list[str]:
        """As what it counts while it is under way."""
        kinds = {"start": self.starts, "stop": self.stops, "sleep": self.level >= 1}
        return [kind for kind, does in kinds.items() if does]

    @property
    def keeps_requests(self) -> bool:
        """Of one that stops."""
        return self.query.get("mode", ["abort"])[-1] != "abort"

    def asleep_after(self, sleeping: set[str]) -> set[str]:
        """What a /wake_up leaves asleep. As vLLM does: nothing is woken if a tag of it is not asleep."""
        if "tags" not in self.query:
            return set()
        tags = set(self.query["tags"]) - {"scheduling"}
        return sleeping - tags if tags <= sleeping else set(sleeping)


class WeightGuard:
    """One per API server; vime runs one API server per engine."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._refuses: str | None = None  # why generation is refused
        self._paused: str | None = None  # by whom: _BY_UPDATE or _BY_OTHERS
        self._sleeping: set[str] = set()  # of _TAGS; whoever sleeps is paused
        self._resumed = 0  # times that vLLM has gone on
        self._queued = False  # vLLM may have requests, from before it was paused
        self._open = False  # an update is
        self._ours = False  # it is of vime's trainer
        self._finished = False  # and vLLM has said so
        self._until = 0.0  # when the deadline of that, or of the pause for it, passes (time.monotonic)
        self._under_way: Counter[str] = Counter()  # "start", "stop", "sleep": calls that vLLM has not answered
        self._changed = asyncio.Event()  # what a held request waits for may have come

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope.get("path", ""), scope.get("method") if scope["type"] == "http" else None
        if (method, path) == ("GET", PAUSED_PATH):
            await _answer(send, 200, {"for_update": self._paused == _BY_UPDATE})
        elif method == "POST" and path in _CONTROLS:
            await self._control(scope, receive, send)
        elif method == "POST" and path.startswith(_GENERATES) and not path.endswith(_CANCELS):
            body = await _read(receive)  # or it might come when all has changed again
            if (why := await self._why_not_now()) is not None:
                await _refuse(send, 503, f"this engine does not generate: {why}")
            else:
                await self._app(scope, _replay(body, receive), send)
        else:
            await self._app(scope, receive, send)

    async def _why_not_now(self) -> str | None:
        """Wait until it generates. The answer is why it is not to, or None."""
        while self._open or (self._stops() and self._refuses is None):
            left = None  # whoever else has stopped it knows for how long
            if self._open or self._paused == _BY_UPDATE:
                left = self._until - time.monotonic()
                if left <= 0:  # it may still end well
                    what = "a weight update has been open" if self._open else "it is paused for an update"
                    return f"{what} past its deadline"
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left)
        return self._refuses

    def _stops(self) -> bool:
        """It is paused or about to be: vLLM, which first ends what runs, would queue what comes then."""
        return self._paused is not None or self._under_way["stop"] > 0

    def _state(self) -> tuple[Any, ...]:
        """What a held request waits for a change of."""
        return self._open, self._stops(), self._paused, self._refuses, self._until == math.inf

    async def _control(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _read(receive)
        call = _parse(scope, body)
        asleep = self._paused == _BY_OTHERS or self._under_way["sleep"]
        if call.path == "/resume" and call.for_update and asleep:
            await _answer(send, 200, {"status": "left as it is: no update has stopped it"})
            return
        if (why := self._conflict(call)) is not None:
            await _refuse(send, 409, why)
            return
        until = self._before(call)
        kept, resumed, status, answered = self._refuses, self._resumed, 0, False
        if call.level == 2:  # whatever comes of it, the weights may be gone
            self._refuses = _DROPPED

        async def watch(message: Message) -> None:
            nonlocal status, answered
            if message["type"] == "http.response.start":
                status = message["status"]
            elif not answered:  # its body; and before that is sent: whoever gets it may generate at once
                answered = True
                self._after(call, 0 if _denies(message) else status, until, resumed)
            await send(message)

        self._under_way.update(call.kinds)
        before = self._state()
        try:
            await self._app(scope, _replay(body, receive), watch)
        finally:
            self._under_way.subtract(call.kinds)
            if not answered:  # the caller has gone, or the server failed without an answer
                self._after(call, 500, until, resumed)
            if call.level == 2 and 400 <= status < 500:
                self._refuses = kept
            if self._until == math.inf:
                self._until = time.monotonic() + _SILENCE
            if self._state() != before:
                self._changed.set()
                self._changed = asyncio.Event()

    def _conflict(self, call: _Call) -> str | None:
        opens = self._open or self._under_way["start"]
        goes_on = call.path == "/resume" or (call.path == "/wake_up" and not call.asleep_after(self._sleeping))
        if (call.starts or call.path in ("/resume", "/wake_up")) and self._under_way["sleep"]:
            return _FALLING_ASLEEP
        if call.starts and "weights" in self._sleeping:
            return _ASLEEP
        if call.method == _START and self._paused is None:
            return "it is not paused for the update: somebody has resumed it"
        if (call.level >= 1 or goes_on) and opens:
            return _OPEN
        if call.path == "/resume" and self._sleeping:
            return "it is asleep: wake it (/wake_up)"
        if goes_on and self._refuses is not None and self._queued:
            return f"{self._refuses}; what it has queued would be answered: end that first (/pause?mode=abort)"
        return None

    def _before(self, call: _Call) -> float:
        """Returns when the call's deadline passes."""
        # inf: not while it lasts
        until = math.inf if call.seconds is None else time.monotonic() + call.seconds + _GRACE
        if self._open and (call.seconds is not None or not self._ours):  # others may call meanwhile
            self._until = max(self._until, until)
        if call.stops and self._paused is None:
            self._queued = call.keeps_requests  # of one that is stopped already it stays: it has got no more since
        if call.path == "/pause" and call.for_update and self._paused != _BY_OTHERS:
            # From now on, since it may fail or its caller die while vLLM lets answers in flight end.
            self._paused = _BY_UPDATE
            if not self._open:
                self._until = until
        return until

    def _after(self, call: _Call, status: int, until: float, resumed: int) -> None:
        """``resumed``: ``self._resumed`` when the call came."""
        if call.path in ("/pause", "/sleep", "/wake_up", "/resume", "/release_kv_cache_memory"):
            if status == 200:
                self._stopped_or_gone_on(call, resumed)
        elif call.starts and status == 200:
            self._open, self._until = True, until
            self._ours, self._finished = call.method == _START, False
        elif self._open and self._ours and call.path == _FINISH and status == 200:
            self._finished = True
        elif self._open and call.path == (_CONFIRM if self._finished else _FINISH) and status == 200:
            self._open, self._refuses = False, None
        elif self._open and call.path in _UPDATES and self._ends_it(call, status):
            self._open, self._refuses = False, _FAILED

    def _ends_it(self, call: _Call, status: int) -> bool:
        """Whether an update has failed. A stranger's call that fails is not one of vime's trainer's."""
        return call.method in _ENDS or (status != 200 and (call.seconds is not None or not self._ours))

    def _stopped_or_gone_on(self, call: _Call, resumed: int) -> None:
        if call.level >= 1:
            self._sleeping |= _TAGS
        elif call.path == "/release_kv_cache_memory":
            self._sleeping.add("kv_cache")
        elif call.path == "/wake_up":
            self._sleeping = call.asleep_after(self._sleeping)
        if call.path == "/resume" or (call.path == "/wake_up" and not self._sleeping):  # then vLLM goes on
            self._paused, self._resumed = None, self._resumed + 1
        elif self._resumed == resumed and not (call.for_update and self._paused == _BY_UPDATE):
            self._paused = _BY_OTHERS  # its answer may come long after somebody has resumed
        if call.stops and not call.keeps_requests:
            self._queued = False


def _parse(scope: Scope, body: bytes) -> _Call:
    headers = dict(scope.get("headers", ()))
    method = None
    if scope["path"] == "/collective_rpc":
        with contextlib.suppress(ValueError, AttributeError):
            method = json.loads(body).get("method")
    try:
        seconds = float(headers.get(TIMEOUT_HEADER.encode(), b""))
    except ValueError:
        seconds = None
    query = parse_qs(scope.get("query_string", b"").decode(), keep_blank_values=True)
    return _Call(scope["path"], method, query, seconds, FOR_UPDATE_HEADER.encode() in headers)


def _denies(message: Message) -> bool:
    """Of the body of an answer: vLLM says 200 also where the prefix cache could not be reset."""
    try:
        return json.loads(message.get("body", b"")).get("success") is False
    except (ValueError, AttributeError):
        return False


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
