"""REINFORCE++: Hu 2025 (arXiv:2501.03262), eq. 8 and 10."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from vime.config.algorithm import AlgorithmOptions


def reinforce_plus_plus(
    options: AlgorithmOptions,
    rewards: Sequence[float],
    group_ids: Sequence[int],
    loss_masks: Sequence[Tensor],
    kl: Sequence[Tensor] | None,
    kl_coef: float,
) -> list[Tensor]:
    """A_t = r - kl_coef * sum of kl over tokens t, t+1, ... of the answer, no discount, no group.

    :func:`vime.algorithms.advantages.compute_advantages` whitens the result over the whole batch, which is part of the
    definition (slime does so only with ``--normalize-advantages``).
    """
    advantages = []
    for position, (reward, mask) in enumerate(zip(rewards, loss_masks, strict=True)):
        learned = mask.double()
        to_go = torch.zeros_like(learned)
        if kl is not None:
            to_go = (kl[position].to(learned) * learned).flip(0).cumsum(0).flip(0)
        advantages.append(((float(reward) - kl_coef * to_go) * learned).float())
    return advantages
