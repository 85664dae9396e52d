"""Values for a stand-in trainer's parameters that depend on nothing but the tensor and the place in it.

So every layout holds the same checkpoint, no two parts of it are alike, and after an update every engine must hold the
same bytes, whatever the trainer's layout and whichever way they came: a rank taken for another shows, also where it
moves as many bytes. All of them change at every update, since a copy that writes nothing over its own result of before
shows nowhere.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch

from vime.models.layout import ParallelLayout, Piece, checkpoint_tensors, pieces
from vime.models.spec import ModelSpec

_ELEMENTS = 1 << 26  # whose places are computed at once: as int64 they take 8 bytes each
_MIX = -7046029254386353131, -4658895280553007687  # of splitmix64: neighbours, and tensors, end up far apart
_MANTISSA = 0x7F  # its low bits are flipped from state to state: seven bits, all that bfloat16 has
_INTEGERS = {2: torch.int16, 4: torch.int32}


class KnownWeights:
    """One rank's parameters. :meth:`become` puts all of them into one of 128 states; two ranks, and two layouts, in the
    same state hold the same values of what they both hold.

    Args:
        spec, layout, rank: what is held.
        params: (chunk, name) -> parameter, all of one floating point type; overwritten, with all that lies beside them
            in the same memory. Rows that pad the vocabulary hold anything.
    """

    def __init__(
        self, spec: ModelSpec, layout: ParallelLayout, rank: int, params: Mapping[tuple[int, str], torch.Tensor]
    ) -> None:
        self._state, shapes = 0, checkpoint_tensors(spec)
        for piece in pieces(spec, layout, rank):
            _fill(piece, shapes[piece.tensor], piece.view(params[piece.chunk, piece.param]))
        memory = {param.untyped_storage().data_ptr(): param for param in params.values()}
        self._memory = [
            torch.empty(0, dtype=_INTEGERS[param.itemsize], device=param.device).set_(param.untyped_storage())
            for param in memory.values()
        ]

    @torch.no_grad()
    def become(self, state: int) -> None:
        """Every value of one state (modulo 128) differs from its value in any other."""
        state &= _MANTISSA
        for values in self._memory:
            values.bitwise_xor_(self._state ^ state)
        self._state = state


@torch.no_grad()
def _fill(piece: Piece, shape: tuple[int, ...], view: torch.Tensor) -> None:
    """Values between -0.035 and 0.035, from the hash of the tensor's name and each element's number in it."""
    columns = shape[1] if len(shape) == 2 else 1
    (first, last), *rest = piece.box
    start, stop = rest[0] if rest else (0, 1)
    salt = zlib.crc32(piece.tensor.encode()) << 30
    across = torch.arange(start, stop, device=view.device)
    step = max(_ELEMENTS // (stop - start), 1)
    for row in range(first, last, step):
        down = torch.arange(row, min(row + step, last), device=view.device) * columns
        number = (down[:, None] + across).add_(salt).mul_(_MIX[0])
        number = number.bitwise_xor_(number >> 27).mul_(_MIX[1]).bitwise_right_shift_(40).bitwise_and_(0xFFFF)
        value = number.float().div_(1 << 16).sub_(0.5).mul_(0.07)
        part = view[row - first : row - first + len(down)]
        part.copy_(value.view(part.shape))
