"""Prompts, generation, rewards and evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field

from vime.config.option import LONGEST, option

# Built-in rewards by what they need: math-verify and a label, a label, nothing. Each has its entry in
# vime/rollout/rewards/rewarder.py.
MATHEMATICAL = ("deepscaler", "math", "dapo")
LABELLED = (*MATHEMATICAL, "f1")
RM_TYPES = (*LABELLED, "random", "remote_rm")


@dataclass(kw_only=True)
class DataOptions:
    """Prompts"""

    prompt_data: str | None = option(None, "JSONL or Parquet file; path@[a:b] takes a slice of its rows", kind="path")
    input_key: str = option("input", "column of the prompt: a string or a list of chat messages")
    label_key: str | None = option(None, "column of the right answer")
    metadata_key: str = option("metadata", "column of a dictionary handed to the reward function")
    tool_key: str | None = option(None, "column of the tools for the chat template")
    apply_chat_template: bool = option(False, "turn the prompt into a conversation by the tokenizer's chat template")
    apply_chat_template_kwargs: dict = option(default_factory=dict, help="JSON of further arguments to the template")
    rollout_shuffle: bool = option(False, "shuffle the prompts anew every epoch")
    rollout_seed: int = option(42, "seed of the shuffle and of sampling", minimum=0)
    rollout_max_prompt_len: int | None = option(None, "drop (and count) prompts of more tokens", minimum=1)


@dataclass(kw_only=True)
class RolloutOptions:
    """Rollout"""

    num_rollout: int | None = option(None, "rollouts of the run", minimum=0)
    num_epoch: int | None = option(None, "passes over the prompts, instead of --num-rollout", minimum=1)
    rollout_batch_size: int = option(help="prompts per rollout", minimum=1)
    n_samples_per_prompt: int = option(1, "answers per prompt", minimum=1)
    rollout_max_response_len: int = option(1024, "tokens of one answer at most", minimum=1)
    rollout_max_context_len: int | None = option(None, "tokens of prompt and answer at most", minimum=2)
    rollout_temperature: float = option(1.0, "sampling temperature", minimum=0)
    rollout_top_p: float = option(1.0, "nucleus sampling", above=0, maximum=1)
    rollout_top_k: int = option(-1, "sample among the k likeliest tokens; -1: all", minimum=-1)
    rollout_stop: list[str] = option(default_factory=list, help="strings that end an answer")
    rollout_stop_token_ids: list[int] = option(default_factory=list, help="token ids that end an answer")
    rollout_timeout: float = option(
        3600.0, "seconds one rollout may take before the run gives up", above=0, maximum=LONGEST
    )
    request_timeout: float = option(
        1800.0, "seconds one answer may take before it is asked for again", above=0, maximum=LONGEST
    )
    request_retries: int = option(3, "times one answer is asked for again", minimum=0)
    server_concurrency: int = option(512, "requests at once per engine", minimum=1)
    engine_start_timeout: float = option(600.0, "seconds an engine may take to start", above=0, maximum=LONGEST)
    engine_restarts: int = option(3, "engines that may be replaced in one run", minimum=0)
    custom_generate_function_path: str | None = option(
        None,
        "async module.function(config, sample, client) -> Sample, instead of one request per answer",
        kind="function",
    )
    dynamic_sampling_filter_path: str | None = option(
        None,
        "module.function(config, group) -> bool: groups to keep; others are replaced by new prompts",
        kind="function",
    )
    over_sampling_batch_size: int | None = option(None, "prompts asked for at once when groups are filtered", minimum=1)
    vllm: dict[str, str | bool | list[str]] = field(default_factory=dict)  # --vllm-X VALUE, filled by the parser


@dataclass(kw_only=True)
class RewardOptions:
    """Reward"""

    rm_type: str | None = option(None, "built-in reward", choices=RM_TYPES)
    rm_url: str | None = option(None, "address for --rm-type remote_rm")
    rm_timeout: float = option(60.0, "seconds one reward may take", above=0, maximum=LONGEST)
    custom_rm_path: str | None = option(
        None, "module.function(config, sample) -> number or dict, sync or async", kind="function"
    )
    reward_key: str | None = option(None, "entry that is the reward, where the function returns a dict")
    group_rm: bool = option(False, "--custom-rm-path takes all answers to one prompt at once and returns a list")


@dataclass(kw_only=True)
class EvalOptions:
    """Evaluation"""

    eval_interval: int | None = option(None, "evaluate before every n-th rollout and at the end", minimum=1)
    eval_prompt_data: list[str] = option(default_factory=list, help="NAME PATH [NAME PATH ...], as --prompt-data")
    n_samples_per_eval_prompt: int = option(1, "answers per evaluation prompt", minimum=1)
    eval_temperature: float | None = option(None, "default: --rollout-temperature", minimum=0)
    eval_top_p: float | None = option(None, "default: --rollout-top-p", above=0, maximum=1)
    eval_max_response_len: int | None = option(None, "default: --rollout-max-response-len", minimum=1)
