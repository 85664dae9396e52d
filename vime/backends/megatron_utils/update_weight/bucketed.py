"""The bucketed path: every rank assembles whole checkpoint tensors, bucket by bucket, and engines load them by
vLLM's own ``load_weights``.

Slow, and independent of shard maps, load plans and copy programs: what the planned path is proved against, and what
takes over where a model cannot be planned. Its only bookkeeping is which rank contributes which piece.

One bucket: each rank puts the pieces that are its to contribute into a buffer of zeros; the ranks' buffers are summed
as integers, which puts bytes together exactly; the sum goes into a shared buffer that the worker on the same device
reads; the slot leader sends one message with the handles of all the slot's devices.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from vime.backends.megatron_utils.update_weight.bucket_sum import BucketSum
from vime.backends.megatron_utils.update_weight.exchange import Exchange
from vime.errors import WeightSyncError
from vime.models.layout import Piece
from vime.weight_sync.arena import arena_of, create_arena
from vime.weight_sync.arrivals import checksums
from vime.weight_sync.boxes import contiguous_strides
from vime.weight_sync.shard_map import TensorInfo

_ALIGNMENT = 256

Placed = tuple[str, TensorInfo, int]  # name, tensor, byte offset in the bucket


def buckets(tensors: dict[str, TensorInfo], capacity: int) -> Iterator[tuple[list[Placed], int]]:
    """Group tensors, in order, into buckets of at most ``capacity`` bytes; a larger tensor has one of its own.

    Yields the tensors with their offsets, and the bytes in all.
    """
    placed: list[Placed] = []
    end = 0
    for name, info in tensors.items():
        size = -(-_num_bytes(info) // _ALIGNMENT) * _ALIGNMENT
        if placed and end + size > capacity:
            yield placed, end
            placed, end = [], 0
        placed.append((name, info, end))
        end += size
    if placed:
        yield placed, end


def _num_bytes(info: TensorInfo) -> int:
    return torch.Size(info.shape).numel() * getattr(torch, info.dtype).itemsize


def _differs(mine: str, theirs: str) -> bool:
    """Whether two ranks would send different names, dtypes, shapes or places: digests of their lists."""
    return mine != theirs


def refuse_disagreement(stream: BucketStream, digests: Sequence[str], everybody: Exchange) -> None:
    """All ranks must be about to send the same, bucket by bucket. Collective, and before anything is sent; ``digests``
    are those of all ranks' streams. The lists themselves, which are long, travel only if they differ.

    Raises:
        WeightSyncError: they do; the same on every rank.
    """
    odd = [number for number, digest in enumerate(digests) if _differs(digests[0], digest)]
    if not odd:
        return
    lists = everybody.gather(stream.listed, "ready")
    first, other = lists[0], lists[odd[0]]
    pairs = itertools.zip_longest(other, first)
    theirs, mine = next((a or "nothing", b or "nothing") for a, b in pairs if a != b)
    ranks = everybody.ranks
    cause = (
        f"its buckets differ from those of rank {ranks[0]}: {theirs} where that one has {mine} "
        "(name, dtype, shape, byte in the bucket, bucket); all ranks must be built from the same checkpoint and flags"
    )
    raise WeightSyncError("ready", f"trainer rank {ranks[odd[0]]}", cause)


class FailedElsewhere(WeightSyncError):
    """Another rank has failed, and says why itself."""


class BucketStream:
    """Streams all checkpoint tensors; every rank calls :meth:`run`.

    Args:
        tensors: all of them, the same on every rank.
        pieces: this rank's, with its parameters' tensors, and only those that it contributes: of replicas one.
        capacity: bytes of one bucket.
        device: name of this rank's device, under which its worker finds the handle.
        memory: where this rank's parameters are, whether it contributes any or none.
        total: adds buckets up over all ranks.
        slot: the exchange of this rank's slot; None where the slot is this rank alone, or it has none.
        checks: whether a bucket brings the checksums of its tensors.
    """

    def __init__(
        self,
        tensors: dict[str, TensorInfo],
        pieces: Sequence[tuple[Piece, torch.Tensor]],
        capacity: int,
        device: str,
        memory: torch.device,
        total: BucketSum,
        slot: Exchange | None,
        checks: bool,
    ) -> None:
        self._buckets, self._checks = list(buckets(tensors, capacity)), checks
        self.bytes = sum(end for _, end in self._buckets)
        self.listed = [
            [name, info.dtype, list(info.shape), offset, number]
            for number, (placed, _) in enumerate(self._buckets)
            for name, info, offset in placed
        ]
        self.digest = hashlib.sha256(json.dumps(self.listed).encode()).hexdigest()
        self._device, self._sum, self._slot = device, total, slot
        size = max(end for _, end in self._buckets)
        self._scratch = torch.zeros(size + 4, dtype=torch.uint8, device=memory)  # a bucket, and a count of failures
        if memory.type == "cuda":
            self._shared, _ = arena_of(torch.zeros(size, dtype=torch.uint8, device=memory))
        else:
            self._shared = create_arena(size, "weight buckets")
        self._handle = self._shared.describe()
        self._pieces: dict[str, list[tuple[Piece, torch.Tensor]]] = {}
        for piece, param in pieces:
            self._pieces.setdefault(piece.tensor, []).append((piece, param))

    @torch.no_grad()
    def run(self, send: Callable[[dict[str, Any], torch.Tensor], None] | None) -> Exception | None:
        """Stream everything once. ``send`` (of a slot leader) hands one message, and the buffer that it speaks of, to
        its engines and returns when they have taken it.

        There is no barrier after a message. A shared buffer is filled again only after the next bucket has been summed,
        and a leader takes part in that sum only when its engine has taken this bucket.

        A rank that cannot go on still comes to every sum: the others are in it. With each bucket the ranks add up how
        many of them have failed, so that nobody loads what one of them did not bring.

        Returns:
            What went wrong, if anything, on this rank or on another one. From then on this rank has sent nothing.

        Raises:
            WeightSyncError: a rank did not come, to a sum or to its slot's meeting.
        """
        failure: Exception | None = None

        def attempt(step: Callable[[], None]) -> None:
            nonlocal failure
            if failure is None:
                try:
                    step()
                except Exception as error:  # noqa: BLE001 - whatever it is, this rank must come to the next sum
                    failure = error

        for number, (placed, end) in enumerate(self._buckets, start=1):
            attempt(lambda placed=placed, end=end: self._fill(placed, end))
            self._sum.add(self._with_failures(end, failure is not None))
            attempt(lambda end=end: self._share(end))
            message, problem = self._merge(placed, failure is not None)
            failure = failure or problem
            if send is not None:
                whole = message | {"last": number == len(self._buckets)}
                attempt(
                    lambda whole=whole, placed=placed, end=end: send(
                        whole | self._sums(placed), self._shared.tensor[:end]
                    )
                )
        return failure

    def _with_failures(self, end: int, failed: bool) -> torch.Tensor:
        """The bucket as int32, and behind it whether this rank has failed."""
        counted = self._scratch[: end + 4].view(torch.int32)
        counted[-1] = int(failed)
        return counted

    def _share(self, end: int) -> None:
        """Put the sum where this rank's worker finds it."""
        self._shared.tensor[:end].copy_(self._scratch[:end])
        if failed := int(self._scratch[end : end + 4].view(torch.int32)):
            raise FailedElsewhere("update", "the trainer", f"{failed} of its ranks could not fill a bucket")
        if self._scratch.is_cuda:
            torch.cuda.synchronize()  # another process reads it

    def _fill(self, placed: list[Placed], end: int) -> None:
        self._scratch[:end].zero_()
        for name, info, offset in placed:
            flat = self._flat(info, offset)
            whole = flat.as_strided(info.shape, contiguous_strides(info.shape), flat.storage_offset())
            for piece, param in self._pieces.get(name, ()):
                whole[piece.slices].copy_(piece.view(param))

    def _flat(self, info: TensorInfo, offset: int) -> torch.Tensor:
        return self._scratch[offset : offset + _num_bytes(info)].view(getattr(torch, info.dtype))

    def _sums(self, placed: list[Placed]) -> dict[str, dict[str, str]]:
        """Of what was added up here: the worker has another copy of it, and on another GPU another sum."""
        if not self._checks:
            return {}
        found = checksums([self._flat(info, offset) for _, info, offset in placed])
        return {"sums": {name: value for (name, _, _), value in zip(placed, found, strict=True)}}

    def _merge(self, placed: list[Placed], failed: bool) -> tuple[dict[str, Any], FailedElsewhere | None]:
        """The merged payload, with a handle for every device of the slot, now that each of its ranks has the bucket
        where its worker finds it; or that one of them has not."""
        tensors = [[name, info.dtype, list(info.shape), offset] for name, info, offset in placed]
        mine = {"device": self._device, "handle": self._handle, "failed": failed}
        parts = self._slot.gather(mine, "update") if self._slot is not None else [mine]
        odd = next((part["device"] for part in parts if part["failed"]), None)
        problem = FailedElsewhere("update", f"the rank on {odd}", "has failed") if odd is not None else None
        return {"handles": {part["device"]: part["handle"] for part in parts}, "tensors": tensors}, problem

    def close(self) -> None:
        self._sum.close()
        self._shared.close()
