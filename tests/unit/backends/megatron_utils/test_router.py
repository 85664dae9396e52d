"""The auxiliary loss has one rank's gradients in every layout, and they are those of its definition."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import run_ranks
from tests.tiny import make_checkpoint
from tests.unit.backends.megatron_utils.trainer_helpers import LENGTHS, hf_model, make_batch, trainer

TP, PP, CP = (f"parallel.{x}_parallel_size" for x in ("tensor_model", "pipeline_model", "context"))
EP, ETP = "parallel.expert_model_parallel_size", "parallel.expert_tensor_parallel_size"
COEFFICIENT = 0.5
AUXILIARY = {
    "model.moe_router_load_balancing_type": "aux_loss",
    "model.moe_aux_loss_coeff": COEFFICIENT,
    "train.micro_batch_size": 1,  # rows are the same answers in every layout; their lengths fit no round number
    "optimizer.clip_grad": 0.0,
    "optimizer.lr": 1e-3,
}
DISTRIBUTED = {"parallel.use_distributed_optimizer": True}
TWO = {
    "DP2": {},
    "DP2 distributed optimizer": DISTRIBUTED,
    "TP2 ETP1": {TP: 2, ETP: 1},
    "TP2 ETP2": {TP: 2, ETP: 2},
    "CP2": {CP: 2},
    "EP2": {EP: 2},
    "EP2 allgather": {EP: 2, "model.moe_token_dispatcher_type": "allgather"},
    "PP2": {PP: 2},
    "one sequence a row": {"model.moe_router_load_balancing_type": "seq_aux_loss", CP: 2},
}
FOUR = {
    "TP2 CP2": {TP: 2, CP: 2, ETP: 1},
    "TP2 PP2": {TP: 2, PP: 2, ETP: 1},  # the last stage cuts the padding mask itself
    "CP2 EP2 distributed optimizer": {CP: 2, EP: 2, **DISTRIBUTED},
    "DP4 with rows of padding": {"train.global_batch_size": 2},
}


def learn(rank: int, path: str, layouts: dict[str, dict[str, Any]]) -> dict[str, list[float]]:
    """Gradient norms of two rollouts without any other gradient: equal rewards are advantages of zero."""
    results = {}
    for name, options in layouts.items():
        with trainer(rank, path, {**AUXILIARY, **options}) as built:
            batches = [dataclasses.replace(make_batch(seed), rewards=[1.0] * 8) for seed in range(2)]
            results[name] = [built.train(seed, batch)["train/grad_norm"] for seed, batch in enumerate(batches)]
    return results


def check(path: str, world_size: int, layouts: dict[str, dict[str, Any]]) -> None:
    alone = {"one rank": {}, "two answers a step": {"train.global_batch_size": 2}}
    expected = run_ranks(1, learn, path, alone)[0]
    found = run_ranks(world_size, learn, path, layouts, timeout=280)[0]
    for name, norms in found.items():
        theirs = expected["two answers a step" if "train.global_batch_size" in layouts[name] else "one rank"]
        assert theirs[0] > 0.01
        # fp32 sums in another order: 1e-5. The second rollout's weights are those that this layout's gradients made,
        # and Adam amplifies rounding where gradients are near zero.
        assert norms[0] == pytest.approx(theirs[0], rel=1e-5), name
        assert norms[1] == pytest.approx(theirs[1], rel=1e-4), name


def test_two_ranks(tmp_path: Path) -> None:
    check(make_checkpoint(tmp_path, "qwen3_moe"), 2, TWO)


def test_four_ranks(tmp_path: Path) -> None:
    check(make_checkpoint(tmp_path, "qwen3_moe", num_experts=8), 4, FOUR)


def test_one_rank_computes_the_definition(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3_moe")
    model = hf_model(path)
    batch = make_batch()
    loss = torch.zeros(())
    for tokens in batch.tokens:
        for logits in model(torch.tensor([tokens]), output_router_logits=True).router_logits:
            p = logits.float().softmax(-1)
            chosen = torch.zeros_like(p).scatter(1, p.topk(2).indices, 1.0)
            loss = loss + COEFFICIENT * 4 * (chosen.mean(0) / 2 * p.mean(0)).sum() * len(tokens) / sum(LENGTHS)
    loss.backward()
    squares = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
    assert run_ranks(1, learn, path, {"one rank": {}})[0]["one rank"][0] == pytest.approx(
        float(torch.stack(squares).sum().sqrt()), rel=1e-4
    )
