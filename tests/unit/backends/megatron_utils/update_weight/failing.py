"""What trainer ranks do in the tests of failures: engines that fail, ranks that raise, die or do not come.

As in scenarios.py: module-level functions, run in real processes, which return plain data for the test to judge.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from tests.unit.backends.megatron_utils.update_weight.scenarios import MUTANTS, attempt
from tests.unit.backends.megatron_utils.update_weight.toy_engine import Rank, ask, calls, digests, fail_at
from vime.backends.megatron_utils.update_weight import bucketed, channels, engine_update, exchange
from vime.models.layout import ParallelLayout
from vime.types import EngineAddress
from vime.weight_sync.arena import ArenaError

CONNECT = "/init_weight_transfer_engine"
DEADLINE = 3.0  # seconds, where an engine is slower


@dataclass(frozen=True)
class Fault:
    """The last engine's next answer to ``call`` fails in the way ``kind`` (toy_engine.py). ``fresh``: the engine has
    taken the place of another and is connected now."""

    call: str
    kind: str
    fresh: bool = False


def engine_faults(
    rank: int,
    layout: ParallelLayout,
    addresses: list[EngineAddress],
    faults: dict[str, Fault],
    spare: list[EngineAddress],
) -> dict[str, Any]:
    """Per fault: an update (of a fresh engine its connection too) that fails, and then another one. Engines that have
    died are replaced between, by the next of ``spare``."""
    me, now, rest = Rank(rank, layout), list(addresses), iter(spare)
    me.update.connect_rollout_engines(now)
    me.train(0)
    me.update.update_weights(0)
    out: dict[str, Any] = {}

    def update(version: int, connects: bool) -> Any:
        me.train(version)
        if connects:
            me.update.connect_rollout_engines(now)
        return me.update.update_weights(version)

    for number, (label, fault) in enumerate(faults.items()):
        version = 1 + 2 * number
        if fault.fresh:
            now[-1] = next(rest)
        if rank == 0:
            fail_at(now[-1], fault.call, fault.kind)
        dist.barrier()

        died = fault.kind == "die"
        me.update.options.weight_update_timeout = DEADLINE if fault.kind.startswith("slow") else 60.0
        failed = attempt(update, version, fault.fresh)
        me.update.options.weight_update_timeout = 60.0
        dist.barrier()
        seen: dict[str, Any] = {}
        if rank == 0:
            seen["others"] = digests(now[0])
            seen["paused"] = None if died else ask(now[-1], "/is_paused")["is_paused"]
        if died:
            now[-1] = next(rest)
        dist.barrier()
        again = attempt(update, version + 1, died or fault.fresh)
        dist.barrier()
        seen["digests"] = [digests(address) for address in now] if rank == 0 else None
        out[label] = {"failed": failed, "again": again, **seen}
    return out


def bucket_faults(
    rank: int, layout: ParallelLayout, addresses: list[EngineAddress], kinds: list[str]
) -> dict[str, Any]:
    """Per kind: an update by buckets whose second one does not reach the last engine as it was sent; and another."""
    me = Rank(rank, layout, update_weight_transport="bucketed", update_weight_buffer_size=4096)
    me.update.connect_rollout_engines(addresses)
    out: dict[str, Any] = {}
    for number, kind in enumerate(kinds):
        if rank == 0:
            fail_at(addresses[-1], "vime_update_weights", "pass", kind)
        dist.barrier()
        me.train(2 * number)
        failed = attempt(me.update.update_weights, 2 * number)
        dist.barrier()
        versions = [_versions(address) for address in addresses] if rank == 0 else None
        me.train(2 * number + 1)
        again = attempt(me.update.update_weights, 2 * number + 1)
        dist.barrier()
        found = [digests(address) for address in addresses] if rank == 0 else None
        out[kind] = {"failed": failed, "versions": versions, "again": again, "digests": found}
        dist.barrier()
    return out


def delayed(rank: int, layout: ParallelLayout, addresses: list[EngineAddress]) -> dict[str, Any]:
    """Two engines take five seconds, in different phases, and before them a rank does; the deadline is later."""
    me = Rank(rank, layout)
    me.update.connect_rollout_engines(addresses)
    if rank == 0:
        fail_at(addresses[0], "vime_update_weights", "pass", "pass", "slow 5")
        fail_at(addresses[1], "/finish_weight_update", "pass", "pass", "slow 5")
    me.train(0)
    me.update.update_weights(0)
    me.train(1)
    if rank == 1:
        time.sleep(5)
    stats = me.update.update_weights(1)
    dist.barrier()
    return {"stats": stats, "digests": [digests(address) for address in addresses] if rank == 0 else None}


def left_open(
    rank: int, layout: ParallelLayout, addresses: list[EngineAddress], mutant: str | None = None
) -> dict[str, Any]:
    """A trainer that has died had started an update of the last engine; another one comes."""
    dead = Rank(rank, layout)
    dead.update.connect_rollout_engines(addresses)
    dead.train(0)
    dead.update.update_weights(0)
    dist.barrier()
    if rank == 0:
        ask(addresses[-1], "/start_weight_update")
    dist.barrier()
    me = Rank(rank, layout)
    undo = MUTANTS[mutant](me) if mutant else None
    me.train(1)
    me.update.connect_rollout_engines(addresses)
    synced = attempt(lambda: me.update.update_weights(1))
    dist.barrier()
    if undo is not None:
        undo()
    return {"synced": synced, "digests": [digests(address) for address in addresses] if rank == 0 else None}


def a_rank_raises(rank: int, layout: ParallelLayout, addresses: list[EngineAddress]) -> dict[str, Any]:
    """The last rank finds that its weights cannot be shared any more, when an update begins and when an engine is
    connected."""
    me = Rank(rank, layout)
    me.update.connect_rollout_engines(addresses)
    me.train(1)
    me.update.update_weights(1)
    dist.barrier()
    if rank == 0:
        for address in addresses:
            calls(address)
    dist.barrier()
    private = dict(me.params)
    if rank == layout.world_size - 1:
        for key in me.params:
            me.params[key] = me.params[key].clone()
    out: dict[str, Any] = {"ready": attempt(lambda: me.update.update_weights(2))}
    out["connect"] = attempt(lambda: me.update.connect_rollout_engines(addresses))
    dist.barrier()
    out["calls"] = [calls(address) for address in addresses] if rank == 0 else None
    me.params.update(private)
    me.train(3)
    out["again"] = attempt(lambda: me.update.update_weights(3))
    dist.barrier()
    out["digests"] = [digests(address) for address in addresses] if rank == 0 else None
    return out


def no_memory_for_buckets(rank: int, layout: ParallelLayout, addresses: list[EngineAddress]) -> dict[str, Any]:
    """The last rank cannot have the memory of its bucket; later it can."""
    me = Rank(rank, layout, update_weight_transport="bucketed")
    me.update.connect_rollout_engines(addresses)
    if rank == 0:
        for address in addresses:
            calls(address)
    dist.barrier()
    create = bucketed.create_arena
    if rank == layout.world_size - 1:
        bucketed.create_arena = _full
    me.train(1)
    failed = attempt(me.update.update_weights, 1)
    bucketed.create_arena = create
    dist.barrier()
    asked = [calls(address) for address in addresses] if rank == 0 else None
    dist.barrier()
    me.train(2)
    again = attempt(me.update.update_weights, 2)
    dist.barrier()
    found = [digests(address) for address in addresses] if rank == 0 else None
    return {"failed": failed, "calls": asked, "again": again, "digests": found}


def cannot_go_on(
    rank: int, layout: ParallelLayout, addresses: list[EngineAddress], victim: int, step: str, transport: str
) -> dict[str, Any]:
    """A rank fails by itself between the meetings, not by an engine: at a step of its second bucket, or when it begins
    to send. In "planned" the buckets are those of the proof."""
    owner = bucketed.BucketStream if step.startswith("_") else channels.Channels
    method = getattr(owner, step)
    me = Rank(rank, layout, update_weight_transport=transport, update_weight_buffer_size=4096)
    me.update.connect_rollout_engines(addresses)
    met = 0

    def fail(self: Any, *args: Any) -> Any:
        nonlocal met
        met += 1
        if met == 2 or owner is channels.Channels:
            raise MemoryError("CUDA error: out of memory")
        return method(self, *args)

    if rank == victim:
        setattr(owner, step, fail)
    me.train(1)
    failed = attempt(me.update.update_weights, 1)
    setattr(owner, step, method)
    dist.barrier()
    versions = [_versions(address) for address in addresses] if rank == 0 else None
    me.train(2)
    again = attempt(me.update.update_weights, 2)
    dist.barrier()
    found = [digests(address) for address in addresses] if rank == 0 else None
    return {"failed": failed, "versions": versions, "again": again, "digests": found}


def _versions(address: EngineAddress) -> list[int | None]:
    states = ask(address, "/collective_rpc", {"method": "vime_weight_state", "args": []})["results"]
    return [state["version"] for state in states]


def _full(num_bytes: int, purpose: str = "") -> Any:
    raise ArenaError(f"{num_bytes} bytes of shared memory for the {purpose}: none is left")


# ---------------------------------------------------------------- ranks that die, or do not come


def goes_missing(
    rank: int, layout: ParallelLayout, addresses: list[EngineAddress], victim: int, phase: str, kind: str
) -> dict[str, Any]:
    """``victim`` is killed, or stops for good, in a phase of the second update; or when engines are connected again.

    Phases: "connect", "ready", "done": on its way to that meeting. "update": as the leader of an engine that it has
    started. "bucket": between two buckets. "slot": on its way to a meeting of its slot.
    """
    buckets = {"update_weight_transport": "bucketed", "update_weight_buffer_size": 4096}
    options = buckets if phase in ("bucket", "slot") else {}
    me = Rank(rank, layout, check_weight_update="off", **options)
    me.update.connect_rollout_engines(addresses)
    me.train(1)
    me.update.update_weights(1)
    if kind == "late":
        _wait_less_in_meetings(me)
    if rank == victim:
        _arrange(me, phase, _die if kind == "killed" else signal.pause)
    me.train(2)
    if rank == 0:
        calls(addresses[0])
    found = attempt(
        *((me.update.connect_rollout_engines, addresses) if phase == "connect" else (me.update.update_weights, 2))
    )
    return found | {"calls": calls(addresses[0])}


def _wait_less_in_meetings(me: Rank) -> None:
    """From now on; what was waited for until here may have taken long on a busy machine."""
    exchange._GRACE = 1.0
    dist.barrier()
    everybody = exchange.Exchange(range(me.layout.world_size), 2.0, me.update._own.stamp)
    assert me.update._shards is not None
    everybody.watch(me.update._shards.ranks, me.update._node)
    me.update._everybody = everybody
    if me.update._stream is not None:
        me.update._stream._sum._everybody = everybody


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _arrange(me: Rank, phase: str, leave: Callable[[], Any]) -> None:
    if phase == "update":
        engine_update.EngineUpdate.send = lambda *_: leave()  # type: ignore[method-assign]
    elif phase in ("bucket", "slot"):
        name = {"bucket": "_fill", "slot": "_merge"}[phase]
        step, taken = getattr(bucketed.BucketStream, name), []

        def some(*args: Any) -> Any:
            taken.append(1)
            if len(taken) == 4:
                leave()
            return step(*args)

        setattr(bucketed.BucketStream, name, some)
    else:
        gather = me.update._gather

        def meet(at: str, work: Callable[[], Any]) -> list[Any]:
            if at == phase:
                leave()
            return gather(at, work)

        me.update._gather = meet  # type: ignore[method-assign]


def comes_after(rank: int, layout: ParallelLayout, addresses: list[EngineAddress]) -> dict[str, Any]:
    """The trainer that was started in place of one that has ended."""
    me = Rank(rank, layout)
    me.update.connect_rollout_engines(addresses)
    me.train(7)
    me.update.update_weights(7)
    dist.barrier()
    return {"digests": [digests(address) for address in addresses] if rank == 0 else None}
