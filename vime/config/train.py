"""Batches, memory and precision of the trainer."""

from __future__ import annotations

from dataclasses import dataclass

from vime.config.option import LONGEST, option


@dataclass(kw_only=True)
class TrainOptions:
    """Training"""

    loss_type: str = option("policy_loss", "what is learned", choices=("policy_loss", "sft_loss"))
    dtype: str = option(
        "auto", "weights and activations; auto: bf16 on a GPU, fp32 on a CPU", choices=("auto", "bf16", "fp32")
    )
    global_batch_size: int | None = option(
        None, "answers per optimizer step (default: the whole rollout in one step)", minimum=1
    )
    micro_batch_size: int = option(1, "answers per forward pass, without --use-dynamic-batch-size", minimum=1)
    use_dynamic_batch_size: bool = option(False, "fill each forward pass up to --max-tokens-per-gpu")
    max_tokens_per_gpu: int | None = option(None, "tokens of one forward pass per rank", minimum=1)
    log_probs_max_tokens_per_gpu: int | None = option(None, "the same when only log-probs are computed", minimum=1)
    balance_data: bool = option(False, "give every data parallel rank the same number of tokens")
    calculate_per_token_loss: bool = option(
        False, "average the loss over all tokens of a step (default: over each answer first, then over answers)"
    )
    recompute_granularity: str | None = option(None, "what is recomputed in backward", choices=("full", "selective"))
    recompute_method: str | None = option(None, "which layers are recomputed", choices=("uniform", "block"))
    recompute_num_layers: int | None = option(
        None,
        "layers per recomputed piece (uniform), or recomputed layers of each of a rank's chunks (block)",
        minimum=1,
    )
    train_memory_margin_bytes: int = option(
        1 << 30,
        "GPU memory that the estimate before the start leaves to others; the trainer itself does not keep to it",
        minimum=0,
    )
    train_timeout: float = option(
        3600.0, "seconds one training phase may take before the run gives up", above=0, maximum=LONGEST
    )
    seed: int = option(1234, "seed of everything random", minimum=0)


@dataclass(kw_only=True)
class OptimizerOptions:
    """Optimizer"""

    optimizer: str = option("adam", "optimizer; weight decay is decoupled (AdamW)", choices=("adam",))
    lr: float = option(1e-6, "learning rate", minimum=0)
    min_lr: float = option(0.0, "learning rate at the end of the decay", minimum=0)
    lr_decay_style: str = option(
        "constant", "how the learning rate decays", choices=("constant", "linear", "cosine", "inverse-square-root")
    )
    lr_decay_iters: int | None = option(None, "optimizer steps over which it decays (default: the run's)", minimum=1)
    lr_warmup_iters: int = option(0, "optimizer steps of linear warm-up", minimum=0)
    lr_warmup_fraction: float | None = option(None, "warm-up as a part of the decay", minimum=0, maximum=1)
    lr_warmup_init: float = option(0.0, "learning rate at the start of the warm-up", minimum=0)
    weight_decay: float = option(0.0, "decoupled weight decay", minimum=0)
    adam_beta1: float = option(0.9, "Adam's first moment", minimum=0, maximum=1)
    adam_beta2: float = option(0.98, "Adam's second moment", minimum=0, maximum=1)
    adam_eps: float = option(1e-8, "Adam's epsilon", above=0)
    clip_grad: float = option(1.0, "gradient norm above which gradients are scaled down; 0: never", minimum=0)
