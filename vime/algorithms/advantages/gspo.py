"""Group sequence policy optimization (Zheng et al. 2025): GRPO's advantages (its eq. 6).

What differs is the probability ratio, one per answer: :func:`vime.algorithms.policy_loss.sequence_log_ratio`.
"""

from vime.algorithms.advantages.grpo import grpo as gspo

__all__ = ["gspo"]
