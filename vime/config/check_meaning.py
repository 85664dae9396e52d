"""Settings that contradict each other or mean nothing. A flag that would be ignored is refused: its author believed it
does something."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator

from vime.config import Config
from vime.config.flags import flags, is_given, value_of
from vime.config.rollout import LABELLED, MATHEMATICAL
from vime.masking import masked

# option -> the switch or option without which it means nothing
NEEDS: dict[str, tuple[str, ...]] = {
    "kl_loss_coef": ("use_kl_loss",),
    "kl_loss_type": ("use_kl_loss", "kl_coef"),
    "tis_clip": ("use_tis",),
    "tis_clip_low": ("use_tis",),
    "max_tokens_per_gpu": ("use_dynamic_batch_size",),
    "log_probs_max_tokens_per_gpu": ("use_dynamic_batch_size",),
    "recompute_method": ("recompute_granularity",),
    "recompute_num_layers": ("recompute_granularity",),
    "save_interval": ("save",),
    "keep_checkpoints": ("save",),
    "no_save_optim": ("save",),
    "no_load_optim": ("load",),
    "eval_interval": ("eval_prompt_data",),
    "n_samples_per_eval_prompt": ("eval_prompt_data",),
    "eval_temperature": ("eval_prompt_data",),
    "eval_top_p": ("eval_prompt_data",),
    "eval_max_response_len": ("eval_prompt_data",),
    "eval_prompt_data": ("eval_interval",),
    "apply_chat_template_kwargs": ("apply_chat_template",),
    "tool_key": ("apply_chat_template",),
    "over_sampling_batch_size": ("dynamic_sampling_filter_path",),
    "reward_key": ("custom_rm_path", "rm_url"),
    "group_rm": ("custom_rm_path",),
    "wandb_project": ("use_wandb",),
    "offload": ("colocate",),
    "offload_train": ("colocate",),
    "offload_rollout": ("colocate",),
    "moe_enable_deepep": ("moe_token_dispatcher_type",),
    "lr_warmup_init": ("lr_warmup_iters", "lr_warmup_fraction"),
    "overlap_param_gather": ("use_distributed_optimizer",),
}

# what only engines, rewards and policy losses use: nothing of it in supervised training
_SFT_IGNORES_TOPICS = ("algorithm", "reward", "eval", "weight_sync")
_SFT_IGNORES = (
    *("n_samples_per_prompt", "rollout_max_response_len", "rollout_temperature", "rollout_top_p", "rollout_top_k"),
    *("rollout_stop", "rollout_stop_token_ids", "rollout_timeout", "request_timeout", "request_retries"),
    *("server_concurrency", "engine_start_timeout", "engine_restarts", "custom_generate_function_path"),
    *("dynamic_sampling_filter_path", "over_sampling_batch_size", "rollout_num_gpus", "rollout_num_gpus_per_engine"),
    *("colocate", "offload", "offload_train", "offload_rollout", "log_probs_max_tokens_per_gpu", "ref_load"),
    *("rollout_max_prompt_len", "metadata_key", "save_samples"),
)


def check_meaning(config: Config) -> list[str]:
    """Contradictions and settings without effect."""
    sft = config.train.loss_type == "sft_loss"
    parts: tuple[Callable[[Config], Iterator[str]], ...] = (
        _dependent,
        _length_of_run,
        _supervised if sft else _reinforced,
        _batches,
        _recompute,
        _schedule,
        _dropout,
        _checkpoints,
        _experts,
        _cluster,
        _weight_sync,
        _logs,
    )
    return [problem for part in parts for problem in part(config)]


def _dependent(config: Config) -> Iterator[str]:
    for name, needed in NEEDS.items():
        value = value_of(config, name)
        if not is_given(config, name) or value is False or value == []:
            continue
        if not any(value_of(config, other) not in (None, False, [], 0, 0.0) for other in needed):
            other = " or ".join(flags()[option].text for option in needed)
            yield f"{_written(config, name)} means nothing without {other}; add that or leave this out"


def _length_of_run(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if rollout.num_rollout is None and rollout.num_epoch is None:
        yield "--num-rollout is missing: how many rollouts to run (or --num-epoch: passes over the prompts)"
    if rollout.num_rollout is not None and rollout.num_epoch is not None:
        yield f"--num-rollout {rollout.num_rollout} and --num-epoch {rollout.num_epoch} both say how long; keep one"
    if config.data.prompt_data is None:
        yield "--prompt-data is missing: the JSONL or Parquet file with the prompts"


def _supervised(config: Config) -> Iterator[str]:
    names = [name for name, flag in flags().items() if flag.topic in _SFT_IGNORES_TOPICS or name in _SFT_IGNORES]
    ignored = [
        _written(config, name) for name in names if is_given(config, name) and value_of(config, name) is not False
    ]
    ignored += [f"--vllm-{name}" for name in config.rollout.vllm]
    if ignored:
        yield f"--loss-type sft_loss uses no engines, rewards or policy loss; leave out {', '.join(ignored)}"
    if is_given(config, "rollout_seed") and not config.data.rollout_shuffle:
        yield (
            f"{_written(config, 'rollout_seed')} means nothing with --loss-type sft_loss, which samples nothing, "
            "unless --rollout-shuffle is there to use it; add that or leave this out"
        )


def _reinforced(config: Config) -> Iterator[str]:
    rollout, reward, algorithm = config.rollout, config.reward, config.algorithm
    yield from _reward(config)
    if algorithm.advantage_estimator in ("grpo", "gspo", "rloo") and rollout.n_samples_per_prompt < 2:
        yield (
            f"--n-samples-per-prompt {rollout.n_samples_per_prompt}: --advantage-estimator "
            f"{algorithm.advantage_estimator} compares answers to the same prompt, so it needs at least 2 (8 is usual)"
        )
    if rollout.rollout_temperature == 0:
        yield "--rollout-temperature 0: all answers to a prompt would be the same, with nothing to learn; 1.0 is usual"
    if algorithm.disable_grpo_std_normalization and algorithm.advantage_estimator not in ("grpo", "gspo"):
        yield (
            "--disable-grpo-std-normalization means nothing with --advantage-estimator "
            f"{algorithm.advantage_estimator}; only grpo and gspo divide by the standard deviation"
        )
    if algorithm.use_kl_loss and algorithm.kl_loss_coef > 0 and algorithm.kl_loss_type == "k1":
        yield (
            f"--kl-loss-coef {algorithm.kl_loss_coef} with --kl-loss-type k1 adds only noise: as a loss, k1 has "
            "an expected gradient of zero; use low_var_kl, k3 or k2"
        )
    reference = algorithm.use_kl_loss or algorithm.kl_coef > 0
    if is_given(config, "log_probs_max_tokens_per_gpu") and algorithm.use_rollout_logprobs and not reference:
        yield (
            f"{_written(config, 'log_probs_max_tokens_per_gpu')} means nothing with --use-rollout-logprobs and without "
            "a reference (--use-kl-loss or --kl-coef): no pass computes log-probs alone; leave it out"
        )
    if config.checkpoint.ref_load and not reference:
        yield (
            f"--ref-load {config.checkpoint.ref_load} means nothing without --use-kl-loss or --kl-coef: "
            "no reference log-probs are computed; add one of them or leave this out"
        )
    if algorithm.use_tis and algorithm.use_rollout_logprobs:
        yield (
            "--use-tis corrects between the engine's and the trainer's log-probs, but --use-rollout-logprobs takes the "
            "engine's for both; keep one"
        )
    if algorithm.use_rollout_logprobs:
        yield from _cut_distribution(config)
    if algorithm.tis_clip_low > algorithm.tis_clip:
        yield f"--tis-clip-low {algorithm.tis_clip_low} is above --tis-clip {algorithm.tis_clip}"
    if rollout.over_sampling_batch_size is not None and rollout.over_sampling_batch_size < rollout.rollout_batch_size:
        yield (
            f"--over-sampling-batch-size {rollout.over_sampling_batch_size} is less than "
            f"--rollout-batch-size {rollout.rollout_batch_size}"
        )
    if reward.group_rm and rollout.n_samples_per_prompt < 2:
        yield "--group-rm rewards all answers to a prompt at once, but --n-samples-per-prompt is 1"


def _cut_distribution(config: Config) -> Iterator[str]:
    """The engine's log-probs are those of the tokens that top-p and top-k leave, which add up to 1; the trainer's are
    those of the whole vocabulary. The ratio of the two would be the kept part of the probability, not 1, before
    anything is learned. (As a weight, which --use-tis makes of it, that is right: it is how the answers were drawn.)
    """
    for name, value, off in (
        ("rollout_top_p", config.rollout.rollout_top_p < 1, "1.0"),
        ("rollout_top_k", config.rollout.rollout_top_k > 0, "-1"),
    ):
        if value:
            yield (
                f"{_written(config, name)} with --use-rollout-logprobs: the engine's log-probs are those of the tokens "
                "that are left, the trainer's those of all, so their ratio would not be that of new to old policy; say "
                f"{flags()[name].text} {off}, or leave --use-rollout-logprobs out (--use-tis may correct instead)"
            )


def _reward(config: Config) -> Iterator[str]:
    reward = config.reward
    if reward.rm_type is None and reward.custom_rm_path is None:
        choices = ", ".join(flags()["rm_type"].metadata["choices"])
        yield f"--rm-type is missing: how answers are rewarded ({choices}), or --custom-rm-path module.function"
    if reward.rm_type is not None and reward.custom_rm_path is not None:
        yield f"--rm-type {reward.rm_type} and --custom-rm-path {reward.custom_rm_path} both reward; keep one"
    if reward.rm_type == "remote_rm" and not reward.rm_url:
        yield "--rm-type remote_rm needs --rm-url, the address that rewards"
    if reward.rm_url and reward.rm_type != "remote_rm":
        said = f"--rm-type {reward.rm_type}" if reward.rm_type else "no --rm-type"
        yield f"--rm-url {masked(reward.rm_url)} means nothing with {said}; it belongs to --rm-type remote_rm"
    if reward.rm_url and not reward.rm_url.startswith(("http://", "https://")):
        yield f"--rm-url {masked(reward.rm_url)}: must start with http:// or https://"
    if reward.rm_type in LABELLED and config.data.label_key is None:
        yield f"--label-key is missing: --rm-type {reward.rm_type} compares with the right answer in that column"
    yield from missing_package(f"--rm-type {reward.rm_type}", reward.rm_type)


def missing_package(where: str, reward: str | None) -> Iterator[str]:
    """What a built-in reward needs and this environment lacks; ``where`` says who asks for the reward."""
    if reward in MATHEMATICAL and importlib.util.find_spec("math_verify") is None:
        yield (
            f"{where}: the package math-verify, which compares mathematical answers, is not installed here "
            "(pip install 'math-verify[antlr4_13_2]')"
        )


def _batches(config: Config) -> Iterator[str]:
    train = config.train
    if train.use_dynamic_batch_size:
        if train.max_tokens_per_gpu is None:
            yield "--use-dynamic-batch-size needs --max-tokens-per-gpu, the tokens of one forward pass (8192 is usual)"
        if "micro_batch_size" in config.given:
            yield (
                f"--micro-batch-size {train.micro_batch_size} means nothing with --use-dynamic-batch-size, "
                "which fills micro-batches by tokens; keep one"
            )


def _recompute(config: Config) -> Iterator[str]:
    train = config.train
    if train.recompute_granularity == "full":
        if train.recompute_method is None:
            yield "--recompute-granularity full needs --recompute-method: uniform (all layers) or block (some)"
        if train.recompute_num_layers is None:
            yield "--recompute-granularity full needs --recompute-num-layers (1 saves most memory)"
    elif train.recompute_granularity == "selective":
        for name in ("recompute_method", "recompute_num_layers"):
            if is_given(config, name):
                yield f"{_written(config, name)} means nothing with --recompute-granularity selective"


def _schedule(config: Config) -> Iterator[str]:
    optimizer = config.optimizer
    if optimizer.lr_decay_style == "constant":
        for name in ("lr_decay_iters", "min_lr"):
            # --lr-warmup-fraction is a part of the decay, so it gives the number of steps a meaning
            if is_given(config, name) and not (name == "lr_decay_iters" and optimizer.lr_warmup_fraction):
                yield f"{_written(config, name)} means nothing with --lr-decay-style constant, which never decays"
    elif optimizer.min_lr > optimizer.lr:
        yield f"--min-lr {optimizer.min_lr} is above --lr {optimizer.lr}"
    if optimizer.lr_warmup_iters and optimizer.lr_warmup_fraction is not None:
        yield (
            f"--lr-warmup-iters {optimizer.lr_warmup_iters} and --lr-warmup-fraction {optimizer.lr_warmup_fraction} "
            "both say how long the warm-up is; keep one"
        )
    if optimizer.lr_warmup_init > optimizer.lr:
        yield f"--lr-warmup-init {optimizer.lr_warmup_init} is above --lr {optimizer.lr}"
    for name in ("adam_beta1", "adam_beta2"):
        if value_of(config, name) >= 1:
            yield f"{_written(config, name)}: must be less than 1"
    if optimizer.lr > 0.1:
        yield f"--lr {optimizer.lr} is far above what Adam bears (1e-6 is usual, 1e-3 for a tiny model)"


def _dropout(config: Config) -> Iterator[str]:
    if config.train.loss_type == "sft_loss":
        return
    for name in ("attention_dropout", "hidden_dropout"):
        if value_of(config, name) > 0:
            yield (
                f"{_written(config, name)}: the ratio of new to old log-probs would be noise; with "
                f"--loss-type policy_loss it must be 0.0"
            )


def _checkpoints(config: Config) -> Iterator[str]:
    checkpoint = config.checkpoint
    if checkpoint.save_hf:
        try:
            checkpoint.save_hf.format(rollout_id=0)
        except (KeyError, IndexError, ValueError):
            yield f"--save-hf {checkpoint.save_hf}: the only placeholder is {{rollout_id}}"


def _experts(config: Config) -> Iterator[str]:
    model = config.model
    if model.moe_aux_loss_coeff > 0 and model.moe_router_load_balancing_type == "none":
        yield (
            f"--moe-aux-loss-coeff {model.moe_aux_loss_coeff} means nothing with --moe-router-load-balancing-type "
            "none; say aux_loss or seq_aux_loss"
        )
    if model.moe_router_load_balancing_type != "none" and model.moe_aux_loss_coeff == 0:
        yield (
            f"--moe-router-load-balancing-type {model.moe_router_load_balancing_type} means nothing with "
            "--moe-aux-loss-coeff 0; give it a weight (0.001 is usual) or leave it out"
        )
    packs = config.train.use_dynamic_batch_size or config.train.micro_batch_size > 1
    if model.moe_router_load_balancing_type == "seq_aux_loss" and packs:
        what = (
            "--use-dynamic-batch-size"
            if config.train.use_dynamic_batch_size
            else f"--micro-batch-size {config.train.micro_batch_size}"
        )
        yield (
            f"--moe-router-load-balancing-type seq_aux_loss balances each sequence by itself, but {what} packs several "
            "into one row and the loss is of rows; use aux_loss, or --micro-batch-size 1 without "
            "--use-dynamic-batch-size"
        )
    if model.moe_enable_deepep and model.moe_token_dispatcher_type != "flex":
        yield (f"--moe-enable-deepep needs --moe-token-dispatcher-type flex, not {model.moe_token_dispatcher_type}")
    if model.moe_token_dispatcher_type == "flex":
        if not model.moe_enable_deepep:
            yield "--moe-token-dispatcher-type flex needs --moe-enable-deepep, the only flex dispatcher here"
        elif importlib.util.find_spec("deep_ep") is None:
            yield (
                "--moe-enable-deepep: the package deep_ep is not installed here; install DeepEP, "
                "or use --moe-token-dispatcher-type alltoall"
            )


def _weight_sync(config: Config) -> Iterator[str]:
    transport = config.weight_sync.update_weight_transport
    useless = {
        "planned": ["update_weight_disk_dir"],
        "bucketed": ["update_weight_disk_dir", "no_copy_engines"],
        "distributed": ["update_weight_disk_dir", "no_copy_engines"],
        "disk": ["update_weight_buffer_size", "no_copy_engines"],
    }
    for name in useless[transport]:
        if is_given(config, name):
            yield f"{_written(config, name)} means nothing with --update-weight-transport {transport}; leave it out"


def _cluster(config: Config) -> Iterator[str]:
    cluster = config.cluster
    for name in ("offload_train", "offload_rollout"):
        if cluster.offload and value_of(config, name) is False:
            yield f"--offload turns {flags()[name].text} on, but --no-{flags()[name].text[2:]} turns it off; keep one"
    if config.parallel.overlap_param_gather and not config.parallel.overlap_grad_reduce:
        yield "--overlap-param-gather needs --overlap-grad-reduce as well"
    if config.parallel.sequence_parallel and config.parallel.tensor_model_parallel_size == 1:
        yield "--sequence-parallel means nothing with --tensor-model-parallel-size 1"


def _logs(config: Config) -> Iterator[str]:
    observe = config.observe
    if observe.use_wandb and importlib.util.find_spec("wandb") is None:
        yield "--use-wandb: the package wandb is not installed here (pip install wandb)"
    if observe.use_tensorboard and importlib.util.find_spec("tensorboard") is None:
        yield "--use-tensorboard: the package tensorboard is not installed here (pip install tensorboard)"
    folder = os.environ.get("TENSORBOARD_DIR")
    if observe.use_tensorboard and folder and os.path.exists(folder) and not os.path.isdir(folder):
        yield f"--use-tensorboard: TENSORBOARD_DIR {folder} is not a directory"


def _written(config: Config, name: str) -> str:
    """The option as it stands on the command line."""
    flag, value = flags()[name], value_of(config, name)
    if flag.type is bool:
        return flag.text if value else f"--no-{flag.text[2:]}"
    if flag.type is list:
        return " ".join([flag.text, *map(str, value)])
    return f"{flag.text} {value}"
