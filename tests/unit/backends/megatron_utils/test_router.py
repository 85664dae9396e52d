"""The auxiliary loss has one rank's gradients in every layout, parameter by parameter, and they are those of its
definition."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed import run_ranks
from tests.tiny import make_checkpoint
from tests.unit.backends.megatron_utils.trainer_helpers import LENGTHS, hf_model, make_batch, processes, trainer
from vime.models.layout import Piece, checkpoint_tensors, pieces
from vime.models.spec import spec_from_hf

TP, PP, CP = (f"parallel.{x}_parallel_size" for x in ("tensor_model", "pipeline_model", "context"))
EP, ETP = "parallel.expert_model_parallel_size", "parallel.expert_tensor_parallel_size"
COEFFICIENT = 0.5
# Adam with an epsilon far above all gradients moves each weight by nearly its gradient: the weights after a step show
# every gradient, whichever rank holds it, and where one is near zero its rounding is not magnified.
RATE, EPSILON = 8.0, 4.0
AUXILIARY = {
    "model.moe_router_load_balancing_type": "aux_loss",
    "model.moe_aux_loss_coeff": COEFFICIENT,
    "train.micro_batch_size": 1,  # rows are the same answers in every layout; their lengths fit no round number
    "optimizer.clip_grad": 0.0,
    "optimizer.lr": RATE,
    "optimizer.adam_eps": EPSILON,
}
DISTRIBUTED = {"parallel.use_distributed_optimizer": True}
RECOMPUTE = {
    "train.recompute_granularity": "full",
    "train.recompute_method": "uniform",
    "train.recompute_num_layers": 1,
}
TWO_ANSWERS = {"train.global_batch_size": 2}
ALONE = {"a rollout a step": {}, "two answers a step": TWO_ANSWERS}
TWO = {
    "DP2": {},
    "DP2 distributed optimizer": DISTRIBUTED,
    "TP2 ETP1": {TP: 2, ETP: 1},
    "TP2 ETP2, recomputed": {TP: 2, ETP: 2, **RECOMPUTE},
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
    "DP4 with rows of padding": TWO_ANSWERS,
}


Learned = list[tuple[float, dict[str, torch.Tensor]]]  # per rollout the gradient norm and all tensors


@dataclasses.dataclass(frozen=True)
class Model:
    path: str

    @property
    def before(self) -> dict[str, torch.Tensor]:
        return load_file(f"{self.path}/model.safetensors")

    @property
    def alone(self) -> dict[str, Learned]:
        """By the name in ``ALONE`` what one rank learned."""
        return torch.load(f"{self.path}/alone.pt")


def learn(rank: int, path: str, options: dict[str, Any]) -> Iterator[tuple[float, list[tuple[Piece, torch.Tensor]]]]:
    """After each of two rollouts the gradient norm and the rank's pieces of the tensors. There is no other gradient:
    equal rewards are advantages of zero."""
    with trainer(rank, path, {**AUXILIARY, **options}) as built:
        held = pieces(built.spec, built.layout, rank)
        for rollout in range(2):
            batch = dataclasses.replace(make_batch(rollout), rewards=[1.0] * 8)
            norm = built.train(rollout, batch)["train/grad_norm"]
            data = built._data()
            yield norm, [(piece, piece.view(data[piece.chunk, piece.param])) for piece in held]


def learn_alone(rank: int, models: list[Model]) -> None:
    for model in models:
        shapes = checkpoint_tensors(spec_from_hf(model.path))
        learned: dict[str, Learned] = {name: [] for name in ALONE}
        for name, options in ALONE.items():
            for norm, parts in learn(rank, model.path, options):
                tensors = {tensor: torch.full(shape, torch.nan) for tensor, shape in shapes.items()}
                for piece, part in parts:
                    tensors[piece.tensor][piece.slices] = part
                learned[name].append((norm, tensors))
        torch.save(learned, f"{model.path}/alone.pt")


def distances(rank: int, model: Model, layouts: dict[str, dict[str, Any]]) -> dict[str, list[tuple[float, ...]]]:
    """Per layout and rollout, how far this rank is from what one rank learned: the gradient norm, and its pieces of
    the tensor that is furthest, relative to the tensor's largest change."""
    before, alone = model.before, model.alone
    found: dict[str, list[tuple[float, ...]]] = {}
    for name, options in layouts.items():
        expected = alone["two answers a step" if options == TWO_ANSWERS else "a rollout a step"]
        found[name] = []
        for (norm, parts), (right, tensors) in zip(learn(rank, model.path, options), expected, strict=True):
            furthest = max(
                relative(part, tensors[piece.tensor][piece.slices], tensors[piece.tensor] - before[piece.tensor])
                for piece, part in parts
            )
            found[name].append((abs(norm / right - 1), furthest))
    return found


def relative(found: torch.Tensor, expected: torch.Tensor, change: torch.Tensor) -> float:
    error = float((found - expected).abs().max())
    return error / float(change.abs().max()) if error else 0.0  # some tensors have no gradient at all


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Model]:
    """Of four and of eight experts, and what one rank makes of each."""
    folder = tmp_path_factory.mktemp("models")
    made = [Model(make_checkpoint(folder / str(n), "qwen3_moe", num_experts=n)) for n in (4, 8)]
    run_ranks(1, learn_alone, made, context=processes())
    return made


def check(model: Model, world_size: int, layouts: dict[str, dict[str, Any]]) -> None:
    for rank, found in enumerate(run_ranks(world_size, distances, model, layouts, timeout=280, context=processes())):
        for name, rollouts in found.items():
            for norm, weights in rollouts:
                assert norm < 1e-5, (name, rank)  # fp32 sums in another order
                # Changes are a hundredth of the weights, which are rounded.
                assert weights < 1e-4, (name, rank)


def test_two_ranks(models: list[Model]) -> None:
    check(models[0], 2, TWO)


def test_four_ranks(models: list[Model]) -> None:
    check(models[1], 4, FOUR)


def test_one_rank_computes_the_definition(models: list[Model], tmp_path: Path) -> None:
    model, batch = hf_model(models[0].path), make_batch()
    loss = torch.zeros(())
    for tokens in batch.tokens:
        for logits in model(torch.tensor([tokens]), output_router_logits=True).router_logits:
            p = logits.float().softmax(-1)
            chosen = torch.zeros_like(p).scatter(1, p.topk(2).indices, 1.0)
            loss = loss + COEFFICIENT * 4 * (chosen.mean(0) / 2 * p.mean(0)).sum() * len(tokens) / sum(LENGTHS)
    loss.backward()
    gradients = [(p, p.grad) for p in model.parameters() if p.grad is not None]
    norm, tensors = models[0].alone["a rollout a step"][0]
    assert norm == pytest.approx(
        float(torch.stack([g.double().square().sum() for _, g in gradients]).sum().sqrt()), 1e-5
    )
    with torch.no_grad():
        for parameter, gradient in gradients:
            parameter -= RATE * gradient / (gradient.abs() + EPSILON)
    model.save_pretrained(tmp_path)  # in memory its experts have other names and shapes than in the checkpoint
    before, expected = models[0].before, load_file(tmp_path / "model.safetensors")
    assert expected.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert relative(tensor, expected[name], expected[name] - before[name]) < 1e-4, name
    assert max(float((expected[name] - before[name]).abs().max()) for name in before) > 0.1
