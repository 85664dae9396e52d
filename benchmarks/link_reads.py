"""How fast a GPU reads another's memory, alone and while the other reads its own: by our copy kernel, by torch, and by
copy engines in pieces of several sizes.

    python benchmarks/link_reads.py     # two GPUs of one host, a minute; writes benchmarks/link_reads_<device>.md

Two processes that see one GPU each, as engine workers do, map each other's memory through CUDA IPC. Pieces lie in
another order at their destination.
"""

from __future__ import annotations

import ctypes
import datetime
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.layout_ranks import OWN, Ranks

SIZE = 6 << 30  # bytes; a multiple of all pieces
MIB = 1 << 20
ROUNDS = 5
Ways = dict[str, Callable[[], object]]


class Pieces:
    """``size`` bytes each: where they are read, and where they go."""

    def __init__(self, source: torch.Tensor, target: torch.Tensor, size: int) -> None:
        count = SIZE // size
        self.to = np.random.default_rng(0).permutation(count) * size
        self.sources = source.data_ptr() + np.arange(count) * size
        self.targets = target.data_ptr() + self.to
        self.sizes = np.full(count, size)


def copy_kernel(source: torch.Tensor, target: torch.Tensor, size: int) -> Callable[[], object]:
    """By pieces of ``size`` bytes."""
    from vime.weight_sync.copy_triton import TritonCopier  # Triton is there with CUDA only
    from vime.weight_sync.program import Copy, CopyProgram

    def piece(number: int, to: int) -> Copy:
        shape = (size // 2,)
        return Copy((0, 0), number * size, torch.bfloat16, (1,), "p", to // 2, (1,), shape, f"t{number}")

    copies = [piece(number, to) for number, to in enumerate(Pieces(source, target, size).to.tolist())]
    copier = TritonCopier(CopyProgram(copies, []), replay=True)
    copier.bind({(0, 0): source}, {"p": target.view(torch.bfloat16)})
    return copier.run


def one_call_each(pieces: Pieces) -> Callable[[], object]:
    copy = ctypes.CDLL("libcuda.so.1").cuMemcpyDtoDAsync_v2
    copy.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    columns = (pieces.targets, pieces.sources, pieces.sizes)
    listed = list(zip(*(column.tolist() for column in columns), strict=True))

    def run() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        for piece in listed:
            _succeeded(copy(*piece, stream))

    return run


def one_call(pieces: Pieces) -> Callable[[], object]:
    """As the product does it: in few calls for many pieces."""
    from vime.weight_sync.copy_engines import CopyEngines

    device, origins = torch.device("cuda", torch.cuda.current_device()), np.zeros_like(pieces.sizes)
    engines = CopyEngines(device, pieces.sources, pieces.targets, pieces.sizes, origins)

    def run() -> None:
        with engines.copying():
            pass

    return run


def _succeeded(code: int) -> None:
    if code != 0:
        raise RuntimeError(f"the driver answered {code}")


def all_ways(source: torch.Tensor, target: torch.Tensor) -> Ways:
    ways: Ways = {"copy kernel, one run": copy_kernel(source, target, SIZE)}
    ways["copy kernel, 1.5 MiB"] = copy_kernel(source, target, 3 * MIB // 2)
    ways["torch's copy_"] = lambda: target.copy_(source)
    for size in (3 * MIB // 2, 64 * MIB):
        ways[f"copy engine, a call each, {size / MIB:g} MiB"] = one_call_each(Pieces(source, target, size))
    for size in (MIB // 2, 3 * MIB // 2, 6 * MIB, 64 * MIB):
        ways[f"copy engine, many a call, {size / MIB:g} MiB"] = one_call(Pieces(source, target, size))
    return ways


def read_rates(rank: int, device: str) -> dict[str, dict[str, float]]:
    """On each of two ranks, by every way: bytes/s of this rank's reads when rank 0 "alone" reads (of rank 1, nothing)
    and when "both" read at once; seconds in which the host has "enqueued" one copy."""
    from vime.weight_sync.arena_cuda import cuda_arena_of, open_cuda_arena

    mine, target = (torch.empty(SIZE, dtype=torch.uint8, device=device) for _ in range(2))
    mine.random_(0, 256)
    handles: list[Any] = [None, None]
    dist.all_gather_object(handles, cuda_arena_of(mine)[0].describe())
    source = open_cuda_arena(handles[1 - rank])
    found: dict[str, dict[str, float]] = {}
    wanted = source.view(torch.int64).sum()
    for name, run in all_ways(source, target).items():
        target.zero_()
        for _ in range(3):  # to compile, and to capture what is replayed
            run()
        assert torch.equal(target.view(torch.int64).sum(), wanted), f"{name} has not copied everything"
        alone = _measure(run, rank == 0)
        found[name] = {"alone": SIZE / alone[0]} if rank == 0 else {}
        both = _measure(run, True)
        found[name] |= {"both": SIZE / both[0], "enqueued": both[1]}
    _everywhere()  # nobody reads any more
    return found


def _measure(run: Callable[[], object], takes_part: bool) -> tuple[float, float]:
    """Seconds of one copy by the GPU's clock, and until it is enqueued. Of three in a row the middle one: where two
    ranks copy, the other is in the middle of its own."""
    copied, enqueued = [], []
    for _ in range(ROUNDS):
        _everywhere()
        if not takes_part:
            continue
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        run()
        marks[0].record()
        started = time.perf_counter()
        run()
        enqueued.append(time.perf_counter() - started)
        marks[1].record()
        run()
        torch.cuda.synchronize()
        copied.append(marks[0].elapsed_time(marks[1]) / 1e3)
    _everywhere()
    return (statistics.median(copied), min(enqueued)) if takes_part else (0.0, 0.0)


def _everywhere() -> None:
    """Both ranks have come here, and their GPUs are done."""
    torch.cuda.synchronize()
    dist.barrier()


def main() -> None:
    ranks = Ranks(OWN, "cuda")
    found = ranks.run(2, read_rates)
    ranks.close()
    if any("error" in part for part in found):
        sys.exit("\n".join(part.get("trace", part["error"]) for part in found if "error" in part))
    device = torch.cuda.get_device_name()
    lines = [
        "# Reading another GPU's memory",
        "",
        f"`python benchmarks/link_reads.py`, {datetime.date.today()}, 2 x {device}, torch {torch.__version__}; "
        f"{SIZE / 2**30:g} GiB, median of {ROUNDS}; with both at once, the slower one.",
        "",
        "| way | alone GB/s | both at once, GB/s each | host, to enqueue it |",
        "| --- | --- | --- | --- |",
    ]
    for name, first in found[0].items():
        both = min(part[name]["both"] for part in found)
        lines.append(f"| {name} | {first['alone'] / 1e9:.0f} | {both / 1e9:.0f} | {first['enqueued'] * 1e3:.2f} ms |")
    text = "\n".join(lines) + "\n"
    print(text)
    Path(__file__).with_name(f"link_reads_{device.split()[-1].lower()}x2.md").write_text(text)


if __name__ == "__main__":
    main()
