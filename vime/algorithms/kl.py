"""Per-token estimates of KL(policy || reference) from the log-probs of sampled tokens.

Schulman, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html. With x ~ policy and
d = log policy(x) - log reference(x):

    k1          d                   unbiased, high variance; may be negative. As a *loss* its expected gradient is zero
    k2          d^2 / 2             biased in value; its gradient is an unbiased gradient of the KL divergence
    k3          exp(-d) - 1 + d     unbiased, low variance, never negative
    low_var_kl  k3, with -d clamped to [-20, 20] before exp and the result to [-10, 10], as slime and verl do it
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vime.algorithms.precision import at_least_float32

if TYPE_CHECKING:
    from torch import Tensor


def kl_estimate(kind: str, log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Estimate the KL divergence at every token.

    Args:
        kind: ``k1``, ``k2``, ``k3`` or ``low_var_kl``.
        log_probs: log-probs of the sampled tokens under the policy, any shape; gradients flow through it.
        ref_log_probs: the same tokens under the reference, same shape.

    Returns:
        One value in nats per token, the shape of ``log_probs``, float32 (float64 stays float64).

    Raises:
        ValueError: unknown ``kind``.
    """
    difference = at_least_float32(log_probs) - at_least_float32(ref_log_probs)
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference.square() / 2
    if kind == "k3":
        return (-difference).expm1() + difference
    if kind == "low_var_kl":
        # The inner clamp changes no value (exp(20) is far beyond the outer one); it keeps the gradient of an
        # overflowing exp from becoming 0 * inf.
        difference = difference.clamp(-20, 20)
        return ((-difference).expm1() + difference).clamp(-10, 10)
    raise ValueError(f"unknown KL estimator '{kind}': choose k1, k2, k3 or low_var_kl")
