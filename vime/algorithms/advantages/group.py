"""What the estimators that compare the answers to one prompt have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def penalised_rewards(
    rewards: Sequence[float], loss_masks: Sequence[Tensor], kl: Sequence[Tensor] | None, kl_coef: float
) -> list[float]:
    """R_i = r_i - kl_coef * sum over learned tokens of kl_t: the reward of the whole answer, KL penalty included.

    Estimators with one advantage per answer see the penalty as a sum over the answer (TRL's RLOO); exact in float64.
    """
    if kl is None:
        return [float(reward) for reward in rewards]
    return [
        float(reward) - kl_coef * (penalty.double() * mask.to(penalty.device)).sum().item()
        for reward, penalty, mask in zip(rewards, kl, loss_masks, strict=True)
    ]


def by_group(group_ids: Sequence[int], estimator: str) -> list[list[int]]:
    """Positions of each group's answers, groups by first appearance."""
    groups: dict[int, list[int]] = {}
    for position, group in enumerate(group_ids):
        groups.setdefault(group, []).append(position)
    for group, positions in groups.items():
        if len(positions) < 2:
            raise ValueError(
                f"--advantage-estimator {estimator} compares the answers to one prompt, but group {group} has only "
                f"{len(positions)}: --n-samples-per-prompt must be at least 2"
            )
    return list(groups.values())


def spread(values: Sequence[float], loss_masks: Sequence[Tensor]) -> list[Tensor]:
    """Give each answer's value to each of its learned tokens, float32."""
    return [mask.to(torch.float32) * value for value, mask in zip(values, loss_masks, strict=True)]
