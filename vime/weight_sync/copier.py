"""What performs a copy program, wherever the weights are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

import torch

from vime.weight_sync.copy_cpu import CpuCopier
from vime.weight_sync.program import CopyProgram, Source


class Copier(Protocol):
    """Performs one copy program."""

    program: CopyProgram
    # What the last run took, and its check; on a GPU by its own clock, and known once check's answer is there.
    seconds: float
    check_seconds: float
    engine_bytes: int  # of the last run, what copy engines read

    def bind(self, arenas: Mapping[Source, torch.Tensor], params: Mapping[str, torch.Tensor]) -> None:
        """Take today's addresses. Before the first run, and whenever an arena or a parameter may have moved."""
        ...

    def unbind(self) -> None:
        """Keep nothing of what :meth:`bind` was given."""
        ...

    def forget_params(self) -> None:
        """Keep no parameter alive. :meth:`bind` comes before the next run."""
        ...

    def run(self) -> None:
        """Copy everything; on a GPU, enqueue it."""
        ...

    def check(self, mode: str, version: int) -> Callable[[], list[int]]:
        """Compare what was written with what is at the source: "full", "sampled" (another part at every version) or
        "off". Returns a function that waits until copy and check are done, and returns the numbers of the copies that
        differ. Targets may be gone by then."""
        ...


def make_copier(
    program: CopyProgram,
    device: torch.device,
    replay: bool = False,
    far: Collection[Source] = (),
    first: int = 0,
) -> Copier:
    """
    Args:
        program, device: what to copy, and where the parameters are.
        replay: it will be run many times with the same addresses.
        far: arenas on other GPUs that copy engines may read.
        first: the rank that they begin with. One for all workers would be asked by all of them at once.
    """
    if device.type == "cuda":
        from vime.weight_sync.copy_triton import TritonCopier  # Triton is there with CUDA only

        return TritonCopier(program, replay, far, first)
    return CpuCopier(program)
