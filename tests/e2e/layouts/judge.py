"""Whether a sync did what it must: every byte, by one leader, by the path that was asked for."""

from __future__ import annotations

import math
from typing import Any

from tests.e2e.layouts.fleet import Fleet
from tests.e2e.layouts.matrix import Case
from vime.models.layout import checkpoint_tensors
from vime.types import EngineAddress

Reports = list[dict[str, Any]]  # ranks.sync's, by rank

_UPDATE = {
    "proof": ["vime_start_weight_update", "plan", "finish_weight_update", "vime_start_weight_update", "bucket",
              "finish_weight_update"],
    "planned": ["vime_start_weight_update", "plan", "finish_weight_update"],
    "bucketed": ["vime_start_weight_update", "bucket", "finish_weight_update"],
}  # fmt: skip


def judge(fleet: Fleet, case: Case, name: str, addresses: list[EngineAddress], reports: Reports) -> None:
    """All updates of one engine set."""
    expected = [("b", "proof"), ("a", "planned"), *([("b", "bucketed"), ("a", "bucketed")] if case.bucketed else [])]
    assert {len(report[name]) for report in reports} == {len(expected)}
    for number, (weights, path) in enumerate(expected):
        updates = [report[name][number] for report in reports]
        assert updates[0]["weights"] == weights
        for address in addresses:
            where = f"{case}: engine {address.index}, {weights!r} ({path})"
            _judge_calls(address, path, updates, where)
            _judge_states(address, path, updates[0], where)
            _judge_digests(fleet, address, weights, updates[0]["digests"][address.index], where)
        if path == "planned":
            _judge_bytes(fleet, addresses, updates[0]["stats"], case)


def _judge_calls(address: EngineAddress, path: str, updates: Reports, where: str) -> None:
    """Only the lowest rank of the slot makes calls, in this order, buckets with a handle of each rank of the slot."""
    leader = address.slot.start if address.slot is not None else 0
    mine = [[(what, n) for engine, what, n in update["calls"] if engine == address.index] for update in updates]
    for rank, calls in enumerate(mine):
        assert bool(calls) == (rank == leader), f"{where}: rank {rank} calls {calls}"
    order = [what for what, _ in mine[leader]]
    several = [what for number, what in enumerate(order) if what != "bucket" or order[number - 1] != "bucket"]
    assert several == ["pause", *_UPDATE[path], "resume"], where
    handles = {n for what, n in mine[leader] if what == "bucket"}
    in_slot = address.slot.end - address.slot.start if address.slot is not None else 1
    assert handles == (set() if path == "planned" else {in_slot}), where


def _judge_states(address: EngineAddress, path: str, update: dict[str, Any], where: str) -> None:
    """Every worker confirms the version, could plan every parameter, and has left nothing out."""
    states = update["states"][address.index]
    assert len(states) == address.world_size, where
    for state in states:
        assert state["version"] == update["version"], where
        assert state["failure"] is None, where
        assert (state["problems"], state["unwritten"], state["unused"]) == ({}, {}, []), where
        assert state["copies"] > 0, where
        assert state["checked"] == ("off" if path == "bucketed" else "full"), where  # the checksums are of the plan's


def _judge_digests(fleet: Fleet, address: EngineAddress, weights: str, found: Any, where: str) -> None:
    """Every parameter and buffer is what vLLM's own loading leaves; or, where that is not known, is not of "a"."""
    loaded = fleet.loaded(address.index, weights)
    assert len(found) == address.world_size, where
    if loaded is not None:
        wrong = differing(found, loaded)
        assert not any(wrong), f"{where}: not as vLLM itself has loaded it: {wrong}"
        return
    other = fleet.loaded(address.index, "a")
    assert other is not None
    assert weights != "a"
    changed = differing(found, other)
    same = [_of_weights(mine) - set(names) for mine, names in zip(found, changed, strict=True)]
    assert not any(same), f"{where}: still of the other checkpoint: {same}"


def differing(found: Any, loaded: Any) -> list[list[str]]:
    """Per worker the names whose digests differ."""
    pairs = zip(found, loaded, strict=True)
    return [sorted(n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n)) for ours, theirs in pairs]


def _of_weights(digests: dict[str, str]) -> set[str]:
    """Names that depend on the weights: not rotary tables, and not what vLLM has emptied after packing it."""
    return {name for name, value in digests.items() if value != "0" and ("weight" in name or "packed" in name)}


def _judge_bytes(fleet: Fleet, addresses: list[EngineAddress], stats: dict[str, float], case: Case) -> None:
    """An engine of one worker reads every checkpoint tensor once, whatever the layout."""
    whole = 4 * sum(math.prod(shape) for shape in checkpoint_tensors(fleet.spec(case.model)).values())
    if all(address.world_size == 1 for address in addresses):
        assert stats["bytes"] == whole * len(addresses), case
    assert stats["bytes"] >= whole * len(addresses), case
