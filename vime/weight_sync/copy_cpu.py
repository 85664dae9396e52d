"""Runs a copy program on a CPU: prebuilt views, one ``torch._foreach_copy_``."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from vime.weight_sync.checksum import differing
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
    """A program on prebuilt views."""

    def __init__(self, program: CopyProgram) -> None:
        self.program = program
        self.seconds = self.check_seconds = 0.0
        self.engine_bytes = 0  # it has none
        self._sources: list[torch.Tensor] = []
        self._targets: list[torch.Tensor] = []
        self._fills: list[tuple[torch.Tensor, float]] = []
        self._arenas = program.sources
        self._params = dict.fromkeys([copy.param for copy in program.copies] + [fill.param for fill in program.fills])
        self._bound_to: tuple[int, ...] | None = None

    def bind(self, arenas: Mapping[Source, torch.Tensor], params: Mapping[str, torch.Tensor]) -> None:
        program = self.program
        used = [arenas[source] for source in self._arenas] + [params[name] for name in self._params]
        addresses = tuple(tensor.data_ptr() for tensor in used)
        if addresses == self._bound_to:
            return
        self._bound_to = addresses
        self._sources = [source_view(copy, arenas) for copy in program.copies]
        self._targets = [target_view(copy, params) for copy in program.copies]
        self._fills = [
            (params[f.param].as_strided(f.shape, f.strides, params[f.param].storage_offset() + f.offset), f.value)
            for f in program.fills
        ]

    def unbind(self) -> None:
        self._bound_to, self._sources, self._targets, self._fills = None, [], [], []

    def forget_params(self) -> None:
        self.unbind()

    @torch.no_grad()
    def run(self) -> None:
        """Copy everything. Dtypes may differ; values are converted as ``Tensor.copy_`` does."""
        started = time.perf_counter()
        for view, value in self._fills:
            view.fill_(value)
        if self._targets:
            torch._foreach_copy_(self._targets, self._sources)  # pyright: ignore[reportPrivateImportUsage]
        self.seconds = time.perf_counter() - started

    def check(self, mode: str, version: int) -> Callable[[], list[int]]:
        started = time.perf_counter()
        wrong = differing(self._sources, self._targets, mode, version)
        self.check_seconds = time.perf_counter() - started
        return lambda: wrong
