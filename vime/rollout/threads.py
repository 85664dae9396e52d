"""What users wrote, beside the event loop and not in it, in threads that nobody has to wait for."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import contextvars
import functools
import inspect
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from vime.errors import VimeError

T = TypeVar("T")
Ticket = concurrent.futures.Future[None]  # set when it is somebody's turn, in whatever thread and loop they wait


class Overdue(VimeError):
    """A call took longer than it may, or could not begin because calls before it did."""


class Slots:
    """At most ``count`` calls at the same time, over all event loops, in the order in which they came.

    A slot belongs to the thread, not to whoever waits for its result: a call that was given up still takes a processor
    and memory, so it keeps its slot until it ends.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.taken = 0  # so far: whether anything goes on
        self._longest = 0.0  # seconds that one of the calls so far may take
        self._lock, self._free = threading.Lock(), count
        self._waiting: collections.deque[Ticket] = collections.deque()

    async def take(self, seconds: float) -> None:
        """Wait for a slot, for a call that may take ``seconds``; :meth:`give` it back from any thread.

        Raises:
            Overdue: not one of them came free for as long as the longest call may take. (Whoever is quick, as a reward,
                waits for those who take their time, as a whole answer does.)
        """
        ticket = Ticket()
        with self._lock:
            self._longest = max(self._longest, seconds)
            if self._free:
                self._free -= 1
                self.taken += 1
                return
            self._waiting.append(ticket)
        try:
            blocked = f"all {self.count} threads are held by calls that do not end"
            await _turn(ticket, self._longest, lambda: self.taken, blocked)
        except BaseException:
            if not ticket.cancel():  # its turn came meanwhile
                self.give()
            raise

    def give(self) -> None:
        with self._lock:
            while self._waiting:
                ticket = self._waiting.popleft()
                if ticket.set_running_or_notify_cancel():
                    self.taken += 1
                    ticket.set_result(None)
                    return
            self._free += 1


async def _turn(ticket: Ticket, seconds: float, progress: Callable[[], int], blocked: str) -> None:
    """Wait as long as others get their turn; fail when for ``seconds`` nobody did."""
    waiting, seen = asyncio.wrap_future(ticket), -1
    while not waiting.done():
        before, seen = seen, progress()
        if before == seen:
            raise Overdue(f"could not begin: for {seconds:g} s {blocked}")
        await asyncio.wait([waiting], timeout=seconds)


_THREADS = Slots(32)  # for sync functions of the user's own


async def call_within(seconds: float, function: Callable[..., Any], *args: Any) -> Any:
    """Result of a function of the user's own, sync or async. ``seconds`` are those of the call: they do not count
    while it waits for others to end.

    Raises:
        Overdue: it took longer, or could not begin since the calls before it do not end.
    """
    left = seconds
    if inspect.iscoroutinefunction(function):
        result = function(*args)
    else:
        await _THREADS.take(seconds)
        begun = time.monotonic()
        result = await _before(seconds, seconds, in_thread(function, *args, ended=_THREADS.give))
        left -= time.monotonic() - begun
    return await in_own_loop(result, seconds, left) if inspect.isawaitable(result) else result


async def _before(left: float, seconds: float, work: Awaitable[T]) -> T:
    deadline = asyncio.timeout(left)
    try:
        async with deadline:
            return await work
    except TimeoutError as error:
        if deadline.expired():
            raise Overdue(f"took longer than {seconds:g} s") from error
        raise


async def in_thread(function: Callable[..., T], *args: Any, ended: Callable[[], None] = lambda: None) -> T:
    """Result of ``function(*args)``, run in a daemon thread; ``ended`` is called in it when the function has.

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
        try:
            result = context.run(function, *args)
        except (*_END_LOOPS, asyncio.CancelledError) as raised:  # of a loop of its own, and not of ours
            error = _harmless(raised)
        except BaseException as raised:  # noqa: BLE001 - raised again where the result is awaited
            error = raised
        ended()
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
            loop.call_soon_threadsafe(deliver, result, error)

    try:
        threading.Thread(target=run, name=f"vime-{getattr(function, '__name__', 'call')}", daemon=True).start()
    except RuntimeError:  # the system has no more threads
        ended()
        raise
    return await future


async def in_own_loop(awaitable: Awaitable[T], seconds: float, left: float) -> T:
    """Result of an awaitable of the user's own, run in a loop for such alone: one that blocks (``time.sleep``, a slow
    library call) holds up others of its kind, and never the deadlines of the loop that waits for it here.

    Args:
        seconds: what a call may take.
        left: what is left of it, from when the awaitable gets its first turn.

    Raises:
        Overdue: it took longer, or could not begin since another one blocks the loop.
    """
    ticket, own = Ticket(), _user_loop()
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()

    async def contained() -> None:
        own.begun += 1
        ticket.set_result(None)
        # The outcome is set here and not by the end of the task, which the loop would tell only after the first steps
        # of all others that are due.
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # given up meanwhile
            try:
                outcome.set_result(await awaitable)
            except (*_END_LOOPS, asyncio.CancelledError) as raised:
                outcome.set_exception(_harmless(raised))
            except Exception as raised:  # noqa: BLE001 - raised again where the result is awaited
                outcome.set_exception(raised)

    task = asyncio.run_coroutine_threadsafe(contained(), own.loop)
    try:
        await _turn(ticket, seconds, lambda: own.begun, "an async function before it has blocked the others")
        return await _before(left, seconds, asyncio.wrap_future(outcome))
    finally:
        task.cancel()  # where it has not ended


class _UserLoop:
    def __init__(self) -> None:
        self.begun = 0  # calls so far, counted by its thread alone
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="vime-async-functions", daemon=True).start()


@functools.cache
def _user_loop() -> _UserLoop:
    return _UserLoop()


# A user's sys.exit() must not end the loop's thread without a word, and a future cannot carry StopIteration.
_END_LOOPS = (SystemExit, KeyboardInterrupt, StopIteration)


def _harmless(error: BaseException) -> RuntimeError:
    return RuntimeError(f"{type(error).__name__}({error})").with_traceback(error.__traceback__)
