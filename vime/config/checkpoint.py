"""What is read at the start and written along the way."""

from __future__ import annotations

from dataclasses import dataclass

from vime.config.option import LONGEST, option


@dataclass(kw_only=True)
class CheckpointOptions:
    """Checkpoints"""

    hf_checkpoint: str = option(
        help="Hugging Face directory: config, tokenizer and the weights to start from", kind="path"
    )
    ref_load: str | None = option(
        None, "reference model: an HF directory or a Megatron torch_dist one (default: --hf-checkpoint)", kind="path"
    )
    load: str | None = option(None, "continue from the newest checkpoint below this directory")
    save: str | None = option(None, "write checkpoints below this directory")
    save_interval: int | None = option(None, "every n-th rollout, and after the last", minimum=1)
    save_hf: str | None = option(None, "write the weights for transformers; '{rollout_id}' in it is filled in")
    no_save_optim: bool = option(False, "leave the optimizer out of checkpoints")
    no_load_optim: bool = option(
        False,
        "continue from --load with a fresh optimizer and, as in Megatron-LM, the learning rate's schedule (warm-up, "
        "decay) from its start; rollouts are counted on",
    )
    keep_checkpoints: int | None = option(None, "keep this many newest checkpoints (default: all)", minimum=1)


@dataclass(kw_only=True)
class WeightSyncOptions:
    """Weight sync"""

    update_weight_transport: str = option(
        "planned",
        "how weights reach the engines. planned: read where they are, or sent from another node; bucketed: whole "
        "tensors, loaded by vLLM; distributed: all are sent; disk: as files",
        choices=("planned", "bucketed", "distributed", "disk"),
    )
    update_weight_buffer_size: int = option(
        512 << 20, "bytes of one bucket, and at most of one message from another node", minimum=1
    )
    update_weight_disk_dir: str | None = option(
        None, "for --update-weight-transport disk: a directory that all nodes see (default: in the run's directory)"
    )
    check_weight_update: str = option("sampled", "checksums at every sync", choices=("full", "sampled", "off"))
    no_copy_engines: bool = option(
        False, "read other GPUs' memory with the copy kernel only, which is slower for large models"
    )
    weight_update_timeout: float = option(
        300.0,
        "seconds that a sync's calls to an engine may take in all, and each of its ranks' meetings",
        above=0,
        maximum=LONGEST,
    )


@dataclass(kw_only=True)
class ObserveOptions:
    """Logs"""

    run_dir: str | None = option(None, "metrics, samples, logs and report (default: runs/<date>-<time>)")
    use_tensorboard: bool = option(False, "TensorBoard events, in TENSORBOARD_DIR or the run's directory")
    use_wandb: bool = option(False, "Weights & Biases (package wandb must be installed)")
    wandb_project: str = option("vime", "project of --use-wandb")
    save_samples: int = option(16, "prompts with answers and rewards kept per rollout for the report", minimum=0)
    no_progress: bool = option(False, "no live progress lines")
