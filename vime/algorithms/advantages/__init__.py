"""Advantages: how much better each response token was than expected.

An estimator is a function (options, rewards, group_ids, loss_masks, kl, kl_coef) -> list of 1-D tensors, one value per
response token of each answer. To add one: write its file, put it into ESTIMATORS, and its name into
``AlgorithmOptions.advantage_estimator``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vime.algorithms.advantages.grpo import grpo
from vime.algorithms.advantages.gspo import gspo
from vime.algorithms.advantages.reinforce_plus_plus import reinforce_plus_plus
from vime.algorithms.advantages.rloo import rloo
from vime.algorithms.whiten import whiten

if TYPE_CHECKING:
    from torch import Tensor

    from vime.config.algorithm import AlgorithmOptions

ESTIMATORS = {"grpo": grpo, "gspo": gspo, "rloo": rloo, "reinforce_plus_plus": reinforce_plus_plus}
WHITENED = frozenset({"reinforce_plus_plus"})  # whose definition includes it


def compute_advantages(
    options: AlgorithmOptions,
    rewards: Sequence[float],
    group_ids: Sequence[int],
    loss_masks: Sequence[Tensor],
    kl: Sequence[Tensor] | None = None,
    kl_coef: float | None = None,
) -> list[Tensor]:
    """Advantages of a whole rollout.

    Every rank calls it with *all* answers of the rollout, so groups are whole wherever their answers are trained, and
    the result does not depend on the parallel layout.

    Args:
        options: ``advantage_estimator``, ``disable_grpo_std_normalization``, ``normalize_advantages``, ``kl_coef``.
        rewards: one per answer.
        group_ids: answers with equal ids answer the same prompt; in any order.
        loss_masks: per answer a 1-D tensor [response tokens] of 0 and 1.
        kl: per answer a 1-D tensor [response tokens], old policy against reference, in nats; needed if kl_coef > 0.
        kl_coef: how much of it is taken off the reward; None: ``options.kl_coef``.

    Returns:
        Per answer a 1-D float32 tensor [response tokens], zero where the mask is zero, on the mask's device.

    Raises:
        ValueError: unequal numbers of entries, a group of one answer where the estimator compares answers, or
            ``kl_coef`` > 0 without ``kl``.
    """
    coefficient = options.kl_coef if kl_coef is None else kl_coef
    if not len(rewards) == len(group_ids) == len(loss_masks):
        raise ValueError(f"{len(rewards)} rewards, {len(group_ids)} group ids, {len(loss_masks)} masks: must be equal")
    if coefficient and (kl is None or len(kl) != len(rewards)):
        raise ValueError(f"--kl-coef {coefficient} needs the KL divergence of all {len(rewards)} answers")
    estimator = ESTIMATORS[options.advantage_estimator]
    advantages = estimator(options, rewards, group_ids, loss_masks, kl if coefficient else None, coefficient)
    if options.normalize_advantages or options.advantage_estimator in WHITENED:
        advantages = whiten(advantages, loss_masks)
    return advantages


__all__ = ["ESTIMATORS", "compute_advantages"]
