"""Learning rate over the optimizer steps of a run, by Megatron's scheduler."""

from __future__ import annotations

from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from vime.config import Config
from vime.errors import ConfigError


def build_schedule(config: Config, optimizer: Any) -> OptimizerParamScheduler:
    """One ``step(1)`` per optimizer step. Norms and biases are exempt from weight decay, as in Megatron-LM."""
    options = config.optimizer
    decay, warmup = decay_and_warmup_steps(config)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=options.lr_warmup_init,
        max_lr=options.lr,
        min_lr=options.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=decay,
        lr_decay_style=options.lr_decay_style,
        start_wd=options.weight_decay,
        end_wd=options.weight_decay,
        wd_incr_steps=decay,
        wd_incr_style="constant",
        # Resuming with other flags follows the flags; only the number of steps done comes from the checkpoint.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


def decay_and_warmup_steps(config: Config) -> tuple[int, int]:
    """Optimizer steps of decay and of warm-up.

    Raises:
        ConfigError: a schedule that decays over an unknown number of steps, or warms up for longer than it decays.
    """
    options = config.optimizer
    decay = options.lr_decay_iters
    if decay is None and config.rollout.num_rollout is not None:
        decay = config.rollout.num_rollout * config.steps_per_rollout
    fraction = options.lr_warmup_fraction
    if decay is None and (options.lr_decay_style != "constant" or fraction is not None):
        what = f"--lr-decay-style {options.lr_decay_style}" if fraction is None else "--lr-warmup-fraction"
        raise ConfigError([f"{what} needs --lr-decay-iters or --num-rollout to know over how many steps"])
    warmup = options.lr_warmup_iters if fraction is None else round(fraction * (decay or 0))
    if options.lr_decay_style == "constant":
        return max(decay or 1, warmup + 1), warmup
    assert decay is not None
    decay = max(decay, 1)
    if warmup >= decay:
        raise ConfigError([f"{warmup} steps of warm-up do not fit into {decay} steps of --lr-decay-style"])
    return decay, warmup
