"""Many weight updates of a real engine by two trainer ranks: what memory and descriptors do meanwhile, on both sides.

``python -m tests.unit.backends.vllm_utils.endurance`` prints the tables of benchmarks/sync_endurance.md; with
``--device cuda`` those of a GPU, on which both ranks and the engine then are, with random weights of Qwen3-0.6B.
"""

from __future__ import annotations

import argparse
import datetime
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.weight_sync import gpu_ids, make_config, make_parameters, write_checkpoint
from tests.distributed import run_ranks
from tests.engine import start_engine
from vime.backends.megatron_utils.hf_weights import load_hf_weights
from vime.backends.megatron_utils.update_weight.update_weight_from_tensor import UpdateWeightFromTensor
from vime.backends.vllm_utils.command import engine_command
from vime.backends.vllm_utils.engine import EngineProcess
from vime.config import CheckpointOptions, Config, RolloutOptions, WeightSyncOptions
from vime.models.layout import ParallelLayout, parameter_shapes, pieces
from vime.models.spec import ModelSpec, spec_from_hf
from vime.types import EngineAddress
from vime.weight_sync.arena import allocate

LAYOUT = ParallelLayout(world_size=2, tp=2)
GPU = "the GPU's memory, of all processes"
SAMPLES = 20  # looks at all processes, evenly spread


@dataclass(frozen=True)
class Sample:
    """One look at one process. Bytes of its own (unique set size) and with its part of what it shares (proportional),
    open descriptors, mapped arenas."""

    uss: int
    pss: int
    descriptors: int
    arenas: int


Samples = dict[str, list[Sample]]  # by the process's name


def look(process: psutil.Process) -> Sample:
    memory = process.memory_full_info()
    maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    return Sample(memory.uss, memory.pss, process.num_fds(), sum("/memfd:vime" in line for line in maps))


def endure(
    address: EngineAddress, engine_pids: Sequence[int], checkpoint: str, syncs: int, transport: str, device: str = "cpu"
) -> Any:
    """Update an engine ``syncs`` times, with other weights each time.

    Returns:
        Samples of every trainer rank and every process of the engine, and of the GPU; the seconds of the updates alone.
    """
    pids = {f"engine: {_role(pid)}": pid for pid in engine_pids}
    return run_ranks(LAYOUT.world_size, _endure, address, pids, checkpoint, syncs, transport, device, timeout=1800)[0]


def _role(pid: int) -> str:
    line = " ".join(psutil.Process(pid).cmdline())
    marks = {"--supervisor": "API server", "launcher": "supervisor", "resource_tracker": "resource tracker"}
    return next((role for mark, role in marks.items() if mark in line), f"EngineCore or worker {pid}")


def _weights(spec: ModelSpec, checkpoint: str, rank: int, device: str) -> dict[tuple[int, str], torch.Tensor]:
    if device == "cuda":
        torch.manual_seed(1)  # both ranks hold the same of what both hold
        return make_parameters(spec, LAYOUT, device, rank)
    shapes = parameter_shapes(spec, LAYOUT, rank)
    flat, end = allocate(4 * sum(torch.Size(shape).numel() for shape in shapes.values())), 0
    params: dict[tuple[int, str], torch.Tensor] = {}
    for key, shape in shapes.items():
        count = 4 * torch.Size(shape).numel()
        params[key] = flat[end : end + count].view(torch.float32).view(shape)
        end += count
    load_hf_weights(checkpoint, params, pieces(spec, LAYOUT, rank))
    return params


def _endure(
    rank: int,
    address: EngineAddress,
    engine: dict[str, int],
    checkpoint: str,
    syncs: int,
    transport: str,
    device: str,
) -> tuple[Samples, float]:
    spec = spec_from_hf(checkpoint)
    config = Config(
        checkpoint=CheckpointOptions(hf_checkpoint=checkpoint),
        rollout=RolloutOptions(rollout_batch_size=1),
        weight_sync=WeightSyncOptions(update_weight_transport=transport, weight_update_timeout=60.0),
    )
    params = _weights(spec, checkpoint, rank, device)
    update = UpdateWeightFromTensor(config, spec, LAYOUT, rank, params, device)
    update.connect_rollout_engines([address])
    update.update_weights(0)

    trainer: list[Any] = [None] * LAYOUT.world_size
    torch.distributed.all_gather_object(trainer, os.getpid())
    processes = {f"trainer rank {number}": pid for number, pid in enumerate(trainer)} | engine
    watched = {name: psutil.Process(pid) for name, pid in processes.items()}
    samples: Samples = {name: [] for name in [*processes, *([GPU] if device == "cuda" else [])]}
    seconds = 0.0
    for version in range(1, syncs + 1):
        for param in params.values():
            param.neg_()
        started = time.perf_counter()
        update.update_weights(version)
        seconds += time.perf_counter() - started
        if version % (syncs // SAMPLES) == 0:
            torch.distributed.barrier()
            if rank == 0:
                for name, process in watched.items():
                    samples[name].append(look(process))
                if device == "cuda":
                    free, total = torch.cuda.mem_get_info()
                    samples[GPU].append(Sample(total - free, total - free, 0, 0))
            torch.distributed.barrier()
    return samples, seconds


def halves(samples: list[Sample], of: str, pick: Callable[[list[int]], int] = max) -> tuple[int, int]:
    """The most of something in the first half of the samples, and in the second. The first fifth is left out: caches
    and allocators fill."""
    values = [getattr(sample, of) for sample in samples]
    middle = len(values) // 2
    return pick(values[len(values) // 5 : middle]), pick(values[middle:])


def table(samples: Samples) -> str:
    rows = [
        "| process | own memory (USS), MiB: 1st half, 2nd half | PSS, MiB | descriptors | arenas mapped |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, found in samples.items():
        uss, pss = ([f"{value / 2**20:.1f}" for value in halves(found, of)] for of in ("uss", "pss"))
        counts = [", ".join(map(str, halves(found, of))) for of in ("descriptors", "arenas")]
        rows.append(f"| {name} | {uss[0]}, {uss[1]} | {pss[0]}, {pss[1]} | {counts[0]} | {counts[1]} |")
    return "\n".join(rows)


@contextmanager
def _engine(device: str, folder: Path) -> Iterator[tuple[EngineProcess, str]]:
    """A running engine, and its checkpoint: tiny on a CPU."""
    if device == "cpu":
        tiny = start_engine(folder)
        process, checkpoint = tiny.process, tiny.checkpoint
        tiny.client.close()
    else:
        checkpoint = write_checkpoint("0.6B", folder / "checkpoint", device)
        config = make_config(checkpoint, device, None)
        command = engine_command(config, spec_from_hf(checkpoint), 0, device=device, gpu_ids=gpu_ids(device))
        process = EngineProcess(command, folder / "engine.log")
        process.start()
    try:
        process.wait_ready(600)
        yield process, checkpoint
    finally:
        process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--syncs", type=int, default=1000)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    syncs, device = options.syncs, options.device
    print("# Many weight updates\n", flush=True)
    with tempfile.TemporaryDirectory() as folder, _engine(device, Path(folder)) as (process, checkpoint):
        for transport in ("planned", "bucketed"):
            address = EngineAddress(0, process.url, 1, None)
            samples, seconds = endure(address, process.pids(), checkpoint, syncs, transport, device)
            day = datetime.date.today().isoformat()
            print(f"{transport}, {syncs} updates of {1e3 * seconds / syncs:.0f} ms, {day}\n\n{table(samples)}\n")


if __name__ == "__main__":
    main()
