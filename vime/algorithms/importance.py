"""Correction for answers that were sampled by a slightly different policy than the trainer's own.

The engine and the trainer hold the same weights but compute with different kernels (and, in asynchronous runs, an
older version), so tokens are sampled from mu, not from pi_old. Truncated importance sampling multiplies the token's
policy loss by min(pi_old / mu, C) (Ionides 2008; Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
Off-Policy RL Training"); slime's and verl's "TIS".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vime.algorithms.precision import at_least_float32

if TYPE_CHECKING:
    from torch import Tensor


def truncated_importance_weights(
    old_log_probs: Tensor, rollout_log_probs: Tensor, clip: float, clip_low: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Weights clamp(exp(old - rollout), clip_low, clip), one per token, constants to autograd.

    Args:
        old_log_probs: the trainer's log-probs of the sampled tokens before the update, any shape.
        rollout_log_probs: the engine's, same shape.
        clip, clip_low: upper and lower bound of the weight (``--tis-clip``, ``--tis-clip-low``).

    Returns:
        (weights, truncated): the weights, and True where a bound was applied; both of the inputs' shape.
    """
    ratio = (at_least_float32(old_log_probs.detach()) - at_least_float32(rollout_log_probs.detach())).exp()
    return ratio.clamp(clip_low, clip), (ratio < clip_low) | (ratio > clip)
