"""Every parallel layout learns what one rank learns: same losses, norms and log-probs over several optimizer steps.

Losses of the second rollout are of weights that the layout's own optimizer steps made, so they would show a gradient
that is wrong but small. Many layouts share one set of processes: starting Python costs more than they do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import run_ranks
from tests.tiny import make_checkpoint
from tests.unit.backends.megatron_utils.trainer_helpers import make_batch, processes, trainer

TP, PP, CP = (f"parallel.{x}_parallel_size" for x in ("tensor_model", "pipeline_model", "context"))
EP, ETP = "parallel.expert_model_parallel_size", "parallel.expert_tensor_parallel_size"
VPP, SP = "parallel.num_layers_per_virtual_pipeline_stage", "parallel.sequence_parallel"
DISTRIBUTED = {"parallel.use_distributed_optimizer": True}
OVERLAP = {"parallel.overlap_grad_reduce": True, "parallel.overlap_param_gather": True}
FULL_ROWS = {"train.use_dynamic_batch_size": True, "train.max_tokens_per_gpu": 50, "train.balance_data": True}
GROUPED = {"model.moe_grouped_gemm": True}
RECOMPUTE = {
    "train.recompute_granularity": "full",
    "train.recompute_method": "uniform",
    "train.recompute_num_layers": 1,
}
COMMON = {
    "optimizer.lr": 2e-3,  # small: Adam divides gradients near zero by their own size, which amplifies rounding
    "algorithm.use_kl_loss": True,
    "algorithm.kl_loss_coef": 0.1,
    "algorithm.kl_loss_type": "low_var_kl",
    "algorithm.entropy_coef": 0.01,
}

DENSE_2 = {
    "TP2": {TP: 2},
    "TP2 SP": {TP: 2, SP: True},
    "DP2": {},
    "DP2 full rows": FULL_ROWS,
    "PP2": {PP: 2},
    "PP2 interleaved": {PP: 2, VPP: 1},
    "CP2": {CP: 2},
    "CP2 full rows": {CP: 2, **FULL_ROWS},
    "DP2 distributed optimizer": DISTRIBUTED,
    "DP2 overlapped": {**DISTRIBUTED, **OVERLAP},
}
TIED_4 = {
    "TP2 PP2": {TP: 2, PP: 2, SP: True},
    "PP2 DP2": {PP: 2, **FULL_ROWS},
    "PP2 interleaved DP2": {PP: 2, VPP: 1, **DISTRIBUTED, **FULL_ROWS},
    "CP2 TP2": {CP: 2, TP: 2, SP: True},
    "CP2 PP2": {CP: 2, PP: 2},
    "DP2 CP2 distributed optimizer": {CP: 2, **DISTRIBUTED},
}
MOE_4 = {
    "one expert matrix product": GROUPED,
    "EP2 DP2": {EP: 2, **FULL_ROWS},
    "EP4 distributed optimizer, grouped": {EP: 4, **DISTRIBUTED, **GROUPED},
    "TP2 ETP1": {TP: 2, ETP: 1},
    "TP2 ETP2": {TP: 2, ETP: 2},
    "TP2 EP2 ETP1": {TP: 2, EP: 2, ETP: 1, **DISTRIBUTED},
    "TP2 EP2 ETP2": {TP: 2, EP: 2, **GROUPED},
    "TP2 PP2": {TP: 2, PP: 2},
    "TP2 PP2 ETP1 recomputed": {TP: 2, PP: 2, ETP: 1, **RECOMPUTE},
    "PP2 EP2": {PP: 2, EP: 2, **GROUPED},
    "CP2 EP2": {CP: 2, EP: 2},
    "allgather EP2": {EP: 2, "model.moe_token_dispatcher_type": "allgather"},
}


def learn(rank: int, path: str, layouts: dict[str, dict[str, Any]], common: dict[str, Any]) -> dict[str, Any]:
    results = {}
    for name, options in layouts.items():
        with trainer(rank, path, {**COMMON, **common, **options}) as built:
            results[name] = [built.train(rollout, make_batch(rollout)) for rollout in range(2)]
    return results


def check(path: str, world_size: int, layouts: dict[str, dict[str, Any]], common: dict[str, Any]) -> None:
    expected = run_ranks(1, learn, path, {"one rank": {}}, common, context=processes())[0]["one rank"]
    ranks = run_ranks(world_size, learn, path, layouts, common, timeout=280, context=processes())
    for name in layouts:
        for rank in ranks:
            assert rank[name] == ranks[0][name], f"{name}: ranks report different metrics"
        # fp32: the first rollout differs by summation order; Adam then amplifies that where gradients are near zero.
        for rollout, (ours, theirs) in enumerate(zip(ranks[0][name], expected, strict=True)):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5 if rollout == 0 else 1e-4), (name, rollout)


def test_dense_two_ranks(tmp_path: Path) -> None:
    # 509 tokens: the vocabulary is padded for TP2.
    check(make_checkpoint(tmp_path, "qwen3", num_hidden_layers=4, vocab_size=509), 2, DENSE_2, {})


def test_tied_four_ranks_two_steps_per_rollout(tmp_path: Path) -> None:
    common = {"train.global_batch_size": 4, "train.calculate_per_token_loss": True}
    check(make_checkpoint(tmp_path, "qwen3", tied=True, num_hidden_layers=4), 4, TIED_4, common)


def test_experts_four_ranks(tmp_path: Path) -> None:
    check(make_checkpoint(tmp_path, "qwen3_moe", num_hidden_layers=4, num_experts=8), 4, MOE_4, {})


def test_gspo_over_context_parallel_ranks(tmp_path: Path) -> None:
    """The ratio is of whole answers, so ranks that share an answer share its sum, in backward too."""
    common = {"algorithm.advantage_estimator": "gspo", "train.global_batch_size": 4}
    check(make_checkpoint(tmp_path, "qwen3"), 2, {"CP2": {CP: 2}}, common)
