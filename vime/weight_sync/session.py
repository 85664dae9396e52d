"""A worker's conversation with the trainer, step by step, whatever engine the worker belongs to.

``connect`` once, and ``open_channel`` where ranks send from other nodes; then per update ``start``, ``make_ready`` if
it goes by plan, ``receive`` (once by plan, once per bucket, or once with a directory) and ``finish``. Whatever fails in
between, ``abort`` and the next ``start`` begin anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open

from vime.errors import WeightSyncError
from vime.weight_sync import receiver
from vime.weight_sync.arena import Handle, node_name, open_arena
from vime.weight_sync.arena_cuda import device_uuid
from vime.weight_sync.arrivals import Arrivals
from vime.weight_sync.boxes import contiguous_strides
from vime.weight_sync.channel import Channel
from vime.weight_sync.load_plan import LoadPlan
from vime.weight_sync.receiver import Place, Receiver
from vime.weight_sync.remote import MOST_BYTES
from vime.weight_sync.shard_map import RankInfo, ShardMap, TensorInfo


@dataclass
class InitInfo:
    """Sent once per connection, the same to every worker of an engine."""

    connection: str  # names this connection; a worker that still knows it need not be connected again
    engine: int
    neighbours: list[int]  # trainer rank on the device of worker 0, 1, ...; empty for an engine with GPUs of its own
    devices: list[str]  # worker 0, 1, ... -> under which name it finds its bucket's handle
    check: str  # "full", "sampled" or "off"
    shards: dict[str, Any]  # ShardMap.to_json
    maps: bool = True  # open the memory of trainer ranks on the same node; else all of them send
    most_bytes: int = MOST_BYTES  # of one message from a rank whose memory is not opened
    copy_engines: bool = True  # read other GPUs' memory with them too; else by the kernel alone


@dataclass
class ChannelInfo:
    """Where to meet the ranks that send. The same to every worker of an engine."""

    host: str
    port: int
    members: dict[str, int]  # trainer rank, as text -> its number; the workers' follow
    workers: int
    planned: bool  # whether ranks send by plan; else one sends buckets
    timeout: float


@dataclass
class UpdateInfo:
    """One message of an update."""

    version: int
    moved: list[dict[str, Any]] = field(default_factory=list)  # RankInfo of ranks whose arenas have new handles
    bucket: dict[str, Any] | None = None
    directory: str | None = None  # a Hugging Face checkpoint; neither bucket nor directory: by plan
    sums: dict[str, str] | None = None  # checksums of what is in the directory; a bucket brings its own


class Model(receiver.Model, Protocol):
    """What a session needs of an engine's model, beside what the receiver needs."""

    def begin_load(self) -> None:
        """Make ready for :meth:`load`."""
        ...

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """The engine's own load_weights, with some of the checkpoint's tensors."""
        ...

    def end_load(self) -> None:
        """All tensors were loaded."""
        ...

    def abort_load(self) -> None:
        """Make the model fit for another update, wherever a load was left."""
        ...

    def poison(self) -> None:
        """Make every planned parameter NaN, so that whatever the next update leaves out shows."""
        ...

    def digests(self) -> dict[str, int]:
        """Name -> digest of every parameter and buffer."""
        ...


class Session:
    """One worker's end of the weight sync.

    Args:
        model: the worker's.
        number: the worker's, among all of its engine.
        device: where the model is.
    """

    def __init__(self, model: Model, number: int, device: torch.device) -> None:
        self.model, self.number, self.device = model, number, device
        self._info: InitInfo | None = None
        self._receiver: Receiver | None = None
        self._neighbour: int | None = None  # the trainer rank on this worker's device
        self._devices: list[str] = []  # under whose name it finds its bucket's handle, the best first
        self._loading = False
        self._updated_to: int | None = None  # the open update's version, once its weights are in
        self._version: int | None = None
        self.failure: dict[str, str] | None = None  # what a step raised: its phase, where and cause
        self._bucket: tuple[Handle, torch.Tensor] | None = None
        self._arrivals = Arrivals({}, "", True)  # of the open update
        self._tensors: dict[str, TensorInfo] = {}  # all that the trainer has
        self._channel: Channel | None = None

    def attempt(self, step: str, *args: Any) -> None:
        """Take a step, "connect" to "finish", and keep what it raises as the ``failure`` of :meth:`state`; the steps
        after a failure do nothing, until "connect", "open_channel" or "start" begins anew.

        For engines whose workers must not raise: vLLM's executor stops reading its workers' answers at the first that
        failed, and from then on takes the old answers of the others for those to later calls.
        """
        if step in ("connect", "open_channel", "start"):
            self.failure = None
        if self.failure is not None:
            return
        try:
            getattr(self, step)(*args)
        except Exception as error:  # noqa: BLE001 - kept, and raised by the trainer
            self.abort(leave=True)
            if isinstance(error, WeightSyncError):
                self.failure = {"phase": error.phase, "where": error.where, "cause": error.cause}
            else:
                cause = f"{type(error).__name__}: {error}"
                phase = {"receive": "update", "make_ready": "start"}.get(step, step)
                self.failure = {"phase": phase, "where": f"worker {self.number}", "cause": cause}

    def connect(self, info: InitInfo) -> LoadPlan:
        """Plan, and open the trainer's memory."""
        self.close()
        shards, gpu = ShardMap.from_json(info.shards), self._gpu()
        told = info.neighbours[self.number] if info.neighbours else None
        neighbour = told if gpu is None else _neighbour(told, shards.on_gpu(gpu))
        spread = info.engine * len(info.devices) + self.number
        place = Place(info.engine, self.number, spread if neighbour is None else neighbour, node_name(), info.maps, gpu)
        connected = Receiver(self.model, place, info.check, self.device, info.most_bytes, info.copy_engines)
        plan = connected.connect(shards)
        self._info, self._receiver, self._neighbour, self._tensors = info, connected, neighbour, shards.tensors
        self._expect_all()
        near = [shards.ranks[neighbour].device] if neighbour in shards.ranks else []
        self._devices = [*near, info.devices[self.number]]
        return plan

    def _gpu(self) -> str | None:
        return device_uuid(self.device) if self.device.type == "cuda" else None

    def open_channel(self, info: ChannelInfo) -> None:
        """Meet the ranks that send, and tell them what. Again, with all of them, after an update that failed."""
        connected = self._connected()
        self._close_channel()
        members = {int(rank): member for rank, member in info.members.items()}
        number, total = len(members) + self.number, len(members) + info.workers
        self._channel = Channel(info.host, info.port, number, total, self.device, info.timeout)
        if info.planned:
            connected.open_channel(self._channel, members)

    def start(self) -> None:
        """Begin an update; the version before is none any more."""
        self._connected()
        self._version = self._updated_to = None
        self._expect_all()

    def make_ready(self, moved: list[int]) -> None:
        """Do what takes time before weights can be read by plan, which come next: see Receiver.make_ready."""
        self._connected().make_ready(moved)

    def receive(self, message: UpdateInfo) -> None:
        """Take the weights, or some of them.

        Raises:
            WeightSyncError: among others, of buckets or a directory: not every tensor came once, as it was sent.
            ArenaError, and whatever the model's loaders raise. After any of these the weights are a mixture.
        """
        connected = self._connected()
        try:
            if message.bucket is not None:
                self._load(self._take_bucket(message.bucket))
                if message.bucket["last"]:
                    self._end_load()
            elif message.directory is not None:
                self._load(self._arriving(read_directory(message.directory, self.device), message.sums))
                self._end_load()
            else:
                connected.update(message.version, {item["rank"]: RankInfo(**item) for item in message.moved})
        except BaseException:
            self.abort(leave=True)
            raise
        self._updated_to = message.version

    def finish(self) -> None:
        """Commit the version of what was received."""
        place = self._connected().place
        if self._updated_to is None or self._loading:
            which = "no" if self._updated_to is None else "not all"
            raise WeightSyncError("finish", str(place), f"{which} weights have arrived in this update")
        self._version = self._updated_to

    def abort(self, leave: bool = False) -> None:
        """Leave no trace of an open update but the bytes it has written; with ``leave`` leave the channel too, in which
        the rest of it may be on its way, and take back a version that was finished: one of the others has failed."""
        if leave:
            self._close_channel()
            self._version = None
        self._loading, self._updated_to, self._bucket = False, None, None
        self._expect_all()
        self.failure = None
        self.model.abort_load()

    def close(self) -> None:
        """Unmap the trainer's memory and forget the connection."""
        if self._receiver is not None:
            self._receiver.close()
        self._close_channel()
        self._receiver = self._info = self._bucket = self._version = None

    def _close_channel(self) -> None:
        if self._receiver is not None:
            self._receiver.close_channel()
        if self._channel is not None:
            self._channel.close()
        self._channel = None

    def state(self) -> dict[str, Any]:
        """JSON: this worker's ``node``, ``connection``, ``version`` (None while an update is open or after one that
        failed), ``failure`` (its phase, where and cause), ``senders`` (ranks that must send to it), ``neighbour`` (the
        rank on its own device), what was planned, and of the last update the seconds per phase and bytes per rank."""
        if self._receiver is None or self._info is None:
            return {"node": node_name(), "connection": None, "failure": self.failure}
        plan = self._receiver.plan
        return {
            **self._receiver.state(),
            "node": node_name(),
            "senders": self._receiver.senders,
            "neighbour": self._neighbour,
            "connection": self._info.connection,
            "version": self._version,
            "failure": self.failure,
            "problems": plan.problems if plan else {},
            "unused": plan.unused if plan else [],
            "unwritten": plan.unwritten if plan else {},
        }

    def _take_bucket(self, bucket: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
        """Whole checkpoint tensors, from one flat buffer on this worker's own device, or through the channel.

        ``bucket``: ``tensors``, [name, dtype, shape, byte offset] each; ``sums``, name -> checksum, unless none are
        compared; ``last``, whether none comes after it; ``handles``, device name -> arena handle, or ``origin``, the
        member that sends ``bytes`` bytes.
        """
        self._arrivals.announce(bucket["tensors"])
        if "origin" in bucket:
            buffer = torch.empty(bucket["bytes"], dtype=torch.uint8, device=self.device)
            if self._channel is None:
                raise WeightSyncError("update", str(self._connected().place), "has no channel to the trainer")
            self._channel.receive(buffer, bucket["origin"])
        else:
            buffer = self._shared_bucket(bucket["handles"])
        weights = []
        for name, dtype_name, shape, offset in bucket["tensors"]:
            dtype = getattr(torch, dtype_name)
            typed = buffer[offset : offset + torch.Size(shape).numel() * dtype.itemsize].view(dtype)
            # A copy: loaders may keep it until a layer is complete, and the trainer fills the buffer before that.
            weights.append((name, typed.as_strided(shape, contiguous_strides(shape), typed.storage_offset()).clone()))
        self._arrivals.compare(weights, bucket.get("sums"))
        return weights

    def _arriving(
        self, weights: Iterable[tuple[str, torch.Tensor]], sums: dict[str, str] | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            self._arrivals.take(name, tensor, sums)
            yield name, tensor

    def _expect_all(self) -> None:
        if self._receiver is not None:
            self._arrivals = Arrivals(self._tensors, str(self._receiver.place), self._receiver.check != "off")

    def _shared_bucket(self, handles: dict[str, Handle]) -> torch.Tensor:
        handle = next((handles[device] for device in self._devices if device in handles), None)
        if handle is None:
            cause = f"the payload has no handle for its device {self._devices[-1]}, only for: {', '.join(handles)}"
            raise WeightSyncError("update", str(self._connected().place), cause)
        if self._bucket is None or self._bucket[0] != handle:
            self._bucket = (handle, open_arena(handle))
        return self._bucket[1]

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        if not self._loading:
            self.model.begin_load()
            self._loading = True
        self.model.load(weights)

    def _end_load(self) -> None:
        self._arrivals.end()
        self.model.end_load()
        self._loading, self._bucket = False, None

    def _connected(self) -> Receiver:
        if self._receiver is None:
            cause = "not connected: the trainer has not sent its shard map"
            raise WeightSyncError("start", f"worker {self.number}", cause)
        return self._receiver


def read_directory(directory: str, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a directory of safetensors files, one at a time, by name.

    Raises:
        WeightSyncError: it has none: this node does not see the trainer's file system.
    """
    files = sorted(Path(directory).glob("*.safetensors"))
    if not files:
        cause = f"no weights lie in {directory}; trainer and engines must see the same file system there"
        raise WeightSyncError("update", "this node", cause)
    for file in files:
        with safe_open(file, framework="pt", device=str(device)) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                yield name, tensors.get_tensor(name)


def _neighbour(told: int | None, here: Sequence[int]) -> int | None:
    """The trainer rank on a worker's GPU. The trainer tells by the order of ranks and workers; where that is not the
    order of their GPUs, ``here``, the ranks whose weights are seen to be there, knows better. (One of them, where there
    are several: then what it reads from the others counts as read over a link.)"""
    return told if told in here else min(here, default=None)
