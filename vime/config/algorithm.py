"""How rewards become gradients."""

from __future__ import annotations

from dataclasses import dataclass

from vime.config.option import option


@dataclass(kw_only=True)
class AlgorithmOptions:
    """Algorithm"""

    advantage_estimator: str = option(
        "grpo", "how advantages follow from rewards", choices=("grpo", "gspo", "rloo", "reinforce_plus_plus")
    )
    disable_grpo_std_normalization: bool = option(False, "GRPO without division by the group's standard deviation")
    normalize_advantages: bool = option(
        False, "whiten advantages over the whole batch; reinforce_plus_plus always does, with or without it"
    )
    eps_clip: float = option(0.2, "lower clipping range of the probability ratio", minimum=0, maximum=1)
    eps_clip_high: float | None = option(None, "upper clipping range (default: --eps-clip)", minimum=0)
    eps_clip_c: float | None = option(None, "dual clipping: bound for negative advantages", above=1)
    use_kl_loss: bool = option(False, "KL divergence to --ref-load in the loss; reported also with coefficient 0")
    kl_loss_coef: float = option(0.0, "weight of the KL divergence in the loss", minimum=0)
    kl_loss_type: str = option(
        "low_var_kl",
        "estimator of the KL divergence per token; low_var_kl is k3, clamped",
        choices=("k1", "k2", "k3", "low_var_kl"),
    )
    kl_coef: float = option(0.0, "weight of the per-token KL divergence taken off the reward", minimum=0)
    entropy_coef: float = option(0.0, "weight of the entropy bonus", minimum=0)
    use_rollout_logprobs: bool = option(
        False, "take the engine's log-probs as the old ones instead of recomputing them"
    )
    use_tis: bool = option(False, "truncated importance sampling between engine and trainer")
    tis_clip: float = option(2.0, "upper bound of the importance weight of --use-tis", above=0)
    tis_clip_low: float = option(0.0, "lower bound of the importance weight of --use-tis", minimum=0)
