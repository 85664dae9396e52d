"""REINFORCE leave-one-out: Ahmadian et al. 2024, "Back to Basics", eq. 8."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vime.algorithms.advantages.group import by_group, penalised_rewards, spread

if TYPE_CHECKING:
    from torch import Tensor

    from vime.config.algorithm import AlgorithmOptions


def rloo(
    options: AlgorithmOptions,
    rewards: Sequence[float],
    group_ids: Sequence[int],
    loss_masks: Sequence[Tensor],
    kl: Sequence[Tensor] | None,
    kl_coef: float,
) -> list[Tensor]:
    """A_i = R_i - mean of the group's other rewards = (R_i - mean(R)) * n / (n - 1), for every token of the answer."""
    totals = penalised_rewards(rewards, loss_masks, kl, kl_coef)
    advantages = [0.0] * len(totals)
    for positions in by_group(group_ids, options.advantage_estimator):
        total = math.fsum(totals[position] for position in positions)
        for position in positions:
            advantages[position] = totals[position] - (total - totals[position]) / (len(positions) - 1)
    return spread(advantages, loss_masks)
