"""Weight sync plans of models too large for this machine: how long they take to make, and what they would move.

    python benchmarks/plan_scale.py                    # all cases on one CPU core, about ten minutes
    python benchmarks/plan_scale.py --cases small      # a toy of seconds, which the tests run

Everything is the code of a real run except the weights: every trainer rank's shard map from vime.models.layout, merged
and sent as JSON; every worker's load plan by tracing vLLM's own load_weights on the meta device (meta_worker.py); both
composed; the copy kernel's table. The ranks' and workers' shares run one after the other in one process. Nothing is
copied: the seconds of a sync are predicted, from bandwidths measured elsewhere and named below.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import logging
import math
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before torch and vLLM are imported
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from meta_worker import EngineLayout, worker_model

from benchmarks.weight_sync import COMMON as DENSE
from vime.models.layout import ParallelLayout, checkpoint_tensors, parameter_shapes, pieces
from vime.models.spec import ModelSpec, spec_from_hf
from vime.types import Slot
from vime.weight_sync.copy_table import bind, find_runs
from vime.weight_sync.load_plan import LoadPlan, trace
from vime.weight_sync.program import CopyProgram, compose
from vime.weight_sync.remote import chunks, to_request
from vime.weight_sync.shard_map import RankInfo, ShardMap, TensorInfo, describe_rank, merge

COMMON = DENSE | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "tie_word_embeddings": False,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-235B-A22B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 94}
    | {"num_attention_heads": 64, "num_key_value_heads": 4, "moe_intermediate_size": 1536}
    | {"num_experts": 128, "vocab_size": 151936},
    "DeepSeek-V3's size": {"hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 60}
    | {"num_attention_heads": 128, "num_key_value_heads": 16, "moe_intermediate_size": 2048}
    | {"num_experts": 256, "vocab_size": 129280, "mlp_only_layers": [0, 1, 2]},
    "toy": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
    | {"num_key_value_heads": 2, "moe_intermediate_size": 128, "num_experts": 8, "vocab_size": 1000},
}
PAD = 256  # bytes between parameters' starts in the trainer's flat buffers

log = logging.getLogger("plan_scale")


@dataclass(frozen=True)
class Case:
    name: str
    model: str
    trainer: ParallelLayout
    engine: EngineLayout
    gpus_per_node: int = 8

    @property
    def engines(self) -> int:
        return self.trainer.world_size // self.engine.workers

    def slot(self, engine: int) -> Slot:
        return Slot(engine * self.engine.workers, (engine + 1) * self.engine.workers)

    def node(self, rank: int) -> str:
        return f"node-{rank // self.gpus_per_node}"


def cases() -> list[Case]:
    large = ParallelLayout(world_size=64, tp=4, pp=2, ep=8)
    huge = ParallelLayout(world_size=256, tp=8, pp=4, ep=32)
    found = [
        Case(name, model, trainer, engine)
        for name, model, trainer in (("235B", "Qwen3-235B-A22B", large), ("V3", "DeepSeek-V3's size", huge))
        for engine in (EngineLayout(8), EngineLayout(8, ep=True), EngineLayout(16), EngineLayout(8, dp=2, ep=True))
    ]
    toy = ParallelLayout(world_size=8, tp=2, pp=2, ep=2)
    return found + [
        Case("small", "toy", toy, engine, gpus_per_node=2)
        for engine in (EngineLayout(2), EngineLayout(2, dp=2, ep=True))
    ]


# ---------------------------------------------------------------------------------------------------- the trainer


@dataclass
class Trainer:
    """What all ranks of a trainer do when engines are connected, and how long it takes the slowest of them."""

    shards: ShardMap
    part_bytes: int  # JSON of all ranks' parts together: what the all-gather brings to every rank
    full_bytes: int  # JSON of the merged map
    seconds: dict[str, float]


def build_trainer(case: Case, spec: ModelSpec) -> Trainer:
    layout, shapes = case.trainer, checkpoint_tensors(spec)
    parts, seconds = [], defaultdict(float)
    for rank in range(layout.world_size):
        with clock(seconds, "describe"):
            held = pieces(spec, layout, rank)
            params, places, sizes = flat_buffers(spec, layout, rank)
            parts.append(json.dumps(describe_rank(rank_info(case, rank, sizes), places, shapes, held, params)))
    with clock(seconds, "merge"):
        shards = merge([json.loads(part) for part in parts], shapes)
    with clock(seconds, "encode"):
        full = json.dumps(shards.to_json())
    return Trainer(shards, sum(map(len, parts)), len(full), dict(seconds))


def flat_buffers(
    spec: ModelSpec, layout: ParallelLayout, rank: int
) -> tuple[dict[tuple[int, str], torch.Tensor], dict[tuple[int, str], tuple[int, int]], list[int]]:
    """Parameters without memory, their places as in Megatron's buffers (one for the dense ones, one for the experts',
    last layer first), and the buffers' sizes in bytes."""
    shapes = parameter_shapes(spec, layout, rank)
    params = {key: torch.empty(shape, dtype=torch.bfloat16, device="meta") for key, shape in shapes.items()}
    places, ends = {}, [0, 0]
    for key in reversed(shapes):
        buffer = int(".local_experts." in key[1])
        places[key] = (buffer, ends[buffer])
        ends[buffer] += -(-params[key].nbytes // PAD) * PAD
    return params, places, ends


def rank_info(case: Case, rank: int, sizes: list[int]) -> RankInfo:
    """Handles as long as real ones (a CUDA IPC handle is 64 bytes)."""
    handle = {"kind": "cuda_ipc", "pid": 100000 + rank, "device": f"GPU-{rank:032x}", "handle": f"{rank:0128x}"}
    stamp = {"kind": "memfd", "pid": 100000 + rank, "fd": 23, "inode": 1000000 + rank, "bytes": 4096}
    arenas = [handle | {"offset": 0, "bytes": size} for size in sizes]
    return RankInfo(rank, case.node(rank), handle["device"], stamp, arenas)


# ---------------------------------------------------------------------------------------------------- the engines


@dataclass
class Worker:
    """One worker's plan in figures: the copies out of memory on its node, and what ranks on other nodes send."""

    copies: int
    runs: int
    table_bytes: int
    left_to_torch: int
    chunks: int
    request_bytes: int  # what the senders are told, once
    read: dict[int, int]  # trainer rank -> bytes


@dataclass
class Result:
    case: Case
    spec: ModelSpec
    trainer: Trainer
    nearest_bytes: int = 0  # JSON that an engine is sent
    seconds: dict[str, float] = field(default_factory=dict)  # of the slower of engine 0's first and last worker
    workers: list[Worker] = field(default_factory=list)  # engine 0's first and last
    read: dict[int, dict[int, int]] = field(default_factory=dict)  # reader's trainer rank -> trainer rank -> bytes


def measure(case: Case, spec: ModelSpec, checkpoint: str, trainer: Trainer) -> Result:
    """The whole plan of engine 0's first and last worker; of all others only what is read from where."""
    result, size = Result(case, spec, trainer), case.engine.workers
    shards = send(case, trainer.shards, 0, result)
    sample = Sample.of(case, spec, trainer.shards)
    sampled = [sample.shards.nearest(case.slot(engine), case.node(engine * size)) for engine in range(case.engines)]
    for number in range(size):
        with worker_model(checkpoint, case.engine, number) as model:
            params = dict(model.named_parameters())
            thin = trace(params, sample.tensors, model.load_weights)
            whole = number in (0, size - 1)
            gc.disable()  # as a receiver does while it plans
            if whole:
                with clock(result.seconds, "trace"):
                    plan = trace(params, shards.tensors, model.load_weights)
                result.workers.append(plan_worker(case, usable(plan), shards, number, result))
        for engine, near in enumerate(sampled):  # the load plan is the same in every engine
            rank = engine * size + number
            result.read[rank] = sample.read(compose(thin, near, rank, case.node(rank)))
        gc.enable()
        if whole and result.read[number] != result.workers[-1].read:
            raise SystemExit(f"{case}: worker {number}: the sample of layers does not stand for all")
        log.info("%s, %s: worker %d of %d", case.name, case.engine, number + 1, size)
    return result


def usable(plan: LoadPlan) -> LoadPlan:
    if plan.problems or plan.unwritten:
        raise SystemExit(f"cannot be planned: {plan.problems or plan.unwritten}")
    return plan


def send(case: Case, shards: ShardMap, engine: int, result: Result) -> ShardMap:
    """The part of the map that an engine is sent, over there."""
    with clock(result.seconds, "nearest"):
        near = shards.nearest(case.slot(engine), case.node(engine * case.engine.workers))
        text = json.dumps(near.to_json())
    result.nearest_bytes = len(text)
    with clock(result.seconds, "decode"):
        return ShardMap.from_json(json.loads(text))


def plan_worker(case: Case, plan: LoadPlan, shards: ShardMap, rank: int, result: Result) -> Worker:
    with clock(result.seconds, "compose"):
        program = compose(plan, shards, rank, case.node(rank))
    near, far = program.split([other for other in shards.ranks if case.node(other) == case.node(rank)])
    with clock(result.seconds, "table"):
        runs, size, others = table_of(near, plan)
    with clock(result.seconds, "chunks"):
        parts = chunks(far)
        senders = {part.rank for part in parts}
        requests = [to_request([part for part in parts if part.rank == sender]) for sender in senders]
    told = sum(map(len, requests))
    return Worker(len(near.copies), runs, size, others, len(parts), told, program.bytes_by_rank())


def table_of(program: CopyProgram, plan: LoadPlan) -> tuple[int, int, int]:
    """(runs, bytes of the table on the GPU, copies that are left to torch), at addresses as allocators give them."""
    runs = find_runs(program)
    sources = [(number + 1) << 40 for number in range(len(runs.sources))]
    targets, end = [], 1 << 50
    for name in runs.params:
        targets.append(end)
        end += -(-torch.Size(plan.params[name].shape).numel() * plan.params[name].dtype.itemsize // 512) * 512
    batches, others = bind(runs, sources, targets, [plan.params[name].dtype for name in runs.params])
    size = sum(batch.runs.nbytes + batch.tiles().nbytes for batch in batches)
    return sum(len(batch.runs) for batch in batches), size, len(others)


@dataclass(frozen=True)
class Sample:
    """Tensors that stand for others, of which every rank and every worker holds the same boxes: one layer of each kind
    (with and without experts) of each model chunk, and of experts that stay together, the first. Planning 256 workers
    whole would take hours."""

    shards: ShardMap
    tensors: dict[str, TensorInfo]
    weights: dict[str, int]  # checkpoint tensor -> how many it stands for

    @staticmethod
    def of(case: Case, spec: ModelSpec, shards: ShardMap) -> Sample:
        layout, experts = case.trainer, spec.num_experts or 1
        together = math.gcd(experts // layout.ep, experts // case.engine.workers if case.engine.ep else experts)
        layers: dict[int, int] = {}
        for stage in range(layout.pp):
            for chunk in range(layout.vpp):
                kinds: dict[bool, int] = {}
                for layer in layout.layers(spec, stage, chunk):
                    first = kinds.setdefault(spec.moe_layers[layer], layer)
                    layers[first] = layers.get(first, 0) + 1
        weights = {}
        for name in shards.tensors:
            layer, expert = number_after("layers", name), number_after("experts", name)
            weight = layers.get(layer, 0) if layer is not None else 1
            if expert is not None:
                weight *= together if expert % together == 0 else 0
            if weight:
                weights[name] = weight
        numbers = [number for number, name in enumerate(shards.tensors) if name in weights]
        entries = shards.entries[np.isin(shards.entries[:, 0], numbers)]
        tensors = {name: info for name, info in shards.tensors.items() if name in weights}
        return Sample(dataclasses.replace(shards, entries=entries), tensors, weights)

    def read(self, program: CopyProgram) -> dict[int, int]:
        """Trainer rank -> bytes that the whole program reads from it."""
        found: dict[int, int] = defaultdict(int)
        for copy in program.copies:  # joined copies are of one parameter, so of one layer
            found[copy.source[0]] += copy.src_bytes * self.weights[copy.tensor]
        return dict(found)


def number_after(word: str, tensor: str) -> int | None:
    parts = tensor.split(".")
    return int(parts[parts.index(word) + 1]) if word in parts else None


@contextmanager
def clock(into: dict[str, float], name: str) -> Iterator[None]:
    """Keeps the longest. Seconds of this thread, which does all the work: whatever else runs here does not count."""
    started = time.thread_time()
    yield
    into[name] = max(into.get(name, 0.0), time.thread_time() - started)


def main() -> None:
    from plan_report import report

    known = cases()
    names = list(dict.fromkeys(case.name for case in known))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=[name for name in names if name != "small"], choices=names)
    parser.add_argument("--out", type=Path, default=None, help="write the report there as well")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.set_num_threads(1)
    results: list[Result] = []
    for name in options.cases:
        chosen = [case for case in known if case.name == name]
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(COMMON | MODELS[chosen[0].model]))
            spec = spec_from_hf(folder)
            if problems := chosen[0].trainer.validate(spec):
                raise SystemExit(f"{chosen[0]}: {problems}")
            trainer = build_trainer(chosen[0], spec)
            log.info("%s: %d boxes on %d ranks", name, len(trainer.shards.entries), len(trainer.shards.ranks))
            for case in chosen:
                results.append(measure(case, spec, folder, trainer))
                if options.out is not None:
                    options.out.write_text(report(results))
    print(report(results))


if __name__ == "__main__":
    main()
