"""Losses over the response tokens of a micro-batch, and how they are averaged.

Averages are over an optimizer step, not over a micro-batch: :func:`token_weights` gives every response token of the
step its weight once, on every rank alike, and a loss is the weighted sum over whatever tokens a micro-batch holds. So
the result does not depend on data or context parallel sizes or on how micro-batches are cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vime.algorithms import (
    clipped_surrogate,
    kl_estimate,
    policy_loss,
    sequence_log_ratio,
    truncated_importance_weights,
)
from vime.config import Config


@dataclass
class ResponseTokens:
    """A rollout's response tokens as flat vectors [response tokens], answers in the batch's order, on the device."""

    loss_mask: Tensor  # float32, 0 or 1
    weights: Tensor  # float32, from token_weights
    advantages: Tensor | None = None
    old_log_probs: Tensor | None = None  # None: those of this very forward pass (the first step after generation)
    ref_log_probs: Tensor | None = None
    rollout_log_probs: Tensor | None = None  # the engine's


def token_weights(loss_masks: Sequence[Sequence[int]], per_token: bool) -> list[list[float]]:
    """Weight of every response token of one optimizer step; they add up to one (less answers that have no token).

    Args:
        loss_masks: per answer of the step, 0 or 1 per response token.
        per_token: average over all tokens (--calculate-per-token-loss). Otherwise over each answer's tokens first and
            then over answers, so that long answers weigh no more than short ones.
    """
    counts = [sum(mask) for mask in loss_masks]
    total, answers = max(1, sum(counts)), len(loss_masks)
    shares = [1 / total if per_token else 1 / (answers * max(1, count)) for count in counts]
    return [[share * m for m in mask] for share, mask in zip(shares, loss_masks, strict=True)]


def metric_names(config: Config, data: ResponseTokens) -> list[str]:
    """What :func:`learning_loss` sums, in one order on every rank, whether it computes losses or not."""
    if config.train.loss_type == "sft_loss":
        return ["loss", "entropy"]
    names = ["loss", "pg_loss", "entropy", "clip_fraction", "ppo_kl"]
    if data.ref_log_probs is not None:
        names.append("kl")
    if config.algorithm.use_tis and data.rollout_log_probs is not None:
        names += ["tis_clip_fraction", "tis_weight"]
    return names


def learning_loss(
    config: Config,
    data: ResponseTokens,
    slots: Tensor,
    lengths: Sequence[int],
    log_probs: Tensor,
    entropy: Tensor,
    cp_group: dist.ProcessGroup | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """--loss-type policy_loss or sft_loss of one micro-batch.

    Args:
        slots: int64 [n], which response tokens these are.
        lengths: how many of them belong to each answer.
        log_probs, entropy: fp32 [n], with gradients.
        cp_group: the ranks that share these answers, if there are several.

    Returns:
        (loss, sums): this micro-batch's part of the step's loss, a scalar; and its part of each metric.
    """
    weights = data.weights[slots]
    if config.train.loss_type == "sft_loss":
        loss = -(weights * log_probs).sum()
        return loss, {"loss": loss.detach(), "entropy": (weights * entropy.detach()).sum()}
    return _policy_loss(config, data, slots, lengths, log_probs, entropy, weights, cp_group)


def _policy_loss(
    config: Config,
    data: ResponseTokens,
    slots: Tensor,
    lengths: Sequence[int],
    log_probs: Tensor,
    entropy: Tensor,
    weights: Tensor,
    cp_group: dist.ProcessGroup | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    options = config.algorithm
    assert data.advantages is not None
    mask, advantages = data.loss_mask[slots], data.advantages[slots]
    old = log_probs.detach() if data.old_log_probs is None else data.old_log_probs[slots]
    clip = (options.eps_clip, options.eps_clip_high, options.eps_clip_c)
    if options.advantage_estimator == "gspo" and lengths:
        reduce = None if cp_group is None else lambda sums: SumOverRanks.apply(sums, cp_group)
        log_ratio = sequence_log_ratio(log_probs, old, mask, lengths, reduce)
        per_token, clipped = clipped_surrogate(log_ratio, advantages, *clip)
    else:
        log_ratio = log_probs.detach() - old
        per_token, clipped = policy_loss(log_probs, old, advantages, *clip)
    sums = {"clip_fraction": (weights * clipped).sum()}
    if options.use_tis and data.rollout_log_probs is not None:
        rollout = data.rollout_log_probs[slots]
        importance, truncated = truncated_importance_weights(old, rollout, options.tis_clip, options.tis_clip_low)
        per_token = per_token * importance
        sums["tis_clip_fraction"] = (weights * truncated).sum()
        sums["tis_weight"] = (weights * importance).sum()
    pg_loss = (weights * per_token).sum()
    entropy_mean = (weights * (entropy if options.entropy_coef else entropy.detach())).sum()
    loss = pg_loss - options.entropy_coef * entropy_mean
    if data.ref_log_probs is not None:
        in_loss = options.use_kl_loss and options.kl_loss_coef != 0
        kl = kl_estimate(options.kl_loss_type, log_probs if in_loss else log_probs.detach(), data.ref_log_probs[slots])
        kl = (weights * kl).sum()
        if in_loss:
            loss = loss + options.kl_loss_coef * kl
        sums["kl"] = kl.detach()
    sums |= {
        "loss": loss.detach(),
        "pg_loss": pg_loss.detach(),
        "entropy": entropy_mean.detach(),
        "ppo_kl": (weights * -log_ratio.detach()).sum(),
    }
    return loss, sums


class SumOverRanks(torch.autograd.Function):
    """All-reduce whose gradient is the all-reduced gradient: every rank's loss depends on every rank's part."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = value.detach().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None
