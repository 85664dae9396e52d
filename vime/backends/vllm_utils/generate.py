"""Asking one vLLM engine for answers: token ids in, token ids and log-probs out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from vime.backends.vllm_utils.command import MODEL_NAME
from vime.backends.vllm_utils.protocol import (
    CLIENT_KEEPS_IDLE,
    CONNECT_TIMEOUT,
    engine_error,
    error_message,
    parse_weight_version,
)
from vime.backends.vllm_utils.sampling import SamplingParams
from vime.errors import EngineError

_CALL = "POST /inference/v1/generate"
_MISSING = -9999.0  # what vLLM sends for a log-prob that is NaN, -inf or absent


@dataclass(slots=True)
class Generation:
    """One answer.

    Attributes:
        token_ids: every token generated, the one that ended the answer included.
        log_probs: natural log-probability of each of them under the distribution it was drawn from, after temperature,
            top-k and top-p. At temperature 0 that of the unscaled distribution.
        finish_reason: "stop" (an end token, stop token or stop string), "length" or "abort" (paused or aborted).
        stop_reason: the stop token or string; None for the tokenizer's own end token, and always with vLLM 0.26.
        weight_versions: versions of the weights that produced it, oldest first, each once.
    """

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str
    stop_reason: int | str | None
    weight_versions: list[int]


class AsyncEngineClient:
    """Generation by one engine, for one event loop.

    Args:
        url: e.g. ``http://127.0.0.1:8000``.
        index: number of the engine, for messages.
        timeout: seconds one answer may take (``--request-timeout``).
        session: shared with other clients (:func:`new_session`); by default it has its own, which :meth:`close` closes.
        log: the engine's log, for messages.

    Attributes:
        weight_version: what vLLM 0.26, which keeps no versions, is taken to serve; whoever updates weights sets it.
    """

    def __init__(
        self,
        url: str,
        index: int = 0,
        timeout: float = 1800.0,
        session: aiohttp.ClientSession | None = None,
        log: str | None = None,
    ) -> None:
        self.url, self.index, self.timeout = url.rstrip("/"), index, timeout
        self.log = log
        self.weight_version: int | None = None
        self._session, self._owned = session, session is None

    async def close(self) -> None:
        if self._owned and self._session is not None:
            await self._session.close()
            self._session = None

    async def __aenter__(self) -> AsyncEngineClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def health(self, timeout: float = 10.0) -> None:
        """Return if the engine can generate, else raise EngineError."""
        await self._request("GET", "/health", None, timeout)

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, request_id: str, timeout: float | None = None
    ) -> Generation:
        """One answer to one prompt.

        Cancelling it, or its deadline, closes the connection, and vLLM then aborts the request.

        Args:
            token_ids: the prompt.
            sampling: how to sample.
            request_id: unique among the requests this engine works on.
            timeout: seconds it may take (default: the client's).

        Raises:
            EngineError: with ``retryable`` and ``unreachable`` as they apply; an answer that is not complete, or has a
                log-prob that is no number, counts as an error, never as an answer.
        """
        body = {
            "model": MODEL_NAME,
            "request_id": request_id,
            "token_ids": list(token_ids),
            "sampling_params": sampling.body(),
        }
        before = self.weight_version
        reply = await self._request("POST", "/inference/v1/generate", body, timeout or self.timeout)
        try:
            generation = parse_generation(reply, sampling.max_tokens)
        except (ValueError, KeyError, TypeError) as error:
            cause = f"request {request_id}: {error}" if isinstance(error, ValueError) else f"unreadable: {error!r}"
            raise engine_error(self.index, self.url, _CALL, cause, retryable=False) from error
        if not generation.weight_versions:
            versions = (before, self.weight_version)
            generation.weight_versions = [version for version in dict.fromkeys(versions) if version is not None]
        return generation

    async def _request(self, verb: str, path: str, body: dict[str, Any] | None, timeout: float) -> Any:
        if self._session is None:
            self._session = new_session()
        call = f"{verb} {path}"
        limits = aiohttp.ClientTimeout(total=timeout, sock_connect=CONNECT_TIMEOUT)
        try:
            async with self._session.request(verb, self.url + path, json=body, timeout=limits) as reply:
                if reply.status != 200:
                    raise self._error(call, error_message(await reply.text()), status=reply.status)
                return await reply.json(content_type=None)
        except aiohttp.ConnectionTimeoutError as error:
            raise self._error(call, "cannot connect", retryable=True, unreachable=True) from error
        except TimeoutError as error:
            raise self._error(call, f"no answer within {timeout:g} s", retryable=True) from error
        except aiohttp.ClientError as error:
            cause = f"connection lost ({error or type(error).__name__})"
            raise self._error(call, cause, retryable=True, unreachable=True) from error
        except ValueError as error:
            raise self._error(call, f"no JSON: {error}", retryable=True) from error

    def _error(self, call: str, cause: str, **details: Any) -> EngineError:
        return engine_error(self.index, self.url, call, cause, **details)


def new_session() -> aiohttp.ClientSession:
    """Connections for any number of requests and engines, each used for one after the other.

    An idle one is closed here long before vLLM's server would: a request that meets a closing connection takes the
    engine for dead, and asks. (After an error that the server closes for, its answer says so.)
    """
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=CLIENT_KEEPS_IDLE)
    return aiohttp.ClientSession(connector=connector, trust_env=False)


def parse_generation(reply: Any, max_tokens: int) -> Generation:
    """Read vLLM's reply and check that it is a whole answer.

    Raises:
        ValueError: not exactly one answer, no tokens, or log-probs that are missing, of other tokens or not a number.
    """
    choices = reply["choices"]
    if len(choices) != 1:
        raise ValueError(f"{len(choices)} answers to one request")
    choice = choices[0]
    token_ids, finish_reason = choice["token_ids"] or [], choice["finish_reason"]
    if finish_reason not in ("stop", "length", "abort"):
        raise ValueError(f"finish reason {finish_reason!r}")
    if finish_reason != "abort" and not token_ids:
        raise ValueError(f"an answer without tokens (finish reason {finish_reason})")
    if len(token_ids) > max_tokens:
        raise ValueError(f"{len(token_ids)} tokens, {max_tokens} were asked for")
    content = (choice.get("logprobs") or {}).get("content") or []
    if len(content) != len(token_ids):
        raise ValueError(f"{len(content)} log-probs for {len(token_ids)} tokens")
    log_probs = []
    for position, (token, entry) in enumerate(zip(token_ids, content, strict=True)):
        value = entry["logprob"]
        if _token_of(entry) != token:
            raise ValueError(f"log-prob {position} is of token {_token_of(entry)}, not of the sampled {token}")
        if value is None or not math.isfinite(value) or value <= _MISSING:
            raise ValueError(f"log-prob {position} is not a number: the model's logits hold NaN or infinity")
        log_probs.append(float(value))
    spans = choice.get("weight_versions") or []
    versions = list(dict.fromkeys(parse_weight_version(span["version"]) for span in spans))
    return Generation(list(token_ids), log_probs, finish_reason, choice.get("stop_reason"), versions)


def _token_of(entry: dict[str, Any]) -> int:
    """The token id of one log-prob entry: a number in 0.32, the text "token_id:5" in 0.26."""
    return entry["token_id"] if "token_id" in entry else int(entry["token"].removeprefix("token_id:"))
