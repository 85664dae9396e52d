"""A small rollout, options for a trainer, and a plain transformers model as the independent source of numbers."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext
from typing import Any

import torch

from vime.config import CheckpointOptions, ClusterOptions, Config, RolloutOptions
from vime.models.spec import spec_from_hf
from vime.types import TrainBatch

LENGTHS = [12, 20, 9, 31, 17, 40, 25, 14]
RESPONSES = [7, 11, 5, 23, 3, 30, 20, 6]


def make_batch(seed: int = 0, vocab: int = 500) -> TrainBatch:
    """Eight answers to four prompts, of lengths that fit no round number; one answer has masked tokens inside."""
    generator = torch.Generator().manual_seed(seed)
    masks = [[1] * n for n in RESPONSES]
    masks[1][2:5] = [0, 0, 0]
    return TrainBatch(
        tokens=[torch.randint(3, vocab, (n,), generator=generator).tolist() for n in LENGTHS],
        response_lengths=list(RESPONSES),
        loss_masks=masks,
        rewards=[1.0, 0.0, 0.5, -1.0, 2.0, 0.0, 1.0, 0.25],
        group_ids=[0, 0, 1, 1, 2, 2, 3, 3],
        rollout_log_probs=[(-5 + torch.randn(n, generator=generator)).tolist() for n in RESPONSES],
    )


def make_config(path: str, world_size: int, options: dict[str, Any]) -> Config:
    """``options``: "topic.name" -> value, on top of a learning rate that changes the weights visibly."""
    config = Config(
        checkpoint=CheckpointOptions(hf_checkpoint=path),
        rollout=RolloutOptions(rollout_batch_size=4, n_samples_per_prompt=2, num_rollout=3),
        cluster=ClusterOptions(actor_num_gpus_per_node=world_size, device="cpu"),
    )
    config.optimizer.lr = 1e-2
    config.train.micro_batch_size = 2
    config.train.train_timeout = 90
    for name, value in options.items():
        topic, field = name.split(".")
        assert hasattr(getattr(config, topic), field), name
        setattr(getattr(config, topic), field, value)
    return config


@contextmanager
def trainer(rank: int, path: str, options: dict[str, Any] | None = None) -> Iterator[Any]:
    """A MegatronTrainer in the process group that is there; several may follow one another in it."""
    from vime.backends.megatron_utils.trainer import MegatronTrainer

    world_size = torch.distributed.get_world_size()
    config = make_config(path, world_size, options or {})
    built = MegatronTrainer(config, spec_from_hf(path), rank=rank, world_size=world_size)
    try:
        yield built
    finally:
        built.close()


def hf_model(path: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").train()


def hf_log_probs(model: Any, batch: TrainBatch, temperature: float = 1.0) -> tuple[list[Any], list[Any]]:
    """Per answer the log-probs of its response tokens and the entropies there, each answer run alone."""
    log_probs, entropies = [], []
    for tokens, response in zip(batch.tokens, batch.response_lengths, strict=True):
        logits = model(torch.tensor([tokens])).logits[0, -response - 1 : -1] / temperature
        log_p = logits.log_softmax(-1)
        log_probs.append(log_p.gather(1, torch.tensor(tokens[-response:])[:, None])[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    return log_probs, entropies


def grad_norm(model: Any) -> float:
    return float(torch.stack([p.grad.double().square().sum() for p in model.parameters()]).sum().sqrt())


def processes() -> ForkServerContext:
    """Where ranks come from: forks of a process that has imported torch and Megatron, 0.1 s each instead of seconds."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([__name__, "vime.backends.megatron_utils.trainer"])
    return context
