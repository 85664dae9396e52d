"""Runs a copy program on a CPU: prebuilt views, one ``torch._foreach_copy_``."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from vime.weight_sync.program import Copy, CopyProgram, Source


def source_view(copy: Copy, arenas: Mapping[Source, torch.Tensor]) -> torch.Tensor:
    """The elements of a copy where the trainer has them."""
    arena = arenas[copy.source]
    typed = arena[: arena.numel() // copy.src_dtype.itemsize * copy.src_dtype.itemsize].view(copy.src_dtype)
    return typed.as_strided(copy.shape, copy.src_strides, copy.src_offset // copy.src_dtype.itemsize)


def target_view(copy: Copy, params: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The elements of a copy where the engine wants them."""
    param = params[copy.param]
    return param.as_strided(copy.shape, copy.dst_strides, param.storage_offset() + copy.dst_offset)


class CpuCopier:
    """A program bound to addresses. Bound again when an arena or a parameter has moved."""

    def __init__(
        self, program: CopyProgram, arenas: Mapping[Source, torch.Tensor], params: Mapping[str, torch.Tensor]
    ) -> None:
        self.program = program
        self.sources = [source_view(copy, arenas) for copy in program.copies]
        self.targets = [target_view(copy, params) for copy in program.copies]
        self._fills = [
            (params[f.param].as_strided(f.shape, f.strides, params[f.param].storage_offset() + f.offset), f.value)
            for f in program.fills
        ]

    @torch.no_grad()
    def run(self) -> None:
        """Copy everything. Dtypes may differ; values are converted as ``Tensor.copy_`` does."""
        for view, value in self._fills:
            view.fill_(value)
        if self.targets:
            torch._foreach_copy_(self.targets, self.sources)
