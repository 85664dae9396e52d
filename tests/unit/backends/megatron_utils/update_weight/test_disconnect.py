"""Engines that outlive their trainer give its memory back when it leaves them, and can be connected again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import run_ranks
from tests.unit.backends.megatron_utils.update_weight.scenarios import attempt
from tests.unit.backends.megatron_utils.update_weight.test_moved_arenas import move
from tests.unit.backends.megatron_utils.update_weight.toy_engine import (
    SPEC,
    Rank,
    ToyEngine,
    ask,
    digests,
    expected_digests,
    fail_at,
    make_config,
    processes,
)
from vime.backends.megatron_utils.update_weight import weight_update_class
from vime.models.layout import ParallelLayout
from vime.types import EngineAddress, Slot


def _mapped(pids: list[int]) -> list[int]:
    """Of each process, how many pieces of trainer memory it has mapped."""
    return [sum("/memfd:vime" in line for line in Path(f"/proc/{pid}/maps").read_text().splitlines()) for pid in pids]


def _leave_and_return(rank: int, addresses: list[EngineAddress], pids: list[int], transport: str) -> dict[str, Any]:
    me = Rank(rank, ParallelLayout(2, tp=2, ep=1, etp=2))
    config = make_config(update_weight_transport=transport)
    me.update = weight_update_class(transport)(config, SPEC, me.layout, rank, me.params, "cpu")
    me.update.disconnect_rollout_engines()  # from none
    me.update.connect_rollout_engines(addresses)
    me.train(1)
    me.update.update_weights(1)
    found: dict[str, Any] = {"connected": _mapped(pids), "channels": [sorted(me.update._channels._ends)]}
    me.update._gather("test", lambda: None)  # the other rank has looked as well
    me.update.disconnect_rollout_engines()
    found |= {"left": _mapped(pids), "stream": me.update._stream is not None}
    found["channels"].append(sorted(me.update._channels._ends))
    found["unconnected"] = attempt(me.update.update_weights, 2)
    me.update.connect_rollout_engines(addresses)
    me.train(2)
    me.update.update_weights(2)
    return found | {"digests": [digests(address) for address in addresses] if rank == 0 else []}


@pytest.mark.parametrize("transport", ["planned", "bucketed", "distributed"])
def test_a_trainer_that_leaves_takes_its_memory_along(engines: Callable[..., ToyEngine], transport: str) -> None:
    started = [engines(0, Slot(0, 2), 2), engines(1, Slot(1, 2), 1)]
    addresses, pids = [engine.address for engine in started], [engine.process.pid for engine in started]
    found = run_ranks(2, _leave_and_return, addresses, pids, transport, context=processes())
    for rank in found:
        if transport == "distributed":
            assert rank["channels"] == [[0, 1], []]
        else:
            assert all(count > 0 for count in rank["connected"])
        assert rank["left"] == [0, 0]
        assert not rank["stream"]
        assert "is connected to no engine" in rank["unconnected"]["error"]["cause"]
    assert found[0]["digests"] == [expected_digests(2, 2), expected_digests(2, 1)]


def _leave_one_that_fails(rank: int, addresses: list[EngineAddress], pids: list[int]) -> dict[str, Any]:
    me = Rank(rank, ParallelLayout(2, tp=2, ep=1, etp=2), update_weight_transport="bucketed")
    me.update.connect_rollout_engines(addresses)
    me.train(1)
    me.update.update_weights(1)
    if rank == 0:
        fail_at(addresses[0], "vime_disconnect", "no")
    me.update._gather("test", lambda: None)
    found = attempt(me.update.disconnect_rollout_engines)
    found |= {"left": _mapped(pids), "stream": me.update._stream is not None}
    me.update._gather("test", lambda: None)
    return found | {"again": attempt(me.update.disconnect_rollout_engines), "left again": _mapped(pids)}


def test_an_engine_that_cannot_be_left_is_named_on_every_rank_and_may_be_tried_again(
    engines: Callable[..., ToyEngine],
) -> None:
    started = [engines(0, Slot(0, 1), 1), engines(1, Slot(1, 2), 1)]
    pids = [engine.process.pid for engine in started]
    found = run_ranks(2, _leave_one_that_fails, [engine.address for engine in started], pids, context=processes())
    for rank in found:
        assert (rank["error"]["phase"], rank["error"]["engines"]) == ("disconnect", [0])
        assert rank["left"][0] > 0
        assert rank["left"][1] == 0
        assert not rank["stream"]
        assert "error" not in rank["again"]
        assert rank["left again"] == [0, 0]


def _leave_after_a_failure(rank: int, addresses: list[EngineAddress]) -> dict[str, Any]:
    me = Rank(rank, ParallelLayout(1, ep=1, etp=1))
    me.update.connect_rollout_engines(addresses)
    me.train(1)
    fail_at(addresses[0], "vime_update_weights", "no")
    assert "error" in attempt(me.update.update_weights, 1)
    me.update.disconnect_rollout_engines()
    me.update.connect_rollout_engines(addresses)
    me.update.update_weights(1)
    return {"paused": ask(addresses[0], "/is_paused")["is_paused"], "digests": digests(addresses[0])}


def test_an_engine_that_was_left_after_a_failed_update_generates_again(engines: Callable[..., ToyEngine]) -> None:
    (found,) = run_ranks(1, _leave_after_a_failure, [engines(0, Slot(0, 1)).address], context=processes())
    assert found == {"paused": False, "digests": expected_digests(1, 1)}


def _connect_to_others(rank: int, addresses: list[EngineAddress]) -> dict[str, Any]:
    """By buckets, in the slot of one rank and then in that of two; and, between, memory that moves on one rank."""
    me = Rank(rank, ParallelLayout(2, tp=2, ep=1, etp=2), update_weight_transport="bucketed")
    connections = []
    for version, address in enumerate(addresses, start=1):
        me.update.connect_rollout_engines([address])
        connections.append(me.update._connection)
        me.train(version)
        me.update.update_weights(version)
        if rank == 1 and version == 1:
            move(me)
        me.update.update_weights(version)
    me.update._own.memory = torch.device("meta")  # stands in for a GPU: NCCL adds up nothing that is elsewhere
    stream = me.update._make_stream()
    found = {"connections": connections, "bucket": stream._scratch.device.type}
    stream.close()
    return found | {"digests": digests(addresses[-1]) if rank == 0 else []}


def test_connecting_other_engines_begins_with_their_slots(engines: Callable[..., ToyEngine]) -> None:
    one, two = engines(0, Slot(0, 1)), engines(0, Slot(0, 2))
    addresses = [one.address, two.address, two.address]
    found = run_ranks(2, _connect_to_others, addresses, context=processes())
    assert found[0]["connections"] == found[1]["connections"]
    assert found[0]["digests"] == expected_digests(3, 2)
    assert [rank["bucket"] for rank in found] == ["meta", "meta"]
