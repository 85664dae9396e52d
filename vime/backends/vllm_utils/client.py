"""Talking to one vLLM engine over HTTP: the control calls, and by re-export generation (generate.py).

What differs between vLLM 0.26 (the GPU's release), 0.32 (the CPU's) and 0.33 is handled here and nowhere else:

* 0.26 has no ``/weight_info`` and ignores the version given to ``/finish_weight_update``;
* 0.26 answers ``/sleep`` and ``/wake_up`` with an empty body, so nothing may depend on a body's content;
* 0.33 answers 503 to requests while it is paused, 0.32 and 0.26 keep them waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import requests

from vime.backends.vllm_utils.generate import AsyncEngineClient, Generation
from vime.backends.vllm_utils.protocol import (
    CONNECT_TIMEOUT,
    LOADED_AT_START,
    engine_error,
    error_message,
    parse_weight_version,
)
from vime.backends.vllm_utils.sampling import SamplingParams
from vime.backends.vllm_utils.weight_guard import FOR_UPDATE_HEADER, PAUSED_PATH, TIMEOUT_HEADER
from vime.errors import EngineError

__all__ = ["LOADED_AT_START", "AsyncEngineClient", "EngineClient", "Generation", "SamplingParams"]

PauseMode = Literal["abort", "wait", "keep"]


class EngineClient:
    """Control calls to one engine. Blocking, one thread at a time; every call has a deadline.

    Every method raises :class:`~vime.errors.EngineError`, which names the engine, the call, its status and vLLM's own
    message.

    Args:
        url: e.g. ``http://127.0.0.1:8000``.
        index: number of the engine, for messages.
        timeout: seconds a call may take unless it says otherwise.
    """

    def __init__(self, url: str, index: int = 0, timeout: float = 300.0) -> None:
        self.url, self.index, self.timeout = url.rstrip("/"), index, timeout
        self._session = requests.Session()
        self._session.trust_env = False  # no proxy stands between us and our engine
        # vLLM's server closes the connection after an error 500; the next call must not meet the closing one.
        self._session.headers["Connection"] = "close"

    def close(self) -> None:
        self._session.close()

    def __enter__(self) -> EngineClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- state ----

    def health(self, timeout: float = 10.0) -> None:
        """Return if the engine can generate (its EngineCore included)."""
        self._call("GET", "/health", timeout=timeout)

    def version(self) -> str:
        """The release of vLLM, e.g. "0.32.0"."""
        return self._call("GET", "/version")["version"]

    def get_world_size(self) -> int:
        """Number of workers."""
        return int(self._call("GET", "/get_world_size")["world_size"])

    def weight_version(self) -> int | None:
        """Version of the weights it serves: LOADED_AT_START before the first update, None where vLLM has none."""
        try:
            reply = self._call("GET", "/weight_info")
        except EngineError as error:
            if error.status == 404:
                return None
            raise
        return parse_weight_version(reply["weight_version"])

    # ---- generation on and off ----

    def pause(self, mode: PauseMode = "abort", timeout: float | None = None, for_update: bool = False) -> None:
        """Stop generating and return once nothing runs.

        ``abort`` ends the answers in flight where they are (finish reason "abort"), ``wait`` lets them end; both drop
        the prefix cache. ``keep`` freezes them, with the KV cache they have, until :meth:`resume`.

        Args:
            for_update: it is for a weight update, whose trainer resumes likewise; should that die, the next one's
                update ends it. One that is paused or asleep already is not the update's to resume.
        """
        self._call("POST", "/pause", query={"mode": mode}, timeout=timeout, for_update=for_update)

    def resume(self, timeout: float | None = None, for_update: bool = False) -> None:
        """``for_update``: only if it is paused for an update; whoever else has stopped it, starts it again."""
        self._call("POST", "/resume", timeout=timeout, for_update=for_update)

    def is_paused(self) -> bool:
        return bool(self._call("GET", "/is_paused")["is_paused"])

    def is_paused_for_update(self, timeout: float | None = None) -> bool:
        """Whether a trainer has paused it for an update, and nobody else has paused it or put it to sleep."""
        return bool(self._call("GET", PAUSED_PATH, timeout=timeout)["for_update"])

    def sleep(self, level: int = 2, timeout: float | None = None) -> None:
        """Free GPU memory; what runs is aborted. Level 1 keeps the weights in host memory, level 2 drops them."""
        self._call("POST", "/sleep", query={"level": level, "mode": "abort"}, timeout=timeout)

    def wake_up(self, tags: Sequence[str] = (), timeout: float | None = None) -> None:
        """Take GPU memory again: ``["weights"]``, ``["kv_cache"]``, or all. After level 2 the weights are undefined."""
        self._call("POST", "/wake_up", query={"tags": list(tags)}, timeout=timeout)

    def reset_prefix_cache(self, timeout: float | None = None) -> None:
        """Forget the KV cache of earlier prompts, which new weights make wrong."""
        reply = self._call("POST", "/reset_prefix_cache", timeout=timeout)
        if isinstance(reply, dict) and reply.get("success") is False:
            raise self._error("POST /reset_prefix_cache", "blocks are still in use: pause first", retryable=True)

    def abort_requests(self, request_ids: Sequence[str] = ()) -> None:
        """Abort these requests (as given to ``generate``), or all."""
        ids = [f"generate-tokens-{request_id}" for request_id in request_ids]  # vLLM's prefix on this route
        self._call("POST", "/abort_requests", {"request_ids": ids})

    # ---- weights ----

    def init_weight_transfer(self, info: dict[str, Any], timeout: float | None = None) -> None:
        """Hand ``info`` (plain JSON) to the weight transfer engine of every worker."""
        self._call("POST", "/init_weight_transfer_engine", {"init_info": info}, timeout=timeout)

    def start_weight_update(self, timeout: float | None = None) -> None:
        """Open an update. The engine must be paused: a step between start and finish would run on half the weights.

        vime's trainer does so through its worker extension (plugin.py), which also says how it went.
        """
        self._call("POST", "/start_weight_update", {}, timeout=timeout)

    def finish_weight_update(self, version: int | None = None, timeout: float | None = None) -> None:
        """Close the update; answers from now on carry ``version``."""
        body = {} if version is None else {"weight_version": str(version)}
        self._call("POST", "/finish_weight_update", body, timeout=timeout)

    def collective_rpc(
        self, method: str, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> list[dict[str, Any] | list[Any] | str | None]:
        """Call ``method`` of every worker; results that are neither dict, list nor None come back as strings.

        The deadline is ours alone. vLLM's executor, given one, stops reading its workers' answers when it has passed,
        and then takes each for that to the next call.
        """
        body = {"method": method, "args": list(args), "kwargs": kwargs}
        return self._call("POST", "/collective_rpc", body, timeout=timeout)["results"]

    # ---- HTTP ----

    def _call(
        self,
        verb: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        query: dict[str, Any] | None = None,
        timeout: float | None = None,
        for_update: bool = False,
    ) -> Any:
        call, seconds = f"{verb} {path}", timeout or self.timeout
        # 0.21 to 0.24 refuse an empty body on some routes, so every POST has one.
        payload = (body or {}) if verb == "POST" else None
        try:
            reply = self._session.request(
                verb,
                self.url + path,
                params=query,
                json=payload,
                headers={TIMEOUT_HEADER: f"{seconds:g}"} | ({FOR_UPDATE_HEADER: "1"} if for_update else {}),
                timeout=(min(CONNECT_TIMEOUT, seconds), seconds),
            )
        except requests.ConnectTimeout as error:
            raise self._error(call, "cannot connect", retryable=True, unreachable=True) from error
        except requests.Timeout as error:
            raise self._error(call, f"no answer within {seconds:g} s", retryable=True) from error
        except requests.RequestException as error:  # also one that breaks off between an answer's head and its body
            raise self._error(call, f"connection lost ({error})", retryable=True, unreachable=True) from error
        if reply.status_code != 200:
            raise self._error(call, error_message(reply.text), status=reply.status_code)
        try:
            return reply.json() if reply.content else None
        except ValueError:
            return None

    def _error(self, call: str, cause: str, **details: Any) -> EngineError:
        return engine_error(self.index, self.url, call, cause, **details)
