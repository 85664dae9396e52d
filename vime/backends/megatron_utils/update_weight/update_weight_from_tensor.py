"""UpdateWeightFromTensor: the trainer's weights into engines that share its GPUs, or reach its node's memory. What lies
on another node is sent (channels.py); engines that reach nothing are sent everything, in the same update.

Every trainer rank has one and calls its methods together with the others. In an update by plan all ranks meet at two
points only: before the first byte is read, when every rank's weights are final, and after the last engine has
confirmed, when the memory may be changed again. Between them only slot leaders act. The bucketed path needs all ranks
to assemble tensors: it has a sum of each bucket in between, to which a leader comes when its engines have taken the
bucket before. There all ranks wait for the slowest engine; that all have sent is said after the last bucket alone.

A failure anywhere travels to the next meeting as a value, so that all ranks raise the same WeightSyncError; a rank that
does not come to a meeting is noticed by its deadline.
"""

from __future__ import annotations

import functools
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import torch

from vime.backends.megatron_utils.update_weight.bucket_path import send_buckets
from vime.backends.megatron_utils.update_weight.bucket_sum import BucketSum
from vime.backends.megatron_utils.update_weight.bucketed import BucketStream, refuse_disagreement
from vime.backends.megatron_utils.update_weight.channels import Channels
from vime.backends.megatron_utils.update_weight.connected import Engine, leader
from vime.backends.megatron_utils.update_weight.engine_update import EngineUpdate, for_each
from vime.backends.megatron_utils.update_weight.exchange import Exchange, error_value, raise_first
from vime.backends.megatron_utils.update_weight.own_weights import Key, OwnWeights
from vime.backends.megatron_utils.update_weight.summary import engine_stats, summary, unused_by_all
from vime.config import Config
from vime.errors import WeightSyncError
from vime.models.layout import ParallelLayout, checkpoint_tensors, pieces
from vime.models.spec import ModelSpec
from vime.types import EngineAddress
from vime.weight_sync.arena import Stamp, node_name
from vime.weight_sync.remote import MOST_BYTES
from vime.weight_sync.shard_map import RankInfo, ShardMap, merge

log = logging.getLogger(__name__)


class UpdateWeightFromTensor:
    """Every method is collective: all ranks call it, with the same arguments.

    ``maps``: whether workers open the memory of ranks on their node; ``has_buckets``: whether there is a bucketed path.
    Subclasses for which that is not so are in update_weight_from_distributed.py and update_weight_from_disk.py.

    Args:
        config: the run's options.
        spec, layout: the model and how it is cut; the same on every rank.
        rank: global trainer rank.
        named_params: (chunk, name) -> parameter, contiguous, inside arenas (vime.weight_sync.arena.allocate).
        device: "cpu" or "cuda", where the parameters are.
    """

    maps = True
    has_buckets = True

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
        self._config, self._spec, self._layout = config, spec, layout
        self._pieces = pieces(spec, layout, rank)
        self._shapes = checkpoint_tensors(spec)
        self._node = node_name()
        self._own = OwnWeights(rank, f"{self._node}/{device}/{rank}", torch.device(device), named_params)
        self._everybody: Exchange | None = None
        self._slots: dict[tuple[int, int], Exchange] = {}
        self._shards: ShardMap | None = None
        self._connection = ""
        self._engines: dict[int, Engine] = {}
        self._stream: BucketStream | None = None
        timeout = self.options.weight_update_timeout
        self._channels = Channels(rank, self._own.memory, self.options.check_weight_update, timeout)

    # ------------------------------------------------------------------ connecting

    def connect_rollout_engines(self, addresses: list[EngineAddress]) -> None:
        """Exchange the shard map and hand it to every engine, which plans its copies.

        Call it again, with all engines, when one was replaced; then ``update_weights(version, only=[index])``.

        Raises:
            WeightSyncError: the same on every rank.
        """
        if self._everybody is None:
            self._everybody = Exchange(range(self.world_size), self.options.weight_update_timeout, self._own.stamp)
        parts = self._gather("connect", self._describe)
        shards = merge(parts, self._shapes)
        if self._shards is None or shards.to_json() != self._shards.to_json():
            self._shards, self._connection = shards, parts[0]["connection"]
        self._create_slot_groups(addresses)
        self._close_stream()  # its payloads were for the slots of before
        try:
            found = self._gather("connect", lambda: self._connect_led(addresses))
        except WeightSyncError:
            for engine in self._engines.values():  # some of them know us by now, but not what came of it before
                engine.proven = engine.channel = False
            raise
        answers = {int(index): answer for part in found for index, answer in part.items()}
        known, self._engines = self._engines, {}
        for address in addresses:
            answer, before = answers[address.index], known.get(address.index)
            engine = Engine(address, answer["problems"], answer["wanted"], answer["apart"])
            self._engines[address.index] = engine
            if answer["knew_us"] and before is not None and before.address == address:
                engine.proven, engine.channel = before.proven, before.channel
                engine.untold = before.untold
        self._open_channels(list(self._engines.values()))

    def disconnect_rollout_engines(self) -> None:
        """Have the engines forget this trainer: for engines that outlive it, or its parameters. Memory that a worker
        has mapped is not free before that, whatever the trainer does with it. Connect them again before an update.

        Raises:
            WeightSyncError: the same on every rank: engines that could not be left. They stay connected, the others do
                not; it may be tried again.
        """
        if not self._engines:
            return

        def leave() -> list[dict[str, Any]]:
            led = [
                EngineUpdate(engine.address, self._connection, self.options.weight_update_timeout)
                for engine in self._engines.values()
                if leader(engine.address) == self.rank
            ]
            for_each(led, EngineUpdate.disconnect)
            for_each(led, EngineUpdate.close)
            for index in self._engines:
                self._channels.close(index)
            return [update.failure for update in led if update.failure is not None]

        failures = [failure for part in self._gather("disconnect", leave) for failure in part]
        failed = {index for failure in failures for index in failure["engines"]}
        self._engines = {index: engine for index, engine in self._engines.items() if index in failed}
        for engine in self._engines.values():
            engine.channel = False
        self._close_stream()
        raise_first(failures)

    def _describe(self) -> dict[str, Any]:
        return self._own.describe(self._node, self._shapes, self._pieces) | {"connection": uuid.uuid4().hex}

    def _create_slot_groups(self, addresses: list[EngineAddress]) -> None:
        """A Gloo group per slot of several ranks, over exactly these. Every rank takes part in creating every group."""
        for start, end in sorted({(a.slot.start, a.slot.end) for a in addresses if a.slot is not None}):
            if end - start > 1 and (start, end) not in self._slots:
                self._slots[start, end] = Exchange(range(start, end), self.options.weight_update_timeout)

    def _connect_led(self, addresses: list[EngineAddress]) -> dict[str, Any]:
        """Connect the engines that this rank leads, all at once."""
        assert self._shards is not None
        assert self._everybody is not None
        for exchange in (self._everybody, *(slot for slot in self._slots.values() if slot.group is not None)):
            exchange.watch(self._shards.ranks, self._node)
        led = [
            EngineUpdate(address, self._connection, self.options.weight_update_timeout)
            for address in addresses
            if leader(address) == self.rank
        ]
        for_each(led, lambda update: update.connect(functools.partial(self._init_info, update.address)))
        for_each(led, EngineUpdate.close)
        raise_first([update.failure for update in led])
        found = {}
        for update in led:
            problems = {param: why for state in update.states for param, why in state["problems"].items()}
            for param, why in problems.items():
                log.warning("%s: %s cannot be planned (%s); the bucketed path serves it", update, param, why)
            if unused := unused_by_all(update.states):
                log.info("%s takes nothing from %s", update, ", ".join(unused))
            wanted = [state.get("senders", []) if self._plans else [] for state in update.states]
            reaches = self.maps and all(state["node"] == self._node for state in update.states)
            found[str(update.address.index)] = {
                **{"problems": problems, "knew_us": update.knew_us},
                **{"wanted": wanted, "apart": self.has_buckets and not reaches},
            }
        return found

    def _init_info(self, address: EngineAddress, node: str) -> dict[str, Any]:
        """InitInfo of an engine on ``node``."""
        assert self._shards is not None
        ranks = list(range(address.slot.start, address.slot.end)) if address.slot is not None else []
        return {
            "connection": self._connection,
            "engine": address.index,
            "neighbours": ranks,
            # Buckets: of the slot each worker's own; an engine without a slot takes the leader's.
            "devices": [self._shards.ranks[rank].device for rank in ranks] or [self._own.device] * address.world_size,
            "check": self.options.check_weight_update,
            "shards": self._shards.nearest(address.slot, node).to_json(),
            "maps": self.maps,
            "most_bytes": min(self.options.update_weight_buffer_size, MOST_BYTES),
            "copy_engines": not self.options.no_copy_engines,
        }

    def _open_channels(self, engines: list[Engine]) -> None:
        """Form the channels that are not open. All ranks know which; they meet only if there is one."""
        missing = {engine.address.index: engine for engine in engines if engine.members.ranks and not engine.channel}
        if not missing:
            return
        led = [engine.address for engine in missing.values() if leader(engine.address) == self.rank]
        invitations = self._gather("connect", lambda: self._channels.invite(led))
        wanted = {index: (engine.members, engine.wanted) for index, engine in missing.items()}
        calls = [EngineUpdate(address, self._connection, self.options.weight_update_timeout) for address in led]
        self._gather("connect", lambda: self._channels.form(invitations, wanted, calls))
        for engine in missing.values():
            engine.channel = True

    # ------------------------------------------------------------------ updating

    def update_weights(self, version: int, only: list[int] | None = None) -> dict[str, float]:
        """Bring the weights into the engines (those of ``only``), as ``version``.

        The first update of an engine is proven: the planned and the bucketed path run once each, on weights made NaN
        before, and must leave the same bytes in every parameter and buffer (not with ``--check-weight-update off``).

        Returns:
            The same on every rank: see :func:`summary`.

        Raises:
            WeightSyncError: the same on every rank. Engines named in its ``engines`` hold a mixture and refuse to
                generate until a later update succeeds. The others have the new version, or still the old one.
        """
        if not self._engines or self._everybody is None:
            raise WeightSyncError("ready", "the trainer", "is connected to no engine: connect_rollout_engines() first")
        started = time.perf_counter()
        chosen = [self._engines[index] for index in (sorted(self._engines) if only is None else only)]
        by_plan = {engine.address.index for engine in chosen if self._is_planned(engine)}
        by_bucket = {engine.address.index for engine in chosen if self._needs_buckets(engine)}

        def ready() -> tuple[dict[str, Any] | None, str]:
            if by_bucket and self._stream is None:
                self._stream = self._make_stream()  # now: if there is no memory for it, the others hear of it
            return self._prepare(version), self._stream.digest if self._stream is not None else ""

        handles, digests = zip(*self._gather("ready", ready), strict=True)
        if by_bucket and self._stream is not None:
            refuse_disagreement(self._stream, digests, self._everybody)
        moved = {part["rank"]: part for part in handles if part is not None}
        assert self._shards is not None
        self._shards.ranks.update({rank: RankInfo(**part) for rank, part in moved.items()})
        for engine in self._engines.values():  # also those that this update leaves out
            engine.untold |= moved
        waited = time.perf_counter() - started
        self._make_reachable(chosen, version)

        led = {
            engine.address.index: EngineUpdate(engine.address, self._connection, self.options.weight_update_timeout)
            for engine in chosen
            if leader(engine.address) == self.rank
        }
        updates = list(led.values())
        raised: list[dict[str, Any]] = []
        unsent: list[dict[str, Any]] = []

        def begin() -> None:
            with self._channels.serving(sorted(by_plan), version, self._own.arenas(), unsent):
                for_each(updates, lambda update: self._begin(update, version, by_plan, by_bucket))
                for_each(updates, EngineUpdate.abort)  # here, or ranks would go on sending to those that failed

        try:
            raised += self._attempt(updates, begin)
            if by_bucket:
                assert self._stream is not None
                to = [(led[index], self._engines[index]) for index in sorted(by_bucket & led.keys())]
                raised += send_buckets(self._stream, self._everybody, self.rank, self._channels, to, version, unsent)
            end = functools.partial(self._end, version=version, by_plan=by_plan, by_bucket=by_bucket)
            raised += self._attempt(updates, lambda: for_each(updates, end))
        finally:
            for_each(updates, EngineUpdate.close)

        failures = [update.failure for update in updates if update.failure is not None]
        report = {"raised": raised, "failures": failures, "unsent": unsent}
        report["engines"] = [engine_stats(update) for update in updates]
        done = self._gather("done", lambda: report)
        self._own.stamp.set(Stamp.WRITING)  # from here on the memory may change
        self._drop_stream()
        # A rank's own fault first, then an engine's words: one that could not send often knows only that the worker has
        # gone.
        failures = [failure for kind in ("raised", "failures", "unsent") for part in done for failure in part[kind]]
        failed = {index for failure in failures for index in failure["engines"]}
        for engine in chosen:
            index = engine.address.index
            engine.proven |= index not in failed
            if index not in failed:
                engine.untold.clear()
            if index in failed:
                self._channels.close(index)
                engine.channel = False
        raise_first(failures)
        stats = [engine for part in done for engine in part["engines"]]
        return summary(stats, waited, time.perf_counter() - started)

    def _prepare(self, version: int) -> dict[str, Any] | None:
        """Stamp this rank's weights, which are final, with their version. Returns its arenas if one has moved."""
        assert self._shards is not None
        self._own.settle()
        info = self._own.locate(self._node)
        self._own.stamp.set(version)
        return vars(info) if info != self._shards.ranks[self.rank] else None

    def _make_reachable(self, engines: list[Engine], version: int) -> None:
        """All ranks are ready: see to it that the engines get at their weights, those whose memory they do not open."""
        self._open_channels(engines)

    @property
    def _plans(self) -> bool:
        return self.options.update_weight_transport in ("planned", "distributed")

    def _is_planned(self, engine: Engine) -> bool:
        return self._plans and not engine.problems

    def _needs_buckets(self, engine: Engine) -> bool:
        proves = not engine.proven and self.options.check_weight_update != "off"
        return self.has_buckets and (proves or not self._is_planned(engine))

    def _attempt(self, updates: list[EngineUpdate], work: Callable[[], None]) -> list[dict[str, Any]]:
        """Do what this rank does alone. Returns what went wrong, if anything did: the others, who go on to the next
        meeting or sum, shall hear of it there; this rank's engines have failed by it."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 - whatever it is, this rank must come to the next meeting
            for update in updates:
                update.fail(error)
            return [error_value(error, "update", f"trainer rank {self.rank}")]
        return []

    def _begin(self, update: EngineUpdate, version: int, by_plan: set[int], by_bucket: set[int]) -> None:
        index = update.address.index
        untold = self._engines[index].untold
        update.pause()
        update.start(untold if index in by_plan else None)
        if index in by_plan and index in by_bucket:  # both: the proof
            update.poison()
        if index in by_plan:
            update.send({"version": version, "moved": list(untold.values())})
        if index in by_plan and index in by_bucket:
            update.finish(version)
            update.keep_digests()
            update.start()
            update.poison()

    def _end(self, update: EngineUpdate, version: int, by_plan: set[int], by_bucket: set[int]) -> None:
        index = update.address.index
        if index in by_plan and index in by_bucket:
            update.compare_digests()
        update.finish(version)
        update.resume()

    def _drop_stream(self) -> None:
        """Give up the buffers, two buckets, where they were for the proof. Not before all have met: workers of another
        rank's engine may still be opening this rank's."""
        if self._plans and not any(engine.problems for engine in self._engines.values()):
            self._close_stream()

    def _close_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _make_stream(self) -> BucketStream:
        assert self._shards is not None
        assert self._everybody is not None
        contributes = self._shards.first_holders(self.rank)
        chosen = [
            (piece, self._own.params[piece.chunk, piece.param])
            for piece, first in zip(self._pieces, contributes, strict=True)
            if first
        ]
        slots = {(e.address.slot.start, e.address.slot.end) for e in self._engines.values() if e.address.slot}
        mine = next((slot for slot in sorted(slots) if slot[0] <= self.rank < slot[1]), None)
        return BucketStream(
            self._shards.tensors,
            chosen,
            self.options.update_weight_buffer_size,
            self._own.device,
            self._own.memory,
            BucketSum(self._everybody, list(self._shards.ranks.values())),
            self._slots.get(mine) if mine is not None else None,  # none over a slot of one rank
            self.options.check_weight_update != "off",
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
        errors: list[dict[str, Any]] = [answer["error"] for answer in answers if answer["error"]]
        of_engines = [error for error in errors if error["engines"]]  # they say more than that something did not come
        raise_first([*of_engines, *(error for error in errors if error not in of_engines)])
        return [answer["value"] for answer in answers]
