"""Checksums of weights, computed where the weights are.

Two kinds. A *sum* does not depend on the order of the elements: what a copy read must have the sum of what it wrote,
whatever the strides on either side; one flipped bit changes it. A *digest* depends on every element's position: two
parameters with the same digest hold the same bytes in the same places (up to 64-bit coincidence).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PARTS = 32  # the sampled check looks at one part in this many of every copy, another one at every version
_CHUNK = 1 << 22  # elements of a digest's temporaries


def bit_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Sum of the elements' bit patterns as integers, modulo 2**64: a 0-dim int64 tensor on the same device.

    Works on any strides without a copy.
    """
    return tensor.view(_INTEGERS[tensor.element_size()]).sum(dtype=torch.int64)


def sample(tensor: torch.Tensor, version: int) -> tuple[slice, ...]:
    """Index of about one part in 32 of a tensor, another part for each version; all of it within 32 versions."""
    index: list[slice] = []
    parts = _PARTS
    for size in tensor.shape:
        if parts <= 1:
            break
        width = -(-size // parts)
        count = -(-size // width)
        number = version % count
        index.append(slice(number * width, (number + 1) * width))
        version //= count
        parts //= count
    return tuple(index)


def differing(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], mode: str, version: int) -> list[int]:
    """Numbers of the copies whose target does not hold what its source holds.

    Args:
        sources, targets: the views of each copy, equal in size. Where dtypes differ the source is converted first.
        mode: "full", "sampled" or "off".
        version: which part "sampled" looks at.
    """
    if mode == "off" or not sources:
        return []
    pairs = []
    for source, target in zip(sources, targets, strict=True):
        if mode == "sampled":
            index = sample(target, version)
            source, target = source[index], target[index]
        if source.dtype != target.dtype:
            source = source.to(target.dtype)
        pairs.append(torch.stack((bit_sum(source), bit_sum(target))))
    sums = torch.stack(pairs)  # one transfer from the device for all of them
    return torch.nonzero(sums[:, 0] != sums[:, 1])[:, 0].tolist()


def digest(tensor: torch.Tensor) -> int:
    """Position-dependent 64-bit checksum of a tensor's bytes, in row-major order."""
    if tensor.numel() == 0:
        return 0
    flat = tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK].to(torch.int64)
        place = torch.arange(start, start + part.numel(), device=part.device)
        # splitmix64's mixing: the products of neighbouring places have nothing to do with each other.
        mixed = (part ^ (place * -7046029254386353131)) * -4658895280553007687
        total += ((mixed ^ (mixed >> 31)) * -7723592293110705685).sum()
    return int(total)
