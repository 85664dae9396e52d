"""Weights that lie on another node: the trainer rank packs them, sends them, and the worker copies from a staging
arena by the same kind of program that it runs on memory it can read.

A worker knows from its plan what it wants from which rank. It cuts that into *chunks* of bounded size, in the order in
which it will apply them, and tells each rank its own chunks when their channel opens (:func:`to_request`). From then on
nothing needs to be said: at every update each rank sends its chunks in order, one stream per worker, and the worker
takes them in its order. A stream waits for its own worker only, so no two of them can wait for each other (on a GPU
thanks to channel.py, which keeps the waiting off the device). Either end has two buffers: while a message is on the
way, the next one is packed and the one before taken out. But no message begins before the one before it has passed: it
would stand in one of the GPU's few hardware queues, and what comes after it there would wait as well.

Every chunk ends in a trailer: the version of the weights in it, and a checksum of the bytes before.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from vime.errors import WeightSyncError
from vime.weight_sync.boxes import contiguous_strides
from vime.weight_sync.channel import Channel
from vime.weight_sync.checksum import bit_sum
from vime.weight_sync.columns import pack, unpack
from vime.weight_sync.copier import Copier, make_copier
from vime.weight_sync.program import Copy, CopyProgram, Source

STAGING = -1  # instead of an arena's number: the staging arena, as what it holds came from a rank
MOST_BYTES = 64 << 20  # of a chunk: long enough for a network's full speed, short enough for two buffers per worker

_ALIGNMENT = 16  # the widest unit of the copy kernel
_TRAILER = 16  # version and checksum, int64 each


@dataclass(frozen=True)
class Chunk:
    """What travels in one message, beside the trailer.

    ``reads`` pack it: their ``param`` is the name of a dtype, in which the buffer is looked at. ``writes`` take it out
    of the staging arena, each element of the buffer to one place.
    """

    rank: int
    num_bytes: int  # a multiple of 16
    reads: list[Copy]
    writes: list[Copy]


def chunks(copies: Sequence[Copy], most: int = MOST_BYTES, first: int = 0) -> list[Chunk]:
    """Group copies from other nodes, by rank, into chunks of at most ``most`` bytes; larger copies are cut.

    Ranks come in ascending order, ``first`` before all others and those below it last: workers that begin with
    different ranks do not queue at the same one.
    """
    out: list[Chunk] = []
    for rank in sorted({copy.source[0] for copy in copies}, key=lambda rank: (rank < first, rank)):
        reads: list[Copy] = []
        writes: list[Copy] = []
        end = 0
        for whole in (copy for copy in copies if copy.source[0] == rank):
            for copy in _cut(whole, most):
                size = -(-copy.src_bytes // _ALIGNMENT) * _ALIGNMENT
                if reads and end + size > most:
                    out.append(Chunk(rank, end, reads, writes))
                    reads, writes, end = [], [], 0
                strides = contiguous_strides(copy.shape)
                dtype = str(copy.src_dtype).removeprefix("torch.")
                reads.append(replace(copy, param=dtype, dst_offset=end // copy.src_dtype.itemsize, dst_strides=strides))
                writes.append(replace(copy, source=(rank, STAGING), src_offset=end, src_strides=strides))
                end += size
        if reads:
            out.append(Chunk(rank, end, reads, writes))
    return out


def _cut(copy: Copy, most: int) -> list[Copy]:
    """Parts of at most ``most`` bytes, cut along the outermost dimension."""
    if copy.src_bytes <= most or not copy.shape:
        return [copy]
    count, row = copy.shape[0], copy.src_bytes // copy.shape[0]
    step = max(most // row, 1)
    out = []
    for first in range(0, count, step):
        part = replace(
            copy,
            src_offset=copy.src_offset + first * copy.src_strides[0] * copy.src_dtype.itemsize,
            dst_offset=copy.dst_offset + first * copy.dst_strides[0],
            shape=(min(step, count - first), *copy.shape[1:]),
        )
        if row <= most:
            out.append(part)
        else:  # one row is too much: drop the dimension, which is 1 now, and cut the next
            inner = replace(
                part, shape=copy.shape[1:], src_strides=copy.src_strides[1:], dst_strides=copy.dst_strides[1:]
            )
            out += _cut(inner, most)
    return out


# ---------------------------------------------------------------- the request


def to_request(parts: Sequence[Chunk]) -> bytes:
    """What a rank must know of its chunks, in the order it is to send them."""
    reads = [read for chunk in parts for read in chunk.reads]
    dims = max((len(read.shape) for read in reads), default=0)
    dtypes = sorted({read.param for read in reads})
    rows = [
        (
            *(read.source[1], read.src_offset, dtypes.index(read.param), read.dst_offset, len(read.shape)),
            *(*read.shape, *(1,) * (dims - len(read.shape))),
            *(*read.src_strides, *(0,) * (dims - len(read.shape))),
        )
        for read in reads
    ]
    columns = np.array(rows, dtype=np.int64).reshape(len(rows), -1).T
    request = {
        "dtypes": dtypes,
        "dims": dims,
        "chunks": [[chunk.num_bytes, len(chunk.reads)] for chunk in parts],
        "reads": pack(columns),
    }
    return json.dumps(request).encode()


def from_request(data: bytes, rank: int) -> list[Chunk]:
    """The chunks of :func:`to_request`, without their writes."""
    request = json.loads(data)
    dims, dtypes = request["dims"], request["dtypes"]
    rows = iter(unpack(request["reads"], 5 + 2 * dims, -1).T.tolist())
    out = []
    for num_bytes, count in request["chunks"]:
        reads = []
        for _ in range(count):
            arena, src_offset, dtype, dst_offset, ndim, *rest = next(rows)
            shape = tuple(rest[:ndim])
            reads.append(
                Copy(
                    source=(rank, arena),
                    src_offset=src_offset,
                    src_dtype=getattr(torch, dtypes[dtype]),
                    src_strides=tuple(rest[dims : dims + ndim]),
                    param=dtypes[dtype],
                    dst_offset=dst_offset,
                    dst_strides=contiguous_strides(shape),
                    shape=shape,
                    tensor="",
                )
            )
        out.append(Chunk(rank, num_bytes, reads, []))
    return out


# ---------------------------------------------------------------- sending


class Sender:
    """A trainer rank's stream to one worker. One thread at a time may use it.

    Args:
        channel: of the worker's engine.
        member: the worker's number in it.
        rank: this trainer rank.
        check: "off" leaves the checksums out.
    """

    def __init__(self, channel: Channel, member: int, rank: int, check: str) -> None:
        self._channel, self._member, self._check = channel, member, check
        parts = from_request(channel.receive_bytes(member), rank)
        self._parts = [(part.num_bytes, make_copier(CopyProgram(part.reads, []), channel.device)) for part in parts]
        self._buffers = _buffers(parts, channel.device)
        dtypes = {read.param for part in parts for read in part.reads}
        self._views = [{name: buffer.view(getattr(torch, name)) for name in dtypes} for buffer in self._buffers]

    @torch.no_grad()
    def serve(self, version: int, arenas: Mapping[Source, torch.Tensor]) -> None:
        """Send every chunk.

        Raises:
            RuntimeError: the worker has gone, or did not take one in time.
        """
        with _messages() as on_the_way:
            for number, (num_bytes, copier) in enumerate(self._parts):
                buffer = self._buffers[number % 2]
                copier.bind(arenas, self._views[number % 2])
                copier.run()
                _trailer(buffer, num_bytes).copy_(_seal(buffer[:num_bytes], version, self._check))
                if on_the_way:
                    self._channel.finish(on_the_way.pop())
                on_the_way.append(self._channel.begin_send(buffer[: num_bytes + _TRAILER], self._member))
            if on_the_way:
                self._channel.finish(on_the_way.pop())


# ---------------------------------------------------------------- receiving


class Staging:
    """A worker's staging arenas, through which all its chunks pass, in turns.

    Args:
        stages: the copies from other nodes, in groups that are applied together.
        place: names the worker in errors.
        check: see Receiver.
        most: bytes of a chunk.
        first: the rank to begin with (see :func:`chunks`).
    """

    def __init__(
        self,
        stages: Sequence[Sequence[Copy]],
        place: str,
        check: str,
        device: torch.device,
        most: int = MOST_BYTES,
        first: int = 0,
    ) -> None:
        self._place, self._check, self._device = place, check, device
        self._chunks = [chunks(copies, most, first) for copies in stages]
        self._copiers = [
            [make_copier(CopyProgram(chunk.writes, []), device) for chunk in stage] for stage in self._chunks
        ]
        self._buffers: list[torch.Tensor] = []
        self._channel: Channel | None = None
        self.waited = 0.0  # seconds for messages, with nothing else to do; whoever reads it begins it anew

    @property
    def ranks(self) -> list[int]:
        """Trainer ranks that send something."""
        return sorted({chunk.rank for stage in self._chunks for chunk in stage})

    def open(self, channel: Channel, members: Mapping[int, int]) -> None:
        """Tell every rank what it is to send. ``members``: rank -> its number in the channel."""
        self._channel, self._members = channel, members
        parts = [chunk for stage in self._chunks for chunk in stage]
        self._buffers = _buffers(parts, self._device)
        for rank in self.ranks:
            channel.send_bytes(to_request([chunk for chunk in parts if chunk.rank == rank]), members[rank])

    def receive(
        self, stage: int, version: int, params: Mapping[str, torch.Tensor]
    ) -> list[tuple[Copier, Callable[[], list[int]]]]:
        """Take the chunks of one stage, and copy them into the parameters.

        Returns:
            Each copier that ran, with the answer of its check.

        Raises:
            WeightSyncError: a rank has gone or is late, sends another version, or its bytes have changed on the way.
        """
        coming = self._chunks[stage]
        if coming and self._channel is None:
            raise WeightSyncError("copy", self._place, f"has no channel to trainer rank {coming[0].rank}")
        checks = []
        with _messages() as on_the_way:
            if coming:
                on_the_way.append(self._begin(coming[0], self._buffers[0]))
            for number, (chunk, copier) in enumerate(zip(coming, self._copiers[stage], strict=True)):
                self._finish(chunk, on_the_way.pop())
                if number + 1 < len(coming):  # into the buffer that has been taken out, and compared, before this one
                    on_the_way.append(self._begin(coming[number + 1], self._buffers[(number + 1) % 2]))
                buffer = self._buffers[number % 2]
                self._look_at(chunk, buffer, version)
                copier.bind({(chunk.rank, STAGING): buffer}, params)
                copier.run()
                checks.append((copier, copier.check(self._check, version)))
        return checks

    def _begin(self, chunk: Chunk, buffer: torch.Tensor) -> dist.Work:
        assert self._channel is not None
        with self._naming(chunk):
            return self._channel.begin_receive(buffer[: chunk.num_bytes + _TRAILER], self._members[chunk.rank])

    def _finish(self, chunk: Chunk, message: dist.Work) -> None:
        assert self._channel is not None
        started = time.perf_counter()
        with self._naming(chunk):
            self._channel.finish(message)
        self.waited += time.perf_counter() - started

    @contextmanager
    def _naming(self, chunk: Chunk) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            cause = f"trainer rank {chunk.rank} did not send its weights: {error}"
            raise WeightSyncError("copy", self._place, cause) from error

    def _look_at(self, chunk: Chunk, buffer: torch.Tensor, version: int) -> None:
        """Refuse another version, and bytes that have changed on the way."""
        where = f"trainer rank {chunk.rank}"
        sent = _trailer(buffer, chunk.num_bytes).tolist()
        if sent[0] != version:
            raise WeightSyncError("version", self._place, f"{where} sends version {sent[0]}, expected {version}")
        if sent != _seal(buffer[: chunk.num_bytes], version, self._check).tolist():
            first = chunk.writes[0]
            cause = f"{chunk.num_bytes} bytes from {where}, of {first.tensor} and others, arrived changed"
            raise WeightSyncError("checksum", self._place, cause)

    def forget_params(self, stage: int) -> None:
        """Keep no parameter of a stage alive."""
        for copier in self._copiers[stage]:
            copier.forget_params()

    def unbind(self) -> None:
        """Keep nothing of the parameters."""
        for copier in (copier for stage in self._copiers for copier in stage):
            copier.unbind()

    def close(self) -> None:
        """Leave the channel; ranks that are sending to it stop."""
        if self._channel is not None:
            self._channel.close()
        self._channel, self._buffers = None, []


@contextmanager
def _messages() -> Iterator[list[dist.Work]]:
    """The message that has begun and not passed, if there is one. After an error nobody waits for it, and it may not be
    kept: a Gloo channel is open, and the other side waits, as long as it lives (in the error's traceback, say)."""
    begun: list[dist.Work] = []
    try:
        yield begun
    finally:
        begun.clear()


def _buffers(parts: Sequence[Chunk], device: torch.device) -> list[torch.Tensor]:
    size = max((part.num_bytes for part in parts), default=0) + _TRAILER
    return [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2)]


def _trailer(buffer: torch.Tensor, num_bytes: int) -> torch.Tensor:
    return buffer[num_bytes : num_bytes + _TRAILER].view(torch.int64)


def _seal(data: torch.Tensor, version: int, check: str) -> torch.Tensor:
    """The trailer of these bytes: int64 [2]. All of them are looked at, also by a sampled check: it costs little beside
    a network, which nothing else looks at."""
    total = bit_sum(data.view(torch.int64)) if check != "off" else torch.zeros((), dtype=torch.int64).to(data.device)
    return torch.stack((torch.full_like(total, version), total))
