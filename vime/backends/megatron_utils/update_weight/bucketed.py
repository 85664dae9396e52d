"""The bucketed path: every rank assembles whole checkpoint tensors, bucket by bucket, and engines load them by
vLLM's own ``load_weights``.

Slow, and independent of shard maps, load plans and copy programs: what the planned path is proved against, and what
takes over where a model cannot be planned. Its only bookkeeping is which rank contributes which piece.

One bucket: each rank puts the pieces that are its to contribute into a buffer of zeros; the ranks' buffers are summed
as integers, which puts bytes together exactly; the sum goes into a shared buffer that the worker on the same device
reads; the slot leader sends one message with the handles of all the slot's devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from vime.backends.megatron_utils.update_weight.bucket_sum import BucketSum
from vime.backends.megatron_utils.update_weight.exchange import Exchange
from vime.errors import WeightSyncError
from vime.models.layout import Piece
from vime.weight_sync.arena import arena_of, create_arena
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


def _differs(mine: list[Any], theirs: list[Any]) -> bool:
    """Whether two ranks of a slot would send different names, dtypes, shapes or places."""
    return mine != theirs


class _Disagreement(WeightSyncError):
    """Ranks of one slot would send different tensors."""


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
    ) -> None:
        self._buckets = list(buckets(tensors, capacity))
        self.bytes = sum(end for _, end in self._buckets)
        self._device, self._sum, self._slot = device, total, slot
        size = max(end for _, end in self._buckets)
        self._scratch = torch.zeros(size, dtype=torch.uint8, device=memory)
        if memory.type == "cuda":
            self._shared, _ = arena_of(torch.zeros(size, dtype=torch.uint8, device=memory))
        else:
            self._shared = create_arena(size, "weight buckets")
        self._pieces: dict[str, list[tuple[Piece, torch.Tensor]]] = {}
        for piece, param in pieces:
            self._pieces.setdefault(piece.tensor, []).append((piece, param))

    @torch.no_grad()
    def run(self, send: Callable[[dict[str, Any], torch.Tensor], None] | None) -> WeightSyncError | None:
        """Stream everything once. ``send`` (of a slot leader) hands one message, and the buffer that it speaks of, to
        its engines and returns when they have taken it; it must not raise: the others wait in the next collective.

        There is no barrier after a message. A shared buffer is filled again only after the next bucket has been summed,
        and a leader takes part in that sum only when its engine has taken this bucket.

        Returns:
            What the ranks of the slot disagree on, if they do: then nothing more is sent, but the loop goes on, since
            ranks of other slots are in it.

        Raises:
            WeightSyncError: a rank did not come.
        """
        disagreement = None
        for number, (placed, end) in enumerate(self._buckets, start=1):
            self._fill(placed, end)
            self._sum.add(self._scratch[:end].view(torch.int32))
            self._shared.tensor[:end].copy_(self._scratch[:end])
            if self._scratch.is_cuda:
                torch.cuda.synchronize()  # another process reads it
            try:
                message = self._message(placed) | {"last": number == len(self._buckets)}
            except _Disagreement as error:
                disagreement = error
            if send is not None and disagreement is None:
                send(message, self._shared.tensor[:end])
        return disagreement

    def _fill(self, placed: list[Placed], end: int) -> None:
        self._scratch[:end].zero_()
        for name, info, offset in placed:
            flat = self._scratch[offset : offset + _num_bytes(info)].view(getattr(torch, info.dtype))
            whole = flat.as_strided(info.shape, contiguous_strides(info.shape), flat.storage_offset())
            for piece, param in self._pieces.get(name, ()):
                whole[piece.slices].copy_(piece.view(param))

    def _message(self, placed: list[Placed]) -> dict[str, Any]:
        """The merged payload: a handle for every device of the slot, one list of tensors that all of them hold."""
        tensors = [[name, info.dtype, list(info.shape), offset] for name, info, offset in placed]
        mine = {"device": self._device, "handle": self._shared.describe(), "tensors": tensors}
        parts = self._slot.gather(mine, "update") if self._slot is not None else [mine]
        for part in parts:
            if _differs(tensors, part["tensors"]):
                wrong = next((a for a, b in zip(part["tensors"], tensors, strict=False) if a != b), "their number")
                raise _Disagreement("update", f"the rank on {part['device']}", f"its bucket differs: {wrong}")
        return {"handles": {part["device"]: part["handle"] for part in parts}, "tensors": tensors}

    def close(self) -> None:
        self._sum.close()
        self._shared.close()
