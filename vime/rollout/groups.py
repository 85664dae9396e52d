"""Which groups of answers make up a rollout, when a filter rejects some.

The choice depends on the prompts' order alone, not on which answers come first: otherwise prompts with short answers
would be preferred, and a continued run would differ from an uninterrupted one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from vime.rollout.data import Prompt, PromptDataset
from vime.types import Sample

T = TypeVar("T")
Group = list[Sample]


async def all_or_error(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order; on the first error, or when cancelled, everything else is cancelled and has ended."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel(tasks)


async def cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    unfinished = [task for task in tasks if not task.done()]
    for task in unfinished:
        task.cancel()
    await asyncio.gather(*unfinished, return_exceptions=True)


async def collect_groups(
    prompts: PromptDataset,
    wanted: int,
    make: Callable[[Prompt], Coroutine[Any, Any, Group]],
    keep: Callable[[Group], Awaitable[bool]] | None = None,
    at_once: int | None = None,
    rejected: Callable[[], None] = lambda: None,
) -> list[Group]:
    """The first ``wanted`` groups, in the prompts' order, that ``keep`` accepts.

    ``at_once`` prompts are taken at a time, and more whenever too few groups can still be accepted. When the rollout is
    full, what is still being answered is cancelled and its prompts, and all after the last one used, come again next.
    """
    if keep is None:
        return await all_or_error(make(prompt) for prompt in prompts.take(wanted))

    async def judged(prompt: Prompt) -> Group | None:
        group = await make(prompt)
        if await keep(group):
            return group
        rejected()
        return None

    waiting: deque[tuple[Prompt, asyncio.Task[Group | None]]] = deque()
    accepted: list[Group] = []
    try:
        while True:
            while waiting and waiting[0][1].done():
                prompt, task = waiting.popleft()
                if (group := task.result()) is not None:
                    accepted.append(group)
                if len(accepted) == wanted:
                    prompts.rewind(prompt.position + 1)
                    return accepted
            tasks = [task for _, task in waiting]
            possible = len(accepted) + sum(not task.done() or task.result() is not None for task in tasks)
            if possible < wanted:
                for prompt in prompts.take(at_once or wanted):
                    waiting.append((prompt, asyncio.ensure_future(judged(prompt))))
            else:
                await asyncio.wait([task for task in tasks if not task.done()], return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel([task for _, task in waiting])
