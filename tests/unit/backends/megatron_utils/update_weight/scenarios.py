"""What trainer ranks do in the tests: module-level functions, run in real processes with real Gloo groups.

Each returns plain data for the test to judge. ``mutant`` puts a wrong rule in, to see the judgement turn red.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from tests.unit.backends.megatron_utils.update_weight.toy_engine import Rank, ask, calls, digests, fail_at
from vime.backends.megatron_utils.update_weight import bucketed, engine_update, exchange, update_weight_from_tensor
from vime.errors import WeightSyncError
from vime.models.layout import ParallelLayout
from vime.types import EngineAddress
from vime.weight_sync import shard_map
from vime.weight_sync.arena import allocate, arena_of

Undo = Callable[[], None]
Mutant = Callable[[Rank], Undo]


def _replace(owner: Any, name: str, value: Any) -> Undo:
    before = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before)


# ---------------------------------------------------------------- wrong rules


def copies_are_shared(me: Rank) -> Undo:
    """S1: the engine reads other memory than the parameters themselves."""
    copies = {}
    for key, param in me.params.items():
        copies[key] = allocate(param.nbytes)[: param.nbytes].view(param.dtype).view(param.shape).copy_(param)
    return _replace(me.update._own, "params", copies)


def leader_is_tp_rank_0(me: Rank) -> Undo:
    """S2: with CP or DP inside a slot, several ranks are "TP rank 0"."""

    def leader(address: EngineAddress) -> int:
        return me.rank if me.layout.coordinates(me.rank).tp == 0 else -1

    return _replace(update_weight_from_tensor, "leader", leader)


def gather_over_tp_group(me: Rank) -> Undo:
    """S3, S4: the TP group has not all GPUs of the slot."""

    def create(self: Any, addresses: list[EngineAddress]) -> None:
        for start in range(0, me.layout.world_size, me.layout.tp):
            self._slots[start, start + me.layout.tp] = exchange.Exchange(range(start, start + me.layout.tp), 60.0)

    return _replace(update_weight_from_tensor.UpdateWeightFromTensor, "_create_slot_groups", create)


def groups_by_members_only(me: Rank) -> Undo:
    """S3: a group that not every rank takes part in creating."""
    create = update_weight_from_tensor.UpdateWeightFromTensor._create_slot_groups

    def create_mine(self: Any, addresses: list[EngineAddress]) -> None:
        create(self, [a for a in addresses if a.slot is not None and me.rank in a.slot])

    return _replace(update_weight_from_tensor.UpdateWeightFromTensor, "_create_slot_groups", create_mine)


def group_for_every_slot(me: Rank) -> Undo:
    """S5: also for a slot of one rank."""

    def create(self: Any, addresses: list[EngineAddress]) -> None:
        for address in addresses:
            assert address.slot is not None
            dist.new_group(list(range(address.slot.start, address.slot.end)), backend="gloo")

    return _replace(update_weight_from_tensor.UpdateWeightFromTensor, "_create_slot_groups", create)


def barrier_in_the_loop(me: Rank) -> Undo:
    """S6."""
    merge = bucketed.BucketStream._merge

    def with_barrier(self: Any, placed: Any, failed: bool) -> Any:
        self._sum._everybody.gather(None, "sent")
        return merge(self, placed, failed)

    return _replace(bucketed.BucketStream, "_merge", with_barrier)


def buffer_filled_too_early(me: Rank) -> Undo:
    """S6: what must hold without a barrier: a bucket stays until its worker has read it."""
    fill = bucketed.BucketStream._fill

    def fill_shared(self: Any, placed: Any, end: int) -> None:
        fill(self, placed, end)
        self._shared.tensor[:end].copy_(self._scratch[:end])

    return _replace(bucketed.BucketStream, "_fill", fill_shared)


def metadata_is_not_compared(me: Rank) -> Undo:
    """S9: neither the names and shapes at connect, nor what ranks have in their buckets."""
    undo = [
        _replace(shard_map, "metadata_digest", lambda shapes: "as everywhere"),
        _replace(bucketed, "_differs", lambda mine, theirs: False),
    ]

    def undo_both() -> None:
        for step in undo:
            step()

    return undo_both


def engines_without_a_slot_are_left_out(me: Rank) -> Undo:
    """S10: only colocated engines are served."""
    update = me.update.update_weights

    def update_colocated(version: int, only: list[int] | None = None) -> dict[str, float]:
        return update(version, [index for index, engine in me.update._engines.items() if engine.address.slot])

    return _replace(me.update, "update_weights", update_colocated)


def nobody_clears_an_open_update(me: Rank) -> Undo:
    """vLLM refuses every update after one that nobody has finished."""
    workers = engine_update.EngineUpdate._workers

    def ask_only(self: Any, method: str, *args: Any) -> Any:
        if method == "vime_start_weight_update":
            return self._client.start_weight_update()
        return [] if method == "vime_abort_weight_update" else workers(self, method, *args)

    return _replace(engine_update.EngineUpdate, "_workers", ask_only)


def serves_before_its_sync(me: Rank) -> Undo:
    """S11: what is asked of the replaced engine meanwhile is answered with the weights it was started with."""
    start = engine_update.EngineUpdate.start

    def resume_and_start(self: Any, *args: Any) -> None:
        self.resume()
        start(self, *args)

    return _replace(engine_update.EngineUpdate, "start", resume_and_start)


def is_only_connected(me: Rank) -> Undo:
    """S11: the replaced engine has the shard map and none of the weights."""
    update = me.update.update_weights

    def update_nothing(version: int, only: list[int] | None = None) -> dict[str, float]:
        return update(version, only and [])

    return _replace(me.update, "update_weights", update_nothing)


MUTANTS: dict[str, Mutant] = {
    f.__name__: f
    for f in (
        copies_are_shared,
        leader_is_tp_rank_0,
        gather_over_tp_group,
        groups_by_members_only,
        group_for_every_slot,
        barrier_in_the_loop,
        buffer_filled_too_early,
        metadata_is_not_compared,
        engines_without_a_slot_are_left_out,
        serves_before_its_sync,
        is_only_connected,
        nobody_clears_an_open_update,
    )
}


# ---------------------------------------------------------------- what happened


@contextlib.contextmanager
def recorded(events: list[Any]) -> Iterator[None]:
    """Write down this rank's meetings and the groups it helped create, in order."""
    gather, add, new_group = exchange.Exchange.gather, exchange.Exchange.sum_in_place, dist.new_group

    def recorded_gather(self: Any, value: Any, phase: str) -> Any:
        events.append(["gather" if self._stamp else "slot gather", phase, self.ranks])
        return gather(self, value, phase)

    def recorded_sum(self: Any, tensor: Any, phase: str) -> None:
        events.append(["sum", phase, self.ranks])
        add(self, tensor, phase)

    def recorded_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        events.append(["group", list(ranks)])
        return new_group(ranks, *args, **kwargs)

    undo = [
        _replace(exchange.Exchange, "gather", recorded_gather),
        _replace(exchange.Exchange, "sum_in_place", recorded_sum),
        _replace(exchange.dist, "new_group", recorded_group),
    ]
    try:
        yield
    finally:
        for step in undo:
            step()


def arenas_of(me: Rank) -> list[Any]:
    """Kind, pid and inode of the memory that this rank's parameters lie in."""
    handles = [arena_of(param)[0].describe() for param in me.params.values()]
    return sorted({(handle["kind"], handle["pid"], handle["inode"]) for handle in handles})


def attempt(work: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """The result of ``work(*args)``, or its WeightSyncError as data."""
    started = time.monotonic()
    try:
        return {"stats": work(*args)}
    except WeightSyncError as error:
        seconds = time.monotonic() - started
        found = {"phase": error.phase, "where": error.where, "cause": error.cause, "engines": list(error.engines)}
        return {"error": found, "seconds": seconds}


# ---------------------------------------------------------------- scenarios


def sync(
    rank: int,
    layout: ParallelLayout,
    addresses: list[EngineAddress],
    mutant: str | None = None,
    slow: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Connect, and sync twice; of the second sync what each rank met and what each engine was asked."""
    for address in addresses if rank == 0 else ():  # nothing is left of another scenario
        ask(address, "/collective_rpc", {"method": "vime_poison_weights", "args": []})
        calls(address)
    dist.barrier()
    me = Rank(rank, layout, **options)
    undo = MUTANTS[mutant](me) if mutant else None
    events: list[Any] = []
    out: dict[str, Any] = {"arenas": arenas_of(me)}
    try:
        with recorded(events):
            out["connect"] = attempt(lambda: me.update.connect_rollout_engines(addresses))
            out["connect_events"] = list(events)
            if "error" in out["connect"]:
                return out
            me.train(1)
            out["first"] = attempt(lambda: me.update.update_weights(1))
            dist.barrier()
            if rank == 0:
                out["first_calls"] = [calls(address) for address in addresses]
                for address in addresses:
                    if slow:
                        fail_at(address, "vime_update_weights", *["slow 0.3"] * 3)
            dist.barrier()
            events.clear()
            me.train(2)
            out["second"] = attempt(lambda: me.update.update_weights(2))
        out["events"] = events
        dist.barrier()
        if rank == 0:
            out["calls"] = [ask(address, "/test/calls") for address in addresses]
            out["digests"] = [digests(address) for address in addresses]
        return out
    finally:
        if undo is not None:
            undo()
        dist.barrier()  # mutants are put in and taken out together


def replaced_engine(
    rank: int,
    layout: ParallelLayout,
    addresses: list[EngineAddress],
    replacement: EngineAddress,
    mutant: str | None = None,
) -> dict[str, Any]:
    """The last engine is replaced: it alone is connected and synced."""
    me = Rank(rank, layout)
    me.update.connect_rollout_engines(addresses)
    me.train(1)
    me.update.update_weights(1)
    dist.barrier()
    out: dict[str, Any] = {}
    if rank == 0:
        out["before"] = digests(replacement)
        for address in addresses:
            calls(address)
    dist.barrier()
    now = [*addresses[:-1], replacement]
    undo = MUTANTS[mutant](me) if mutant else None
    me.update.connect_rollout_engines(now)
    out["stats"] = me.update.update_weights(1, only=[replacement.index])
    dist.barrier()
    if undo is not None:
        undo()
    if rank == 0:
        out["calls"] = [calls(address) for address in now]
        out["digests"] = [digests(address) for address in now]
    dist.barrier()
    return out


def connect_only(
    rank: int, layout: ParallelLayout, addresses: list[EngineAddress], mutant: str | None = None
) -> dict[str, Any]:
    """Connect. Ranks that do not create the same groups may wait for each other in vain, for a shorter time then, or
    get out of step: the last scenario of its processes."""
    exchange._GRACE = 1.0
    me = Rank(rank, layout, weight_update_timeout=20.0)
    undo = MUTANTS[mutant](me) if mutant else None
    events: list[Any] = []
    with recorded(events), contextlib.suppress(RuntimeError):  # a WeightSyncError, or one of torch's own
        me.update.connect_rollout_engines(addresses)
    if undo is not None:
        undo()
    return {"connect_events": events}


def disagreeing_rank(
    rank: int,
    layout: ParallelLayout,
    addresses: list[EngineAddress],
    what: str,
    mutant: str | None = None,
    who: int = 1,
    **options: Any,
) -> dict[str, Any]:
    """Rank ``who`` has other metadata: names in another order, or in its buckets only."""
    me = Rank(rank, layout, **{"update_weight_transport": "bucketed", "check_weight_update": "off"} | options)
    undo = MUTANTS[mutant](me) if mutant else None
    if rank == who and what == "names":
        names = list(me.update._shapes)
        names[3], names[5] = names[5], names[3]
        me.update._shapes = {name: me.update._shapes[name] for name in names}
    connected = attempt(lambda: me.update.connect_rollout_engines(addresses))
    out: dict[str, Any] = {"connect": connected}
    if "error" not in connected:
        tensors = me.update._shards.tensors  # type: ignore[union-attr]
        first, last = next(iter(tensors)), next(reversed(tensors))
        if rank == who and what in ("dtypes", "the last dtype"):
            odd = first if what == "dtypes" else last
            tensors[odd] = type(tensors[odd])(tensors[odd].shape, "int32")
        elif rank == who and what == "one less":
            del tensors[last]
        elif rank == who and what == "another capacity":
            me.update.options.update_weight_buffer_size *= 2
        out["update"] = attempt(lambda: me.update.update_weights(1))
    dist.barrier()
    out["calls"] = [calls(address) for address in addresses] if rank == 0 else None
    if undo is not None:
        undo()
    dist.barrier()
    return out


def run_all(rank: int, steps: list[tuple[str, Callable[..., Any], dict[str, Any]]]) -> dict[str, Any]:
    """Several scenarios in the same processes: (label, scenario, arguments)."""
    return {label: scenario(rank, **arguments) for label, scenario, arguments in steps}


def by_label(ranks: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """What :func:`run_all` found, label -> every rank's."""
    return {label: [rank[label] for rank in ranks] for label in ranks[0]}
