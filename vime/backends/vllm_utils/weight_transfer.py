"""The worker's end of a weight update: vLLM's WeightTransferEngine, by vime's plan or bucket by bucket.

vLLM's routes call it in this order: ``init`` once per connection, then per update ``start``, ``update`` (once with the
plan, once per bucket otherwise) and ``finish``. The trainer has paused the engine before ``start``. vLLM forwards only
exceptions, as the text of an HTTP 500; everything else the trainer wants to know it asks WorkerExtension for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger

from vime.backends.vllm_utils.adapter import VllmModel, check_version, worker_number
from vime.errors import WeightSyncError
from vime.weight_sync.arena import Handle, open_arena
from vime.weight_sync.boxes import contiguous_strides
from vime.weight_sync.receiver import Place, Receiver
from vime.weight_sync.shard_map import RankInfo, ShardMap

# Not this module's own name: vLLM configures only loggers below "vllm".
logger = init_logger("vllm.vime.weight_transfer")


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Sent once per connection, the same to every worker."""

    connection: str  # names this connection; an engine that still knows it need not be connected again
    engine: int
    neighbours: list[int]  # trainer rank on the device of worker 0, 1, ...; empty for an engine with GPUs of its own
    devices: list[str]  # worker 0, 1, ... -> under which name it finds its bucket's handle
    node: str
    check: str
    shards: dict[str, Any]


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One message of an update. ``bucket`` is None for the planned path."""

    version: int
    moved: list[dict[str, Any]] = field(default_factory=list)  # ranks whose arenas have new handles
    bucket: dict[str, Any] | None = None


class VimeWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """One per worker."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_version()
        self._info: InitInfo | None = None
        self._receiver: Receiver | None = None
        self._vllm_model = VllmModel(self.model, self.model_config)
        self._loading = False
        self._updated_to: int | None = None  # the open update's version, once its weights are in
        self._version: int | None = None
        self._buckets: dict[str, tuple[Handle, torch.Tensor]] = {}

    # ------------------------------------------------------------------ what vLLM calls

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.shutdown()
        number = worker_number(self.vllm_config)
        neighbour = init_info.neighbours[number] if init_info.neighbours else number
        place = Place(init_info.engine, number, neighbour, init_info.node)
        receiver = Receiver(self._vllm_model, place, init_info.check, torch.device(self.device))
        plan = receiver.connect(ShardMap.from_json(init_info.shards))
        for param, why in plan.problems.items():
            logger.warning("%s cannot be written by plan: %s", param, why)
        seconds = ", ".join(f"{name} {value * 1e3:.0f} ms" for name, value in receiver.report.seconds.items())
        logger.info("%s: %d copies planned (%s)", place, receiver.report.copies, seconds)
        self._info, self._receiver = init_info, receiver

    def start_weight_update(self) -> None:
        self._connected()
        self._version = self._updated_to = None

    def receive_weights(self, update_info: UpdateInfo) -> None:
        receiver = self._connected()
        try:
            if update_info.bucket is not None:
                self._load_bucket(update_info.bucket)
            else:
                moved = {info.rank: info for info in (RankInfo(**item) for item in update_info.moved)}
                receiver.update(update_info.version, moved)
        except BaseException:
            self.abort()
            raise
        self._updated_to = update_info.version

    def finish_weight_update(self) -> None:
        place = self._connected().place
        if self._updated_to is None:
            raise WeightSyncError("finish", str(place), "no weights have arrived in this update")
        if self._loading:
            self._loading = False
            try:
                self._vllm_model.end_load()
            except BaseException:
                self.abort()
                raise
            self._buckets.clear()
        self._version = self._updated_to

    def shutdown(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = self._info = None
        self._buckets.clear()

    # ------------------------------------------------------------------ what WorkerExtension calls

    def abort(self) -> None:
        """Leave no trace of an open update but the bytes it has written."""
        self._loading, self._updated_to, self._version = False, None, None
        self._vllm_model.abort_load()
        self._buckets.clear()

    def poison(self) -> None:
        self._vllm_model.poison()

    def digests(self) -> dict[str, int]:
        return self._vllm_model.digests()

    def state(self) -> dict[str, Any]:
        """JSON: ``connection``, ``version`` (None while an update is open or after one that failed), what was planned,
        and of the last update seconds per phase and bytes per source rank."""
        if self._receiver is None or self._info is None:
            return {"connection": None}
        plan = self._receiver.plan
        return {
            **self._receiver.state(),
            "connection": self._info.connection,
            "version": self._version,
            "problems": plan.problems if plan else {},
            "unused": plan.unused if plan else [],
            "unwritten": plan.unwritten if plan else {},
        }

    # ------------------------------------------------------------------ buckets

    def _load_bucket(self, bucket: dict[str, Any]) -> None:
        """Load whole checkpoint tensors from one flat buffer on this worker's own device.

        ``bucket``: ``handles``, device name -> arena handle; ``tensors``, [name, dtype, shape, byte offset] each.
        """
        assert self._info is not None
        place = self._connected().place
        device = self._info.devices[place.worker]
        handle = bucket["handles"].get(device)
        if handle is None:
            known = ", ".join(bucket["handles"])
            raise WeightSyncError("bucket", str(place), f"no handle for its device {device}; there are: {known}")
        if device not in self._buckets or self._buckets[device][0] != handle:
            self._buckets[device] = (handle, open_arena(handle))
        buffer = self._buckets[device][1]
        weights = []
        for name, dtype_name, shape, offset in bucket["tensors"]:
            dtype = getattr(torch, dtype_name)
            typed = buffer[offset : offset + torch.Size(shape).numel() * dtype.itemsize].view(dtype)
            # A copy: vLLM keeps it until the layer is complete, and the trainer fills the buffer again before that.
            weights.append((name, typed.as_strided(shape, contiguous_strides(shape), typed.storage_offset()).clone()))
        if not self._loading:
            self._vllm_model.begin_load()
            self._loading = True
        self._vllm_model.load(weights)

    def _connected(self) -> Receiver:
        if self._receiver is None:
            raise WeightSyncError("start", "a worker", "not connected: the trainer has not sent its shard map")
        return self._receiver
