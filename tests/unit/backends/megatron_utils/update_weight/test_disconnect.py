"""Engines that outlive their trainer give its memory back when it leaves them, and can be connected again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import run_ranks
from tests.unit.backends.megatron_utils.update_weight.scenarios import attempt
from tests.unit.backends.megatron_utils.update_weight.toy_engine import (
    Rank,
    ToyEngine,
    digests,
    expected_digests,
    fail_at,
    processes,
)
from vime.models.layout import ParallelLayout
from vime.types import EngineAddress, Slot


def _mapped(pids: list[int]) -> list[int]:
    """Of each process, how many pieces of trainer memory it has mapped."""
    return [sum("/memfd:vime" in line for line in Path(f"/proc/{pid}/maps").read_text().splitlines()) for pid in pids]


def _leave_and_return(rank: int, addresses: list[EngineAddress], pids: list[int], transport: str) -> dict[str, Any]:
    me = Rank(rank, ParallelLayout(2, tp=2, ep=1, etp=2), update_weight_transport=transport)
    me.update.connect_rollout_engines(addresses)
    me.train(1)
    me.update.update_weights(1)
    found: dict[str, Any] = {"connected": _mapped(pids)}
    me.update._gather("test", lambda: None)  # the other rank has looked as well
    me.update.disconnect_rollout_engines()
    found["left"] = _mapped(pids)
    found["unconnected"] = attempt(me.update.update_weights, 2)
    me.update.connect_rollout_engines(addresses)
    me.train(2)
    me.update.update_weights(2)
    return found | {"digests": [digests(address) for address in addresses] if rank == 0 else []}


@pytest.mark.parametrize("transport", ["planned", "bucketed"])
def test_a_trainer_that_leaves_takes_its_memory_along(engines: Callable[..., ToyEngine], transport: str) -> None:
    started = [engines(0, Slot(0, 2), 2), engines(1, Slot(1, 2), 1)]
    addresses, pids = [engine.address for engine in started], [engine.process.pid for engine in started]
    found = run_ranks(2, _leave_and_return, addresses, pids, transport, context=processes())
    for rank in found:
        assert all(count > 0 for count in rank["connected"])
        assert rank["left"] == [0, 0]
        assert "is connected to no engine" in rank["unconnected"]["error"]["cause"]
    assert found[0]["digests"] == [expected_digests(2, 2), expected_digests(2, 1)]


def _leave_one_that_fails(rank: int, addresses: list[EngineAddress], pids: list[int]) -> dict[str, Any]:
    me = Rank(rank, ParallelLayout(2, tp=2, ep=1, etp=2))
    me.update.connect_rollout_engines(addresses)
    me.train(1)
    me.update.update_weights(1)
    if rank == 0:
        fail_at(addresses[0], "vime_disconnect", "no")
    me.update._gather("test", lambda: None)
    return attempt(me.update.disconnect_rollout_engines) | {"left": _mapped(pids)}


def test_an_engine_that_cannot_be_left_is_named_on_every_rank(engines: Callable[..., ToyEngine]) -> None:
    started = [engines(0, Slot(0, 1), 1), engines(1, Slot(1, 2), 1)]
    pids = [engine.process.pid for engine in started]
    found = run_ranks(2, _leave_one_that_fails, [engine.address for engine in started], pids, context=processes())
    for rank in found:
        assert (rank["error"]["phase"], rank["error"]["engines"]) == ("disconnect", [0])
        assert rank["left"][0] > 0
        assert rank["left"][1] == 0
