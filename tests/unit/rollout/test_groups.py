"""Which groups make up a filtered rollout: by the prompts' order, whatever finishes first."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from vime.rollout.groups import all_or_error, collect_groups
from vime.types import Sample


class Numbers:
    """Stands in for a dataset: prompt number i is i."""

    def __init__(self) -> None:
        self.drawn = 0

    def take(self, count: int) -> list[Any]:
        self.drawn += count
        return [Place(position) for position in range(self.drawn - count, self.drawn)]

    def rewind(self, position: int) -> None:
        assert position <= self.drawn
        self.drawn = position


class Place:
    def __init__(self, position: int) -> None:
        self.position = position


def collect(wanted: int, kept: set[int], order: list[int], at_once: int | None = None):
    """Groups finish in the order given (of their prompts); those not in it finish after."""
    prompts, started, cancelled = Numbers(), [], []

    async def run():
        gates = {position: asyncio.Event() for position in range(100)}

        async def make(prompt: Any) -> list[Sample]:
            started.append(prompt.position)
            try:
                await gates[prompt.position].wait()
            except asyncio.CancelledError:
                cancelled.append(prompt.position)
                raise
            return [Sample(0, prompt.position, "", [])]

        async def keep(group: list[Sample]) -> bool:
            return group[0].group_index in kept

        async def open_gates() -> None:
            for position in itertools.chain(order, (p for p in range(100) if p not in order)):
                gates[position].set()
                for _ in range(20):
                    await asyncio.sleep(0)

        opening = asyncio.create_task(open_gates())
        groups = await collect_groups(prompts, wanted, make, keep, at_once)  # type: ignore[arg-type]
        opening.cancel()
        return [group[0].group_index for group in groups]

    return asyncio.run(run()), prompts.drawn, started, cancelled


@pytest.mark.parametrize("order", list(itertools.permutations(range(5)))[::7])
def test_order_of_arrival_does_not_decide(order):
    groups, drawn, _, _ = collect(2, {1, 3, 4}, list(order), at_once=5)
    assert groups == [1, 3]
    assert drawn == 4  # prompt 4 was answered in vain and comes again


def test_more_prompts_are_taken_when_too_few_can_be_kept():
    groups, drawn, started, _ = collect(3, {0, 4, 7}, [0, 1, 2, 3, 4, 5, 6, 7])
    assert groups == [0, 4, 7]
    assert drawn == 8
    assert started == list(range(9))


def test_replacements_do_not_wait_for_the_slowest():
    """Prompt 0 is the last to be answered; 1 and 2 are rejected before, so 3 to 5 are on their way meanwhile."""
    groups, _, started, _ = collect(3, {0, 3, 4}, [1, 2, 3, 4, 5, 0])
    assert groups == [0, 3, 4]
    assert started == [0, 1, 2, 3, 4, 5]


def test_what_is_not_needed_any_more_is_cancelled():
    groups, drawn, _, cancelled = collect(1, {0, 1, 2}, [0], at_once=3)
    assert groups == [0]
    assert drawn == 1
    assert cancelled == [1, 2]


def test_an_error_ends_everything_else():
    async def run():
        stopped = []

        async def waits(name: str) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                stopped.append(name)

        async def fails() -> None:
            await asyncio.sleep(0)
            raise ValueError("first")

        with pytest.raises(ValueError, match="first"):
            await all_or_error([waits("a"), fails(), waits("b")])
        return stopped

    assert sorted(asyncio.run(run())) == ["a", "b"]
