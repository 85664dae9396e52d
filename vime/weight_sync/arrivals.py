"""What has come of an update by whole tensors, in buckets or from a directory, and whether it is what was sent.

The load itself cannot tell: an engine's loader takes a tensor twice, or not at all, without a word. So each tensor is
held against the trainer's list and its checksum before it is loaded, and the list is looked through at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vime.errors import WeightSyncError
from vime.weight_sync.checksum import bit_sum
from vime.weight_sync.shard_map import TensorInfo

Weights = Sequence[tuple[str, torch.Tensor]]


def checksums(tensors: Sequence[torch.Tensor]) -> list[str]:
    """Of each tensor the sum of its bits, all of them, as text: JSON readers round 64-bit integers."""
    if not tensors:
        return []
    return [str(value) for value in torch.stack([bit_sum(tensor) for tensor in tensors]).tolist()]


class Arrivals:
    """The tensors of one update.

    Args:
        expected: all checkpoint tensors, as the trainer holds them.
        where: the worker, for errors.
        checks: whether checksums are compared.
    """

    def __init__(self, expected: Mapping[str, TensorInfo], where: str, checks: bool) -> None:
        self._expected, self._where, self._checks = expected, where, checks
        self._come: set[str] = set()

    def announce(self, listed: Sequence[Sequence[Any]]) -> None:
        """A message is about to bring these tensors: [name, dtype, shape, ...] each.

        Raises:
            WeightSyncError: one of them has come already, or the trainer has none like it.
        """
        for name, dtype, shape, *_ in listed:
            self._count(name, tuple(shape))
            if dtype != self._expected[name].dtype:
                raise self._error(f"{name} came as {dtype}, the trainer holds it as {self._expected[name].dtype}")

    def _count(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self._expected:
            raise self._error(f"{name} came, which the trainer does not have")
        if name in self._come:
            raise self._error(f"{name} came twice")
        if shape != self._expected[name].shape:
            raise self._error(f"{name} came with shape {shape}, the trainer's has {self._expected[name].shape}")
        self._come.add(name)

    def compare(self, weights: Weights, sums: Mapping[str, str] | None) -> None:
        """Hold what has come, before it is loaded, against what the trainer has computed where it came from.

        Raises:
            WeightSyncError: the bytes differ, or nothing was sent to compare them with.
        """
        if not self._checks:
            return
        for (name, _), found in zip(weights, checksums([tensor for _, tensor in weights]), strict=True):
            if sums is None or name not in sums:
                raise self._error(f"no checksum came with {name}", "checksum")
            if sums[name] != found:
                raise self._error(f"{name} arrived changed: its checksum is {found}, it was {sums[name]}", "checksum")

    def take(self, name: str, tensor: torch.Tensor, sums: Mapping[str, str] | None) -> None:
        """One tensor that has come without being announced: both checks, but of its dtype, which is the sender's
        choice."""
        self._count(name, tuple(tensor.shape))
        self.compare([(name, tensor)], sums)

    def end(self) -> None:
        """No more will come.

        Raises:
            WeightSyncError: something has not come.
        """
        missing = [name for name in self._expected if name not in self._come]
        if missing:
            raise self._error(f"{len(missing)} of {len(self._expected)} tensors did not come, the first {missing[0]}")

    def _error(self, cause: str, phase: str = "update") -> WeightSyncError:
        return WeightSyncError(phase, self._where, cause)
