"""UpdateWeightFromTensor: the trainer's weights into engines that share its GPUs (or its node's memory).

Every trainer rank has one and calls its methods together with the others. In an update all ranks meet at exactly two
points: before the first byte is read, when every rank's weights are final, and after the last engine has confirmed,
when the memory may be changed again. Between them only slot leaders act. (The bucketed path, which needs all ranks to
assemble tensors, has its collectives in between; it too has no barrier in its loop.)

A failure anywhere travels to the next meeting as a value, so that all ranks raise the same WeightSyncError; a rank that
does not come to a meeting is noticed by its deadline.
"""

from __future__ import annotations

import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from vime.backends.megatron_utils.update_weight.bucketed import BucketStream
from vime.backends.megatron_utils.update_weight.engine_update import EngineUpdate, for_each
from vime.backends.megatron_utils.update_weight.exchange import Exchange, error_value, raise_first
from vime.config import Config
from vime.models.layout import ParallelLayout, checkpoint_tensors, pieces
from vime.models.spec import ModelSpec
from vime.types import EngineAddress
from vime.weight_sync.arena import Stamp, arena_of
from vime.weight_sync.shard_map import RankInfo, ShardMap, describe_rank, merge, place

log = logging.getLogger(__name__)

Key = tuple[int, str]  # model chunk, parameter name in it


@dataclass
class Engine:
    """What every rank knows of a connected engine."""

    address: EngineAddress
    problems: dict[str, str]  # parameters that cannot be planned: then the bucketed path serves the engine
    proven: bool = False  # its planned and its bucketed update have left the same bytes
    resumes: bool | None = None  # after a failed update: whether it generated before


def leader(address: EngineAddress) -> int:
    """The rank that talks to an engine: the lowest global rank of its slot; rank 0 where it has none."""
    return address.slot.leader if address.slot is not None else 0


class UpdateWeightFromTensor:
    """Every method is collective: all ranks call it, with the same arguments.

    Args:
        config: the run's options.
        spec, layout: the model and how it is cut; the same on every rank.
        rank: global trainer rank.
        named_params: (chunk, name) -> parameter, contiguous, inside arenas (vime.weight_sync.arena.allocate).
        device: "cpu" or "cuda", where the parameters are.
    """

    def __init__(
        self,
        config: Config,
        spec: ModelSpec,
        layout: ParallelLayout,
        rank: int,
        named_params: Mapping[Key, torch.Tensor],
        device: str,
    ) -> None:
        self.options, self.rank, self.world_size = config.weight_sync, rank, layout.world_size
        self._params = named_params
        self._pieces = pieces(spec, layout, rank)
        self._shapes = checkpoint_tensors(spec)
        self._stamp = Stamp()
        self._addresses: list[int] = []  # of all parameters, when they were last placed
        self._first_in_arena: list[torch.Tensor] = []
        self._node = node_name()
        self._device = f"{self._node}/{device}/{rank}"
        self._everybody: Exchange | None = None
        self._slots: dict[tuple[int, int], Exchange] = {}
        self._shards: ShardMap | None = None
        self._connection = ""
        self._engines: dict[int, Engine] = {}
        self._stream: BucketStream | None = None

    # ------------------------------------------------------------------ connecting

    def connect_rollout_engines(self, addresses: list[EngineAddress]) -> None:
        """Exchange the shard map and hand it to every engine, which plans its copies.

        Call it again, with all engines, when one was replaced; then ``update_weights(version, only=[index])``.

        Raises:
            WeightSyncError: the same on every rank.
        """
        if self._everybody is None:
            self._everybody = Exchange(range(self.world_size), self.options.weight_update_timeout, self._stamp)
        parts = self._gather("connect", self._describe)
        shards = merge(parts, self._shapes)
        if self._shards is None or shards.to_json() != self._shards.to_json():
            self._shards, self._connection = shards, parts[0]["connection"]
            self._everybody.watch(shards.ranks, self._node)
        self._create_slot_groups(addresses)
        found = self._gather("connect", lambda: self._connect_led(addresses))
        answers = {int(index): answer for part in found for index, answer in part.items()}
        known, self._engines = self._engines, {}
        for address in addresses:
            answer, before = answers[address.index], known.get(address.index)
            engine = self._engines[address.index] = Engine(address, answer["problems"])
            if answer["knew_us"] and before is not None:
                engine.proven, engine.resumes = before.proven, before.resumes

    def _describe(self) -> dict[str, Any]:
        info, places = place(self.rank, self._node, self._device, self._params, self._stamp)
        part = describe_rank(info, places, self._shapes, self._pieces, self._params)
        return part | {"connection": uuid.uuid4().hex}

    def _create_slot_groups(self, addresses: list[EngineAddress]) -> None:
        """A Gloo group per slot of several ranks, over exactly these. Every rank takes part in creating every group."""
        for start, end in sorted({(a.slot.start, a.slot.end) for a in addresses if a.slot is not None}):
            if end - start > 1 and (start, end) not in self._slots:
                self._slots[start, end] = Exchange(range(start, end), self.options.weight_update_timeout)

    def _connect_led(self, addresses: list[EngineAddress]) -> dict[str, Any]:
        """Connect the engines that this rank leads."""
        assert self._shards is not None
        found = {}
        for address in addresses:
            if leader(address) != self.rank:
                continue
            ranks = list(range(address.slot.start, address.slot.end)) if address.slot is not None else []
            info = {
                "connection": self._connection,
                "engine": address.index,
                "neighbours": ranks,
                # Buckets: of the slot each worker's own; an engine without a slot takes the leader's.
                "devices": [self._shards.ranks[rank].device for rank in ranks] or [self._device] * address.world_size,
                "node": self._node,
                "check": self.options.check_weight_update,
                "shards": self._shards.nearest(address.slot, self._node).to_json(),
            }
            update = EngineUpdate(address, self._connection, self.options.weight_update_timeout)
            update.connect(info)
            update.close()
            if update.failure is not None:
                raise_first([update.failure])
            problems = {param: why for state in update.states for param, why in state["problems"].items()}
            for param, why in problems.items():
                log.warning("%s: %s cannot be planned (%s); the bucketed path serves it", update, param, why)
            if unused := update.states[0]["unused"]:
                log.info("%s takes nothing from %s", update, ", ".join(unused))
            found[str(address.index)] = {"problems": problems, "knew_us": update.knew_us}
        return found

    # ------------------------------------------------------------------ updating

    def update_weights(self, version: int, only: list[int] | None = None) -> dict[str, float]:
        """Bring the weights into the engines (those of ``only``), as ``version``.

        The first update of an engine is proven: the planned and the bucketed path run once each, on weights made NaN
        before, and must leave the same bytes in every parameter and buffer (not with ``--check-weight-update off``).

        Returns:
            The same on every rank: see :func:`summary`.

        Raises:
            WeightSyncError: the same on every rank. Engines named in its ``engines`` hold a mixture and refuse to
                generate until a later update succeeds; if none is named, nothing was written anywhere.
        """
        started = time.perf_counter()
        chosen = [self._engines[index] for index in (sorted(self._engines) if only is None else only)]
        handles = self._gather("ready", lambda: self._prepare(version))
        moved = [part for part in handles if part is not None]
        waited = time.perf_counter() - started

        led = {
            engine.address.index: EngineUpdate(
                engine.address, self._connection, self.options.weight_update_timeout, engine.resumes
            )
            for engine in chosen
            if leader(engine.address) == self.rank
        }
        updates = list(led.values())
        by_plan = {engine.address.index for engine in chosen if self._is_planned(engine)}
        by_bucket = {engine.address.index for engine in chosen if self._needs_buckets(engine)}
        try:
            for_each(updates, lambda update: self._begin(update, version, moved, by_plan, by_bucket))
            if by_bucket:
                self._send_buckets([led[index] for index in sorted(by_bucket & led.keys())], version)
            for_each(updates, lambda update: self._end(update, version, by_plan, by_bucket))
        finally:
            for_each(updates, EngineUpdate.close)

        failures = [update.failure for update in updates if update.failure is not None]
        report = {"failures": failures, "engines": [_engine_stats(update) for update in updates]}
        done = self._gather("done", lambda: report)
        self._stamp.set(Stamp.WRITING)  # from here on the memory may change
        self._drop_stream()
        failures = [failure for part in done for failure in part["failures"]]
        failed = {index for failure in failures for index in failure["engines"]}
        for engine in chosen:
            index = engine.address.index
            engine.proven |= index not in failed
            engine.resumes = led[index].resumes if index in failed and index in led else None
        raise_first(failures)
        stats = [engine for part in done for engine in part["engines"]]
        return summary(stats, waited, time.perf_counter() - started)

    def _prepare(self, version: int) -> dict[str, Any] | None:
        """Stamp this rank's weights, which are final, with their version. Returns its arenas if one has moved."""
        assert self._shards is not None
        if self._params and next(iter(self._params.values())).is_cuda:
            torch.cuda.synchronize()
        info = self._place()
        self._stamp.set(version)
        if info == self._shards.ranks[self.rank]:
            return None
        self._shards.ranks[self.rank] = info
        return vars(info)

    def _place(self) -> RankInfo:
        """Where this rank's parameters are. Unless one has moved, only the arenas are looked at (memory that was given
        up may have come back at the same address, as other memory): a MoE model has twenty thousand parameters."""
        addresses = [param.data_ptr() for param in self._params.values()]
        if addresses != self._addresses:
            info, places = place(self.rank, self._node, self._device, self._params, self._stamp)
            self._addresses, firsts = addresses, {}
            for key, (arena, _) in places.items():
                firsts.setdefault(arena, self._params[key])
            self._first_in_arena = [firsts[number] for number in range(len(firsts))]
            return info
        arenas = [arena_of(param)[0].describe() for param in self._first_in_arena]
        return RankInfo(self.rank, self._node, self._device, self._stamp.arena.describe(), arenas)

    def _is_planned(self, engine: Engine) -> bool:
        return self.options.update_weight_transport == "planned" and not engine.problems

    def _needs_buckets(self, engine: Engine) -> bool:
        proves = not engine.proven and self.options.check_weight_update != "off"
        return proves or not self._is_planned(engine)

    def _begin(
        self, update: EngineUpdate, version: int, moved: list[dict[str, Any]], by_plan: set[int], by_bucket: set[int]
    ) -> None:
        index = update.address.index
        update.pause()
        update.start()
        if index in by_plan and index in by_bucket:  # both: the proof
            update.poison()
        if index in by_plan:
            update.send({"version": version, "moved": moved})
        if index in by_plan and index in by_bucket:
            update.finish(version)
            update.keep_digests()
            update.start()
            update.poison()

    def _end(self, update: EngineUpdate, version: int, by_plan: set[int], by_bucket: set[int]) -> None:
        index = update.address.index
        update.finish(version)
        if index in by_plan and index in by_bucket:
            update.compare_digests()
        update.resume()

    def _send_buckets(self, updates: list[EngineUpdate], version: int) -> None:
        """Stream all tensors to these engines. All ranks take part, also those that lead none of them."""
        if self._stream is None:
            self._stream = self._make_stream()
        stream = self._stream

        def send(bucket: dict[str, Any]) -> None:
            for_each(updates, lambda update: update.send({"version": version, "bucket": bucket}))

        disagreement = stream.run(send if updates else None)
        if disagreement is not None:
            for update in updates:
                update.fail(disagreement)

    def _drop_stream(self) -> None:
        """Give up the buffers, two buckets, where they were for the proof. Not before all have met: workers of another
        rank's engine may still be opening this rank's."""
        planned = self.options.update_weight_transport == "planned"
        if self._stream is not None and planned and not any(e.problems for e in self._engines.values()):
            self._stream.close()
            self._stream = None

    def _make_stream(self) -> BucketStream:
        assert self._shards is not None
        assert self._everybody is not None
        contributes = self._shards.first_holders(self.rank)
        chosen = [
            (piece, self._params[piece.chunk, piece.param])
            for piece, first in zip(self._pieces, contributes, strict=True)
            if first
        ]
        slot = next((group for (start, end), group in self._slots.items() if start <= self.rank < end), None)
        return BucketStream(
            self._shards.tensors,
            chosen,
            self.options.update_weight_buffer_size,
            self._device,
            self._everybody,
            slot,
        )

    # ------------------------------------------------------------------ meeting

    def _gather(self, phase: str, work: Callable[[], Any]) -> list[Any]:
        """Do something, meet the others, and return what all of them made of it; if anybody failed, fail together."""
        assert self._everybody is not None
        error = value = None
        try:
            value = work()
        except Exception as exception:  # noqa: BLE001 - whatever it is, the others must hear of it
            error = error_value(exception, phase, f"trainer rank {self.rank}")
        answers = self._everybody.gather({"error": error, "value": value}, phase)
        raise_first([answer["error"] for answer in answers])
        return [answer["value"] for answer in answers]


def node_name() -> str:
    """Names the place within which one process can open another's memory: the machine, and its PID namespace."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return f"{socket.gethostname()} {namespace}".strip()


def _engine_stats(update: EngineUpdate) -> dict[str, Any]:
    """What the summary needs of one engine."""
    slot = update.address.slot
    total = local = 0
    for worker, state in enumerate(update.states):
        by_rank = {int(rank): count for rank, count in state.get("bytes_by_rank", {}).items()}
        total += sum(by_rank.values())
        local += by_rank.get(slot.start + worker, 0) if slot is not None else 0
    phases = ("direct", "staged", "check")  # on a GPU the first two only enqueue, and the last one waits
    copying = [sum(state["seconds"].get(phase, 0.0) for phase in phases) for state in update.states]
    return {"bytes": total, "local": local, "copy": max(copying, default=0.0), "seconds": update.seconds}


def summary(engines: list[dict[str, Any]], waited: float, seconds: float) -> dict[str, float]:
    """Figures of one update over all engines.

    ``bytes`` read by all workers; ``seconds`` in all; ``copy_seconds`` of the slowest worker and ``gb_per_second`` of
    all together while copying; ``local_share`` of the bytes came from the rank on the worker's own device,
    ``link_share`` from others of its node; ``ready_seconds`` this rank waited for the slowest rank;
    ``<phase>_seconds`` of the slowest engine.
    """
    total, local = sum(e["bytes"] for e in engines), sum(e["local"] for e in engines)
    copying = max((e["copy"] for e in engines), default=0.0)
    out = {
        "bytes": float(total),
        "seconds": seconds,
        "copy_seconds": copying,
        "gb_per_second": total / copying / 1e9 if copying else 0.0,
        "local_share": local / total if total else 0.0,
        "link_share": (total - local) / total if total else 0.0,
        "ready_seconds": waited,
    }
    for phase in dict.fromkeys(phase for e in engines for phase in e["seconds"]):
        out[f"{phase}_seconds"] = max(e["seconds"].get(phase, 0.0) for e in engines)
    return out
