"""How rewards become gradients: pure tensor functions, one small file per thing, none of which knows who calls it."""

from vime.algorithms.advantages import compute_advantages
from vime.algorithms.importance import truncated_importance_weights
from vime.algorithms.kl import kl_estimate
from vime.algorithms.policy_loss import clipped_surrogate, policy_loss, sequence_log_ratio
from vime.algorithms.whiten import whiten

__all__ = [
    "clipped_surrogate",
    "compute_advantages",
    "kl_estimate",
    "policy_loss",
    "sequence_log_ratio",
    "truncated_importance_weights",
    "whiten",
]
