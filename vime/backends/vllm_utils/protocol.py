"""What the two clients of an engine share: errors that name the call, and the versions of weights."""

from __future__ import annotations

import json
import socket
from urllib.parse import urlsplit

from vime.errors import EngineError

CONNECT_TIMEOUT = 5.0  # seconds; the engine is on this machine or next to it
# Seconds that a connection may be idle. The server's is vLLM's VLLM_HTTP_TIMEOUT_KEEP_ALIVE (its default is 5), and is
# so much longer because a server that is busy for a while would close connections that a request is on its way through.
CLIENT_KEEPS_IDLE, SERVER_KEEPS_IDLE = 10.0, 120
LOADED_AT_START = -1  # weight version of an engine that still has the weights it was started with
# What vLLM says of a call when a worker has died; its /health goes on for some seconds, until all its processes ended.
WORKER_DIED = "Executor failed."


def engine_error(
    index: int,
    url: str,
    call: str,
    cause: str,
    *,
    status: int | None = None,
    retryable: bool | None = None,
    unreachable: bool = False,
) -> EngineError:
    """The error of one call. An answer of status 5xx may be different next time or elsewhere, one of 4xx is not."""
    if retryable is None:
        retryable = status is not None and (status >= 500 or status == 429)
    answered = f" answered {status}" if status is not None else " failed"
    message = f"engine {index} ({url}): {call}{answered}: {cause}"
    return EngineError(message, retryable=retryable, unreachable=unreachable, status=status)


def listens(url: str) -> bool:
    """False if connections to ``url`` are refused: nobody will answer there any more. One that is only slow, or cannot
    be reached at the moment, may."""
    address = urlsplit(url)
    try:
        socket.create_connection((address.hostname, address.port), timeout=CONNECT_TIMEOUT).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return True
    return True


def error_message(body: str) -> str:
    """vLLM's own words in the body of an error, which has several shapes, as one line."""
    try:
        content = json.loads(body)
    except ValueError:
        content = body
    if isinstance(content, dict):
        content = content.get("error", content.get("detail", content))
    if isinstance(content, dict):
        content = content.get("message", content)
    text = content if isinstance(content, str) else json.dumps(content)
    return " ".join(text.split())[:2000] or "(no reason given)"


def parse_weight_version(text: str) -> int:
    """vLLM keeps versions as text, "default" before the first update."""
    return LOADED_AT_START if text == "default" else int(text)
