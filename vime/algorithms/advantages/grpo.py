"""Group relative policy optimization: DeepSeekMath (Shao et al. 2024), section 4.1.2."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vime.algorithms.advantages.group import by_group, penalised_rewards, spread

if TYPE_CHECKING:
    from torch import Tensor

    from vime.config.algorithm import AlgorithmOptions

EPSILON = 1e-6  # slime's and verl's; TRL adds 1e-4


def grpo(
    options: AlgorithmOptions,
    rewards: Sequence[float],
    group_ids: Sequence[int],
    loss_masks: Sequence[Tensor],
    kl: Sequence[Tensor] | None,
    kl_coef: float,
) -> list[Tensor]:
    """A_i = (R_i - mean(R)) / (std(R) + 1e-6) within each group, the same for every token of the answer.

    The standard deviation is the unbiased one (divided by n - 1), torch's default and so what slime, TRL and verl use.
    ``--disable-grpo-std-normalization`` leaves the division out (Dr. GRPO, Liu et al. 2025). Rewards that are
    all equal give exactly zero. See :func:`vime.algorithms.advantages.compute_advantages` for shapes.
    """
    totals = penalised_rewards(rewards, loss_masks, kl, kl_coef)
    advantages = [0.0] * len(totals)
    for positions in by_group(group_ids, options.advantage_estimator):
        group = [totals[position] for position in positions]
        if min(group) == max(group):
            continue  # exactly, where rounding of the mean would leave 1e-17 / 1e-6
        mean = math.fsum(group) / len(group)
        scale = 1.0
        if not options.disable_grpo_std_normalization:
            scale = math.sqrt(math.fsum((total - mean) ** 2 for total in group) / (len(group) - 1)) + EPSILON
        for position in positions:
            advantages[position] = (totals[position] - mean) / scale
    return spread(advantages, loss_masks)
