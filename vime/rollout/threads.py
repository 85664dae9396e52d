"""What users wrote, beside the event loop and not in it, in threads that nobody has to wait for."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import threading
from collections.abc import Awaitable, Callable
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
                except _END_LOOPS as raised:
                    error = _harmless(raised)
                except BaseException as raised:  # noqa: BLE001 - raised again where the result is awaited
                    error = raised
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
            loop.call_soon_threadsafe(deliver, result, error)

    threading.Thread(target=run, name=f"vime-{getattr(function, '__name__', 'call')}", daemon=True).start()
    return await future


async def in_own_loop(awaitable: Awaitable[T]) -> T:
    """Result of an awaitable of the user's own, run in a loop for such alone: one that blocks (``time.sleep``, a slow
    library call) holds up others of its kind, and never the deadlines of the loop that waits for it here."""

    async def contained() -> T:
        try:
            return await awaitable
        except _END_LOOPS as raised:
            raise _harmless(raised) from raised

    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(contained(), _user_loop()))


@functools.cache
def _user_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="vime-async-functions", daemon=True).start()
    return loop


# A user's sys.exit() must not end the loop's thread without a word, and a future cannot carry StopIteration.
_END_LOOPS = (SystemExit, KeyboardInterrupt, StopIteration)


def _harmless(error: BaseException) -> RuntimeError:
    return RuntimeError(f"{type(error).__name__}({error})").with_traceback(error.__traceback__)
