"""The precision that log-ratios are taken in."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def at_least_float32(tensor: Tensor) -> Tensor:
    """Half precisions become float32; float32 and float64 stay. Differences of log-probs are small: bf16 loses them."""
    return tensor if tensor.element_size() >= 4 else tensor.float()
