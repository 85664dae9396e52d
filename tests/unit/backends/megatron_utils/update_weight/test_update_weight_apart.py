"""Engines that cannot read the trainer's memory: other nodes (S10), UpdateWeightFromDistributed, UpdateWeightFromDisk.

Real ranks, real Gloo groups and channels; a rank "on another node" is one that says so.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import run_ranks
from tests.unit.backends.megatron_utils.update_weight import apart
from tests.unit.backends.megatron_utils.update_weight.test_failures import two_ranks
from tests.unit.backends.megatron_utils.update_weight.toy_engine import ToyEngine, expected_digests, processes
from vime.models.layout import ParallelLayout
from vime.types import Slot

TP2_PP2 = ParallelLayout(world_size=4, tp=2, pp=2, ep=1, etp=2)
TP2 = ParallelLayout(world_size=2, tp=2, ep=1, etp=2)
SMALL = {"update_weight_buffer_size": 4096}  # many chunks, many buckets


def _sync(layout: ParallelLayout, engines: list[ToyEngine], **scenario: Any) -> list[list[dict[str, Any]]]:
    """Every rank's results."""
    addresses = [engine.address for engine in engines]
    context = processes()
    return run_ranks(layout.world_size, _call, layout, addresses, scenario, timeout=200, context=context)


def _call(rank: int, layout: ParallelLayout, addresses: list[Any], scenario: dict[str, Any]) -> Any:
    return apart.sync(rank, layout, addresses, **scenario)


def _assert_synced(result: dict[str, Any], version: int, engines: list[ToyEngine]) -> None:
    assert "error" not in result, result["error"]
    assert result["digests"] == [expected_digests(version, engine.workers) for engine in engines]


@pytest.mark.parametrize("transport", ["planned", "bucketed"])
def test_colocated_and_remote_engines_in_one_run(transport: str, engines: Callable[..., ToyEngine]) -> None:
    """S10. Ranks 0 and 1, the first pipeline stage, are on another node: an engine beside ranks 2 and 3 reads these two
    and is sent the rest; one without a slot, which rank 0 leads, is beside 2 and 3 as well."""
    mixed = [engines(0, Slot(2, 4)), engines(1, None, 2), engines(2, Slot(3, 4))]
    found = _sync(TP2_PP2, mixed, elsewhere=(0, 1), update_weight_transport=transport, **SMALL)
    for version, result in enumerate(found[0], start=1):
        _assert_synced(result, version, mixed)
    if transport == "planned":
        stats = found[0][1]["stats"]
        assert all(0 < stats[share] < 1 for share in ("local_share", "link_share", "network_share")), stats


def test_s10_turns_red_when_what_is_sent_is_not_what_is_read(engines: Callable[..., ToyEngine]) -> None:
    mixed = [engines(0, Slot(2, 4)), engines(1, None, 2)]
    found = _sync(TP2_PP2, mixed, elsewhere=(0, 1), stale=True, **SMALL)
    _assert_synced(found[0][0], 1, mixed)
    with pytest.raises(AssertionError):
        _assert_synced(found[0][1], 2, mixed)


def test_distributed_opens_no_memory(engines: Callable[..., ToyEngine]) -> None:
    both = [engines(0, Slot(0, 2)), engines(1, None, 1)]
    found = _sync(TP2, both, update_weight_transport="distributed", **SMALL)
    for version, result in enumerate(found[0], start=1):
        _assert_synced(result, version, both)
        assert result["stats"]["network_share"] == 1
        assert result["channels"] == [0, 1]


def test_disk(engines: Callable[..., ToyEngine], tmp_path: Path) -> None:
    both = [engines(0, Slot(0, 2)), engines(1, None, 1)]
    others = tmp_path / "weights" / "version-1" / "precious.txt"  # of another run, which uses the same folder
    others.parent.mkdir(parents=True)
    others.write_text("1")
    found = _sync(TP2, both, update_weight_transport="disk", folder=str(tmp_path))
    for version, result in enumerate(found[0], start=1):
        _assert_synced(result, version, both)
        assert result["left"] == ["version-1"]
        assert result["channels"] == []  # nothing but the file system
    assert list((tmp_path / "weights").iterdir()) == [others.parent]
    assert others.read_text() == "1"


def test_disk_that_cannot_be_written_is_said_by_all_and_the_next_update_succeeds(
    engines: Callable[..., ToyEngine], tmp_path: Path
) -> None:
    """Rank 0 makes the folder. A file is in its place, as where a file system is not mounted; then it is not."""
    both = [engines(0, Slot(0, 2)), engines(1, None, 1)]
    (tmp_path / "weights").write_text("in the way")
    found = _sync(TP2, both, update_weight_transport="disk", folder=str(tmp_path), clears=1)
    errors = [rank[0]["error"] for rank in found]
    assert errors[0] == errors[1]
    assert (errors[0]["phase"], errors[0]["engines"]) == ("ready", [])
    assert "rank 0: cannot write to" in errors[0]["cause"]
    assert found[0][0]["seconds"] < 30
    _assert_synced(found[0][1], 2, both)


@pytest.mark.parametrize("slot", [None, Slot(1, 2)])
def test_workers_words_come_before_a_ranks(engines: Callable[..., ToyEngine], slot: Slot | None) -> None:
    """A worker that cannot open its channel: the ranks that wait there, its leader and others, know only that it did
    not come."""
    engine = engines(0, slot, 1)
    options = {"update_weight_transport": "distributed", "weight_update_timeout": 4.0}
    found = _sync(TP2, [engine], refuses_channel=True, versions=0, **options)
    for rank in found:
        assert rank[0]["error"]["engines"] == [0]
        assert "no room for a channel" in rank[0]["error"]["cause"]


def test_after_a_failure_channels_are_formed_anew(engines: Callable[..., ToyEngine]) -> None:
    """Version 2 fails in a worker before it takes anything, version 3 in the server after the workers took all."""
    both = [engines(0, None, 2), engines(1, Slot(0, 1))]
    faults = {
        2: {"engine": 0, "vime_update_weights": ["worker"]},
        3: {"engine": 0, "/finish_weight_update": ["no"]},
    }
    found = _sync(TP2, both, update_weight_transport="distributed", versions=4, before=faults)
    for rank in found:
        assert rank[1]["error"]["engines"] == [0]
        assert "out of memory" in rank[1]["error"]["cause"]  # the worker's own words, not "connection closed"
        assert rank[2]["error"]["engines"] == [0]
    _assert_synced(found[0][0], 1, both)
    _assert_synced(found[0][3], 4, both)


def test_a_rank_that_dies_while_sending_is_named(engines: Callable[..., ToyEngine], tmp_path: Path) -> None:
    engine = engines(0, None, 1)
    options = {"dies": (1, 2), "update_weight_transport": "distributed"}
    with two_ranks(tmp_path, apart.sync, layout=TP2, addresses=[engine.address], **options) as (ranks, results):
        rank, outcome = results.get(timeout=100)
        victim = ranks[1].pid
    assert rank == 0
    assert outcome[1]["error"]["where"] == f"trainer rank 1 (pid {victim}, dead)"
    assert outcome[1]["seconds"] < 60  # at once, not after the deadline
    assert engine.process.is_alive()
