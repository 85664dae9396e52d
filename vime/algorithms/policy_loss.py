"""The clipped policy loss and the two probability ratios it is taken of.

PPO (Schulman et al. 2017, eq. 7) with separate lower and upper bounds (DAPO, Yu et al. 2025, eq. 8: "clip-higher"),
dual clipping (Ye et al. 2020, eq. 5), and GSPO's sequence-level ratio (Zheng et al. 2025, eq. 5 and 7).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from vime.algorithms.precision import at_least_float32

if TYPE_CHECKING:
    from torch import Tensor

# exp of it is finite, and far outside any clipping range. Without it a ratio of inf times an advantage of 0 is NaN.
LOG_RATIO_LIMIT = 20.0


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    eps_clip: float,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Clipped policy loss of every token, by the token-level ratio (GRPO, RLOO, REINFORCE++).

    Args:
        log_probs: 1-D [tokens], of the sampled tokens under the weights being trained; gradients flow through it.
        old_log_probs: 1-D [tokens], under the weights before the rollout's first optimizer step.
        advantages: 1-D [tokens].
        eps_clip, eps_clip_high, eps_clip_c: as in :func:`clipped_surrogate`.

    Returns:
        (loss_per_token, clipped), as :func:`clipped_surrogate`. Not masked and not averaged: the caller does both.
    """
    log_ratio = at_least_float32(log_probs) - at_least_float32(old_log_probs.detach())
    return clipped_surrogate(log_ratio, advantages, eps_clip, eps_clip_high, eps_clip_c)


def clipped_surrogate(
    log_ratio: Tensor,
    advantages: Tensor,
    eps_clip: float,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
) -> tuple[Tensor, Tensor]:
    """With r = exp(log_ratio): loss = max(-r A, -clamp(r, 1 - eps_clip, 1 + eps_clip_high) A); with ``eps_clip_c``
    it is at most -eps_clip_c A where A < 0.

    Args:
        log_ratio: 1-D [tokens], log of new over old probability. Clamped to [-20, 20].
        advantages: 1-D [tokens].
        eps_clip: how far below 1 the ratio is followed.
        eps_clip_high: how far above 1; None: ``eps_clip``.
        eps_clip_c: bound above 1 of the ratio for negative advantages; None: unbounded, as in PPO.

    Returns:
        (loss_per_token, clipped): both 1-D [tokens]; ``clipped`` is True where a bound decides, so no gradient flows.
    """
    high = eps_clip if eps_clip_high is None else eps_clip_high
    advantages = advantages.to(log_ratio.dtype)
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    plain = -ratio * advantages
    bounded = -ratio.clamp(1 - eps_clip, 1 + high) * advantages
    loss = torch.maximum(plain, bounded)
    clipped = bounded > plain
    if eps_clip_c is not None:
        if eps_clip_c <= 1:
            raise ValueError(f"eps_clip_c is {eps_clip_c}; dual clipping needs a bound above 1")
        ceiling = -eps_clip_c * advantages
        dual = (advantages < 0) & (ceiling < loss)
        loss = torch.where(dual, ceiling, loss)
        clipped = clipped | dual
    return loss, clipped


def sequence_log_ratio(
    log_probs: Tensor,
    old_log_probs: Tensor,
    loss_mask: Tensor,
    lengths: Sequence[int],
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """GSPO's log-ratio: the mean of an answer's token log-ratios, given to each of its tokens.

    log s_i = (1 / |y_i|) sum_t (log pi(y_t) - log pi_old(y_t)); gradients flow to every token of the answer.

    Args:
        log_probs, old_log_probs: 1-D [tokens], answers one after the other.
        loss_mask: 1-D [tokens], 0 or 1; masked tokens count in neither the sum nor |y_i|.
        lengths: tokens of each answer in these tensors (0 where this rank holds none of it), summing to [tokens].
        reduce: given [2, answers] (sums and counts), returns their sum over the ranks that share the sequences
            (context parallel), differentiable in its argument. None: this rank holds whole answers.

    Returns:
        1-D [tokens].
    """
    log_ratio = at_least_float32(log_probs) - at_least_float32(old_log_probs.detach())
    mask = loss_mask.to(log_ratio.dtype)
    sums = torch.stack([part.sum() for part in (log_ratio * mask).split(list(lengths))])
    counts = torch.stack([part.sum() for part in mask.split(list(lengths))])
    if reduce is not None:
        sums, counts = reduce(torch.stack([sums, counts])).unbind(0)
    means = sums / counts.clamp(min=1)
    return torch.repeat_interleave(means, torch.tensor(list(lengths), device=means.device))
