"""Blocking calls beside an event loop, in threads that nobody has to wait for."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_AT_ONCE = threading.BoundedSemaphore(32)  # sync functions of the user's own that run at the same time


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """Result of ``function(*args)``, run in a daemon thread.

    Unlike :func:`asyncio.to_thread`, an event loop that closes does not wait for a call that has been given up: a
    function that hangs must not keep the run from ending with the error that says so.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def deliver(result: Any, error: BaseException | None) -> None:
        if future.done():  # cancelled meanwhile
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result, error = None, None
        with _AT_ONCE:
            if not future.cancelled():
                try:
                    result = context.run(function, *args)
                except BaseException as raised:  # noqa: BLE001 - raised again where the result is awaited
                    error = raised
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
            loop.call_soon_threadsafe(deliver, result, error)

    threading.Thread(target=run, name=f"vime-{getattr(function, '__name__', 'call')}", daemon=True).start()
    return await future
