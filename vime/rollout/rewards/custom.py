"""``--custom-rm-path module.function``: the user's own reward, sync or async, per answer or per group."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vime.errors import VimeError
from vime.rollout.threads import Overdue, call_within


async def call(function: Callable[..., Any], flag: str, seconds: float, *args: Any) -> Any:
    """Result of the user's function. It runs in a thread or a loop of its own, so that the other answers go on
    meanwhile.

    Raises:
        VimeError: it raised (with the place in the user's file), or took longer than ``seconds``, in which the time
            that it waits for others to end is not counted.
    """
    name = f"{flag} {getattr(function, '__module__', '')}.{getattr(function, '__qualname__', function)}"
    try:
        return await call_within(seconds, function, *args)
    except Overdue as error:
        raise VimeError(f"{name} {error}") from error
    except VimeError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise VimeError(f"{name} raised {_described(error)}") from error


def _described(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {error}{place}"
