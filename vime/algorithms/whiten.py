"""Whitening: zero mean and unit variance over every learned token of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

EPSILON = 1e-8  # as in OpenRLHF, slime and verl


def whiten(values: Sequence[Tensor], masks: Sequence[Tensor]) -> list[Tensor]:
    """(value - mean) / sqrt(variance + 1e-8), mean and unbiased variance over all tokens with mask 1.

    Takes the whole batch, not one rank's share, so that the result does not depend on the parallel layout. Sums are
    taken in float64: millions of tokens in float32 lose the small mean.

    Args:
        values: one 1-D tensor [response tokens] per answer.
        masks: the same shapes, 0 or 1.

    Returns:
        Tensors like ``values``; masked tokens are 0. Fewer than two learned tokens: all zeros (no spread to measure).
    """
    if not values:
        return []
    flat = torch.cat([value.reshape(-1) for value in values]).double()
    mask = torch.cat([mask.reshape(-1) for mask in masks]).to(flat)
    count = mask.sum()
    mean = (flat * mask).sum() / count.clamp(min=1)
    variance = ((flat - mean).square() * mask).sum() / (count - 1).clamp(min=1)
    white = (flat - mean) / (variance + EPSILON).sqrt() * mask
    return [part.to(value.dtype) for part, value in zip(white.split([v.numel() for v in values]), values, strict=True)]
