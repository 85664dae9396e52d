"""Parameters that have moved: every engine hears of it, also one that an update between left out or failed in."""

from __future__ import annotations

from collections.abc import Callable, Collection
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
from vime.backends.megatron_utils.update_weight.engine_update import EngineUpdate
from vime.models.layout import ParallelLayout
from vime.types import EngineAddress, Slot
from vime.weight_sync.arena import allocate, arena_of


def move(me: Rank) -> None:
    """Lay all parameters out anew; the old memory is given up."""
    old = arena_of(next(iter(me.params.values())))[0]
    flat = allocate(old.tensor.nbytes)
    for param in me.params.values():
        start = param.storage_offset() * param.itemsize
        param.data = flat[start : start + param.nbytes].view(param.dtype).view(param.shape)
    old.close()


def _scenario(rank: int, addresses: list[EngineAddress], between: str) -> dict[str, Any]:
    me = Rank(rank, ParallelLayout(1, ep=1, etp=1))
    started: dict[int, list[list[int] | None]] = {0: [], 1: []}
    start = EngineUpdate.start

    def note(self: EngineUpdate, moved: Collection[int] | None = None) -> None:
        started[self.address.index].append(None if moved is None else sorted(moved))
        start(self, moved)

    EngineUpdate.start = note  # type: ignore[method-assign]  # in this rank's own process
    me.update.connect_rollout_engines(addresses)
    me.train(1)
    me.update.update_weights(1)
    move(me)
    me.train(2)
    if between.startswith("left out"):
        me.update.update_weights(2, [0])
        if between.endswith("connected again"):
            me.update.connect_rollout_engines(addresses)
    else:
        fail_at(addresses[1], "vime_update_weights", "no")
        assert "error" in attempt(me.update.update_weights, 2)
    me.train(3)
    found = attempt(me.update.update_weights, 3)
    attempt(me.update.update_weights, 4)
    return {**found, "digests": [digests(address) for address in addresses], "started": started}


@pytest.mark.parametrize("between", ["left out", "left out, connected again", "failed"])
def test_every_engine_hears_of_it(engines: Callable[..., ToyEngine], between: str) -> None:
    addresses = [engines(index, Slot(0, 1)).address for index in range(2)]
    (found,) = run_ranks(1, _scenario, addresses, between, context=processes())
    assert "error" not in found, found["error"]
    assert found["digests"] == [expected_digests(3, 1)] * 2
    # Memory that may be gone is not read before the new place is told. An update by buckets, as the second half of the
    # first, which is proven, reads none.
    first, once = [[], None], [[0], [], []]
    assert found["started"][0] == first + once
    assert found["started"][1] == first + ([[0], *once[:-1]] if between == "failed" else once[:-1])
