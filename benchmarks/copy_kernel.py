"""The copy kernel alone: shapes of runs, one way bandwidth, and what the checks cost, beside torch's own device copy.

    python benchmarks/copy_kernel.py            # one GPU, ten seconds, 16 GiB

Half rows: a tensor parallel slice of rows twice as long. Needs Triton; under TRITON_INTERPRET=1 it runs on a CPU, very
slowly (``--mib 1``).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from vime.weight_sync.copy_triton import TritonCopier
from vime.weight_sync.program import Copy, CopyProgram

BF16 = torch.bfloat16


def cases(size: int) -> dict[str, tuple[CopyProgram, int]]:
    """Name -> program and bytes it reads. ``size``: bytes of either memory."""

    def one(number: int, offset: int, shape, source, target, at: int = 0, dtype: torch.dtype = BF16) -> Copy:
        return Copy((0, 0), offset, dtype, source, "p", at, target, shape, f"t{number}")

    def half(row: int, into: bool) -> tuple[CopyProgram, int]:
        rows, width = size // (2 * row), row // 2
        strides = ((width, 1), (2 * width, 1)) if into else ((2 * width, 1), (width, 1))
        return CopyProgram([one(0, 0, (rows, width), *strides)], []), rows * row

    piece = min(3 << 20, size)
    count = size // piece
    pieces = [one(i, i * piece, (piece // 2,), (1,), (1,), (i * 7919 % count) * piece // 2) for i in range(count)]
    found = {
        "one run": (CopyProgram([one(0, 0, (size // 2,), (1,), (1,))], []), size),
        "runs of 3 MiB in another order": (CopyProgram(pieces, []), count * piece),
    }
    for row in (256, 768, 1536, 4096, 8192):
        found[f"from half rows, {row} B"] = half(row, False)
    for row in (1536, 8192):
        found[f"into half rows, {row} B"] = half(row, True)
    found["8-byte units (source 8 B off)"] = (CopyProgram([one(0, 8, (size // 4,), (1,), (1,))], []), size // 2)
    found["2-byte units (source 2 B off)"] = (CopyProgram([one(0, 2, (size // 16,), (1,), (1,))], []), size // 8)
    found["float32 to bfloat16"] = (
        CopyProgram([one(0, 0, (size // 4,), (1,), (1,), dtype=torch.float32)], []),
        size,
    )
    return found


def timed(run: Callable[[], object], device: str, rounds: int = 7) -> float:
    """Seconds, median, by the device's clock."""
    times = []
    for _ in range(rounds + 2):
        if device == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        else:
            started = time.perf_counter()
            run()
            times.append(time.perf_counter() - started)
    return sorted(times[2:])[rounds // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=8192, help="size of source and destination")
    options = parser.parse_args()
    device, size = "cuda" if torch.cuda.is_available() else "cpu", options.mib << 20
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    plain = timed(lambda: target.copy_(source), device)
    print("| | copy | TB/s one way | sampled check | full check |\n| --- | --- | --- | --- | --- |")
    print(f"| torch's copy of {size >> 20} MiB | {plain * 1e3:.3f} ms | {size / plain / 1e12:.2f} | | |")
    for name, (program, read) in cases(size).items():
        copier = TritonCopier(program)
        copier.bind({(0, 0): source}, {"p": target.view(BF16)})
        copy = timed(copier.run, device)
        checks = [timed(lambda c=copier, m=mode: c.check(m, 3), device) for mode in ("sampled", "full")]
        assert not copier.check("full", 0)()
        sampled, full = (f"{check * 1e3:.3f} ms, {check / copy:.1%}" for check in checks)
        print(f"| {name} | {copy * 1e3:.3f} ms | {read / copy / 1e12:.2f} | {sampled} | {full} |")


if __name__ == "__main__":
    main()
