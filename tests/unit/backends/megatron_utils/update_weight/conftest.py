"""Fixtures of the weight update's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.unit.backends.megatron_utils.update_weight.toy_engine import ToyEngine


@pytest.fixture(scope="module")
def engines() -> Iterator[Callable[..., ToyEngine]]:
    """Starts toy engines (index, slot, workers), which end with the module."""
    from tests.unit.backends.megatron_utils.update_weight.toy_engine import ToyEngine

    started: list[ToyEngine] = []

    def start(*args: Any) -> ToyEngine:
        started.append(ToyEngine(*args))
        return started[-1]

    yield start
    for engine in started:
        engine.stop()
