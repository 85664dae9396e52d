"""--overlap-param-gather computes what the same layout computes without it, bit for bit, with several buckets a model.

Megatron cuts parameters into buckets of 40 million; here of a few thousand, so that a tiny model has many.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from tests.distributed import run_ranks
from tests.tiny import make_checkpoint
from tests.unit.backends.megatron_utils.trainer_helpers import make_batch, processes, trainer

TP, PP = "parallel.tensor_model_parallel_size", "parallel.pipeline_model_parallel_size"
EP, ETP = "parallel.expert_model_parallel_size", "parallel.expert_tensor_parallel_size"
GROUPED = {"model.moe_grouped_gemm": True}
RECOMPUTE = {
    "train.recompute_granularity": "full",
    "train.recompute_method": "uniform",
    "train.recompute_num_layers": 1,
}
COMMON = {
    "parallel.use_distributed_optimizer": True,
    "parallel.overlap_grad_reduce": True,
    "train.global_batch_size": 4,  # two optimizer steps a rollout: the second one's forward waits for the first's
    "algorithm.use_kl_loss": True,  # reference weights come and go between the steps
    "algorithm.kl_loss_coef": 0.1,
}
DENSE = {
    "untied": {},
    "untied, dropout": {"model.hidden_dropout": 0.1},  # its log-probs are a pass of their own
    "recomputed": RECOMPUTE,
    "one step a rollout": {"train.global_batch_size": None},
}
MOE = {
    "expert data parallel size 4, grouped": GROUPED,
    "expert data parallel size 4": {},
    "EP2, grouped": {EP: 2, **GROUPED},
    "EP2, grouped, recomputed": {EP: 2, **GROUPED, **RECOMPUTE},
    "TP2 ETP1, grouped": {TP: 2, ETP: 1, **GROUPED},
    "PP2, grouped": {PP: 2, **GROUPED},
    "PP2 interleaved, grouped": {PP: 2, "parallel.num_layers_per_virtual_pipeline_stage": 1, **GROUPED},
}


def learn(rank: int, path: str, layouts: dict[str, dict[str, Any]], overlap: bool) -> dict[str, Any]:
    """Per layout the metrics and all weights, as the engines would read them, after each rollout."""
    from vime.backends.megatron_utils import optimizer

    options = optimizer.DistributedDataParallelConfig
    optimizer.DistributedDataParallelConfig = functools.partial(options, bucket_size=5000)  # type: ignore[misc, assignment]  # pyright: ignore[reportAttributeAccessIssue]
    results: dict[str, Any] = {}
    for name, layout in layouts.items():
        with trainer(rank, path, {**COMMON, "parallel.overlap_param_gather": overlap, **layout}) as built:
            assert rank or len(built.ddp[0].bucket_groups) > 2  # Megatron gives later stages one bucket each
            results[name] = []
            for rollout in range(2):
                metrics = built.train(rollout, make_batch(rollout))
                weights = {key: value.double().sum().item() for key, value in built._data().items()}
                results[name].append((metrics, weights))
    return results


def check(path: str, world_size: int, layouts: dict[str, dict[str, Any]]) -> None:
    plain = run_ranks(world_size, learn, path, layouts, False, timeout=280, context=processes())
    overlapped = run_ranks(world_size, learn, path, layouts, True, timeout=280, context=processes())
    for name in layouts:
        for rank in range(world_size):
            assert overlapped[rank][name] == plain[rank][name], (name, rank)


def test_dense(tmp_path: Path) -> None:
    check(make_checkpoint(tmp_path, "qwen3"), 2, DENSE)


def test_tied(tmp_path: Path) -> None:
    check(make_checkpoint(tmp_path, "llama", tied=True), 4, {"DP4": {}, "PP2": {PP: 2}, "TP2": {TP: 2}})


def test_experts(tmp_path: Path) -> None:
    check(make_checkpoint(tmp_path, "qwen3_moe"), 4, MOE)
