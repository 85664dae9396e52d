"""The engine's side of a planned sync, for one worker. Knows nothing of vLLM: the model stands behind a protocol.

What a worker guarantees. It writes nothing unless every trainer rank it reads from holds the version it was told. It
looks again when it is done: a trainer that went on during the copy is noticed. It compares what it read with what it
wrote. If anything raises, the model holds a mixture; the caller must not generate with it, and a later update that
succeeds makes it whole again, since every update writes everything.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from vime.errors import WeightSyncError
from vime.weight_sync.arena import Handle, Stamp, open_arena
from vime.weight_sync.arena_cuda import wake_links
from vime.weight_sync.channel import Channel
from vime.weight_sync.copier import Copier, make_copier
from vime.weight_sync.copy_cpu import CpuCopier
from vime.weight_sync.load_plan import LoadPlan
from vime.weight_sync.program import CopyProgram, Source, compose
from vime.weight_sync.remote import MOST_BYTES, Staging
from vime.weight_sync.shard_map import RankInfo, ShardMap, TensorInfo

log = logging.getLogger(__name__)


class StagedLayer(Protocol):
    """A layer whose live tensors are not in load format: quantised, shuffled or packed after loading."""

    @property
    def params(self) -> list[str]:
        """The load-format parameters, by the names of the load plan."""
        ...

    def open(self) -> dict[str, torch.Tensor]:
        """Put load-format tensors in place of the live ones; the plan writes every element of them."""
        ...

    def close(self) -> None:
        """Process what was written, as after loading, and put the live tensors back with the result."""
        ...

    def abort(self) -> None:
        """Put the live tensors back as they were; nothing, before :meth:`open` and after :meth:`close`."""
        ...


class Model(Protocol):
    """What the receiver needs of an engine's model."""

    def trace(self, tensors: Mapping[str, TensorInfo]) -> LoadPlan: ...

    def direct(self) -> dict[str, torch.Tensor]:
        """Live tensors that are in load format, by the names of the load plan."""
        ...

    def staged(self) -> Sequence[StagedLayer]: ...

    def settle(self) -> None:
        """After all parameters were written: whatever is derived from several layers' weights."""
        ...


STAGE_BYTES = 512 << 20  # of layers that are opened together: copying them takes longer than to launch their check


@dataclass(frozen=True)
class Place:
    """Where a worker stands."""

    engine: int
    worker: int
    neighbour: int  # the trainer rank on the same device; without one, a number that spreads the reading
    node: str
    maps: bool = True  # whether it opens the memory of trainer ranks on its node; else all of them send
    gpu: str | None = None  # the physical one, as arenas name theirs

    def __str__(self) -> str:
        return f"engine {self.engine}, worker {self.worker}"


@dataclass
class Report:
    """What one worker did in its last update. Seconds and bytes."""

    version: int | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    bytes_by_rank: dict[int, int] = field(default_factory=dict)
    copies: int = 0
    engine_bytes: int = 0  # of bytes_by_rank, what copy engines have read
    checked: str = "off"


class Receiver:
    """Plans once (:meth:`connect`), then replays (:meth:`update`)."""

    def __init__(
        self,
        model: Model,
        place: Place,
        check: str,
        device: torch.device | None = None,
        most_bytes: int = MOST_BYTES,
        copy_engines: bool = True,
    ) -> None:
        """check: "full", "sampled" or "off". device: of the model (default: the CPU). most_bytes: of one message from
        a rank on another node. copy_engines: may read from other GPUs."""
        self.model, self.place, self.check, self.most_bytes = model, place, check, most_bytes
        self.device, self._copy_engines = device or torch.device("cpu"), copy_engines
        self.plan: LoadPlan | None = None
        self.report = Report()
        self._arenas: dict[Source, torch.Tensor] = {}
        self._stamps: dict[int, torch.Tensor] = {}
        self._handles: dict[tuple[int, str], Handle] = {}
        self._program, self._sources = CopyProgram([], []), []
        self._far: dict[int, list[Source]] = {}  # rank on another GPU -> its arenas
        self._direct: Copier = CpuCopier(self._program)
        self._stages: list[tuple[list[StagedLayer], Copier]] = []
        self._staging = Staging([], str(place), check, self.device)
        self._checks: list[tuple[Copier, Callable[[], list[int]]]] = []  # of the update that is going on

    # ------------------------------------------------------------------ connect

    def connect(self, shards: ShardMap) -> LoadPlan:
        """Make the plan and open the arenas. If the plan has problems nothing more is done: the caller decides.

        Raises:
            WeightSyncError: the trainer does not hold what the engine wants; or the engine has parameters that nothing
                of the trainer's is loaded into, which no update of any kind would write.
            ArenaError: the trainer's memory cannot be opened.
        """
        started = time.perf_counter()
        with _without_garbage_collection():
            self.plan = self._trace(shards)
            if self.plan.unwritten:
                raise self._error(_left_out(self.plan), "connect")
            if self.plan.problems:
                return self.plan
            self._prepare(shards)
        traced = time.perf_counter()
        self._open(shards.ranks)
        self.report.seconds = {"plan": traced - started, "open": time.perf_counter() - traced}
        self.report.bytes_by_rank = self._program.bytes_by_rank()
        self.report.copies = len(self._program.copies)
        return self.plan

    def _prepare(self, shards: ShardMap) -> None:
        """Make everything from the plan that does not depend on addresses."""
        assert self.plan is not None
        self._program = compose(self.plan, shards, self.place.neighbour, self.place.node)
        near = [rank for rank, info in shards.ranks.items() if self.place.maps and info.node == self.place.node]
        parts = self._program.by_param()
        groups = _together(self.model.staged(), self.plan)
        params = (self.model.direct(), *([param for layer in group for param in layer.params] for group in groups))
        programs = [CopyProgram.union(parts, names).split(near) for names in params]
        # What is opened; the other ranks send. Kept: twenty thousand copies are not looked through at every update.
        self._sources = [source for source in self._program.sources if source[0] in near]
        self._far = self._on_other_gpus(shards.ranks)
        far = [source for sources in self._far.values() for source in sources] if self._copy_engines else []
        first = self.place.neighbour % (max(shards.ranks) + 1)
        # Live tensors stay where they are; a layer's load-format tensors are new at every update.
        copiers = [make_copier(part, self.device, stage == 0, far, first) for stage, (part, _) in enumerate(programs)]
        self._direct, self._stages = copiers[0], list(zip(groups, copiers[1:], strict=True))
        remote = [copies for _, copies in programs]
        self._staging = Staging(remote, str(self.place), self.check, self.device, self.most_bytes, first)

    def _on_other_gpus(self, ranks: Mapping[int, RankInfo]) -> dict[int, list[Source]]:
        found: dict[int, list[Source]] = {}
        for rank, number in self._sources:
            if self.place.gpu is not None and ranks[rank].arenas[number].get("device") != self.place.gpu:
                found.setdefault(rank, []).append((rank, number))
        return found

    def _trace(self, shards: ShardMap) -> LoadPlan:
        try:
            return self.model.trace(shards.tensors)
        except Exception as error:  # noqa: BLE001 - loaders are foreign code
            return LoadPlan({}, problems={"the whole model": f"its loader fails on tensors without data: {error}"})

    def _open(self, ranks: Mapping[int, RankInfo]) -> None:
        """Open what the program reads and is not open yet, or has moved."""
        for rank, number in self._sources:
            if rank not in ranks:
                continue
            for key, handle in ((f"arena {number}", ranks[rank].arenas[number]), ("stamp", ranks[rank].stamp)):
                if self._handles.get((rank, key)) == handle:
                    continue
                opened = open_arena(handle)
                if key == "stamp":
                    self._stamps[rank] = opened
                else:
                    self._arenas[rank, number] = opened
                self._handles[rank, key] = handle

    @property
    def senders(self) -> list[int]:
        """Ranks whose weights arrive through a channel: it must be open before the first update."""
        return self._staging.ranks

    def open_channel(self, channel: Channel, members: Mapping[int, int]) -> None:
        """Tell each of ``senders`` what to send at every update. ``members``: rank -> its number in the channel."""
        self._staging.open(channel, members)

    def close_channel(self) -> None:
        """Leave it, so that ranks that are sending stop."""
        self._staging.close()

    def release(self) -> None:
        """Unmap the trainer's memory, so that the trainer can give it back. The plan stays; the next update must be
        told of every rank's arenas again."""
        self._checks.clear()
        for copier in (self._direct, *(copier for _, copier in self._stages)):
            copier.unbind()
        self._staging.unbind()
        self._arenas.clear()
        self._stamps.clear()
        self._handles.clear()

    def close(self) -> None:
        """Unmap the trainer's memory for good."""
        self.release()
        self._staging.close()
        self._stages.clear()

    # ------------------------------------------------------------------ update

    def make_ready(self, moved: Collection[int] = ()) -> None:
        """An update is about to come: wake the links to the GPUs that it will read from. ``moved``: ranks that may have
        given up the memory that is mapped here; the update says where theirs is now."""
        for rank, sources in self._far.items():
            opened = [self._arenas[source] for source in sources if source in self._arenas and rank not in moved]
            if opened:
                wake_links(opened)

    @torch.no_grad()
    def update(self, version: int, moved: Mapping[int, RankInfo] | None = None) -> None:
        """Copy every weight.

        Args:
            version: what the trainer's stamps must say.
            moved: ranks whose arenas have other handles than before.

        Raises:
            WeightSyncError: the trainer holds another version, or a checksum differs. Names the rank, or the tensors.
        """
        if self.plan is None or self.plan.problems:
            raise self._error("no copy program: connect first", "copy")
        self.report.version = None
        started = time.perf_counter()
        self._open(moved or {})
        self._expect(version, "holds")
        opened = time.perf_counter()
        self._checks.clear()
        self._staging.waited = 0.0
        self._copy(0, self._direct, self.model.direct(), version)
        copied = time.perf_counter()
        for stage, (layers, copier) in enumerate(self._stages, start=1):
            self._update_layers(stage, layers, copier, version)
        self.model.settle()
        staged = time.perf_counter()
        ran = [copier for copier, _ in self._checks]
        self._verify()
        self._expect(version, "went on during the copy to")
        self.report.seconds |= {
            "open": opened - started,
            "direct": copied - opened,
            "staged": staged - copied,
            "check": time.perf_counter() - staged,  # on a GPU: until everything enqueued above is done
            "copy": sum(copier.seconds for copier in ran),
            "compare": sum(copier.check_seconds for copier in ran),
            "wait": self._staging.waited,  # for what is sent by plan, in "direct" and "staged"
        }
        self.report.engine_bytes = sum(copier.engine_bytes for copier in ran)
        self.report.version, self.report.checked = version, self.check

    def _copy(self, stage: int, copier: Copier, params: Mapping[str, torch.Tensor], version: int) -> None:
        copier.bind(self._arenas, params)
        copier.run()  # its fills come before anything that arrives
        self._checks.append((copier, copier.check(self.check, version)))
        self._checks += self._staging.receive(stage, version, params)

    def _update_layers(self, stage: int, layers: Sequence[StagedLayer], copier: Copier, version: int) -> None:
        waiting = list(layers)
        try:
            try:
                opened = (layer.open().items() for layer in layers)
                self._copy(stage, copier, {name: tensor for items in opened for name, tensor in items}, version)
            finally:
                copier.forget_params()
                self._staging.forget_params(stage)
            while waiting:  # each layer's load-format tensors are gone before the next is processed
                waiting[0].close()
                waiting.pop(0)
        except BaseException:
            self._put_back(waiting)
            raise

    def _put_back(self, layers: Sequence[StagedLayer]) -> None:
        """After an error, which says what happened: all of them, also if one cannot be."""
        for layer in layers:
            try:
                layer.abort()
            except Exception:  # foreign code: noted, and the first error is raised
                log.exception("%s: a layer could not be put back", self.place)

    def _verify(self) -> None:
        """Wait for all copies and what comparing them found."""
        for copier, answer in self._checks:
            wrong = answer()
            if wrong:
                first = copier.program.copies[wrong[0]]
                cause = (
                    f"{len(wrong)} of {len(copier.program.copies)} copies arrived changed, the first of {first.tensor} "
                    f"from trainer rank {first.source[0]} to {first.param}"
                )
                raise self._error(cause, "checksum")
        self._checks.clear()

    def _expect(self, version: int, verb: str) -> None:
        for rank, page in self._stamps.items():
            found = Stamp.read(page)
            if found != version:
                words = "weights that are being changed" if found == Stamp.WRITING else f"version {found}"
                raise self._error(f"trainer rank {rank} {verb} {words}, expected version {version}", "version")

    def _error(self, cause: str, phase: str) -> WeightSyncError:
        return WeightSyncError(phase, str(self.place), cause)

    def state(self) -> dict[str, Any]:
        """The report as JSON."""
        return {**vars(self.report), "bytes_by_rank": {str(k): v for k, v in self.report.bytes_by_rank.items()}}


def _left_out(plan: LoadPlan) -> str:
    name, count = min(plan.unwritten.items(), key=lambda item: item[0])
    whole = torch.Size(plan.params[name].shape).numel()
    return (
        f"no tensor of the trainer's is loaded into {count} of the {whole} elements of its parameter {name}"
        + (f", nor into parts of {len(plan.unwritten) - 1} others" if len(plan.unwritten) > 1 else "")
        + ": they would keep what the engine was started with; engine and trainer must be of the same model"
    )


def _together(layers: Sequence[StagedLayer], plan: LoadPlan) -> list[list[StagedLayer]]:
    """Neighbouring layers in groups of at least ``STAGE_BYTES`` in load format (the last one is what is left): one
    launch copies a group, while the host is already launching its check. One by one, the GPU would wait for the host at
    either. An update needs that much memory, and the largest layer, beside the live tensors."""
    groups: list[list[StagedLayer]] = []
    size = STAGE_BYTES
    for layer in layers:
        if size >= STAGE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(layer)
        size += sum(plan.params[name].num_bytes for name in layer.params)
    return groups


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """A plan is some hundred thousand small objects, all of which stay. Looking through them for garbage again and
    again while they are made doubles the time of composing it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
