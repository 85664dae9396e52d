"""Whoever does what a message recommends must not be refused for it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import pytest

from tests.unit.config.conftest import Problems
from tests.unit.config.test_check_meaning import RL_ONLY
from vime.backends.vllm_utils.command import OWNED_FLAGS
from vime.config import foreign
from vime.config.check_meaning import NEEDS
from vime.config.flags import flags
from vime.config.vllm_args import RESERVED

# what a reader would write after a recommended flag, where it is not the run's own value already
VALUES = {
    "seed": "7",
    "dtype": "fp32",
    "rollout_max_context_len": "512",
    "update_weight_transport": "bucketed",
    "rollout_num_gpus_per_engine": "2",
    "eval_prompt_data": "test PROMPTS",
    "eval_interval": "2",
    "eval_temperature": "0.5",
    "eval_top_p": "0.5",
    "eval_max_response_len": "32",
    "custom_rm_path": "json.loads",
    "custom_generate_function_path": "json.loads",
    "dynamic_sampling_filter_path": "json.loads",
    "over_sampling_batch_size": "8",
    "rm_url": "http://localhost:1",
    "reward_key": "score",
    "apply_chat_template_kwargs": '{"a":1}',
    "tool_key": "tools",
    "save": "checkpoints",
    "load": "checkpoints",
    "kl_coef": "0.1",
    "kl_loss_coef": "0.1",
    "kl_loss_type": "k3",
    "tis_clip": "3",
    "tis_clip_low": "0.1",
    "lr_warmup_iters": "2",
    "lr_warmup_fraction": "0.1",
    "lr_warmup_init": "1e-7",
    "lr_decay_iters": "9",
    "position_embedding_type": "rope",
    "save_samples": "4",
    "train_timeout": "60",
    "num_epoch": "2",
    "micro_batch_size": "1",
    "make_vocab_size_divisible_by": "2",
    "num_layers_per_virtual_pipeline_stage": "1",
    "rollout_top_k": "20",
    "server_concurrency": "8",
    "log_probs_max_tokens_per_gpu": "256",
    "recompute_method": "uniform",
    "n_samples_per_eval_prompt": "2",
    "save_interval": "2",
    "keep_checkpoints": "2",
    "loss_type": "sft_loss",
    "run_dir": "run",
}
# what whoever is given this advice has written already, or what the flag takes the place of
CONTEXT: dict[str, tuple[str, tuple[str, ...]]] = {
    "lr_decay_iters": ("--lr-decay-style cosine", ()),
    "lr_warmup_fraction": ("--lr-decay-style cosine", ()),
    "num_epoch": ("", ("--num-rollout",)),
    "micro_batch_size": ("", ("--use-dynamic-batch-size", "--max-tokens-per-gpu")),
    "custom_rm_path": ("", ("--rm-type",)),
    "rm_url": ("--rm-type remote_rm", ("--rm-type",)),
    "eval_prompt_data": ("--eval-interval 2", ()),
    "load": ("--save checkpoints", ()),
    "no_load_optim": ("--load checkpoints --save checkpoints", ()),
    "loss_type": ("--global-batch-size 4", RL_ONLY),  # both are said beside it
    "overlap_param_gather": ("--overlap-grad-reduce", ()),
    "num_layers_per_virtual_pipeline_stage": ("--pipeline-model-parallel-size 2", ("--pipeline-model-parallel-size",)),
}
ELSEWHERE = ("wandb_project", "moe_enable_deepep")  # need a package that may not be there
_FLAG = re.compile(r"--[a-z][a-z0-9-]*")


def recommended(messages: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    known = {flag.text: name for name, flag in flags().items()}
    for about, message in messages:
        for word in _FLAG.findall(message.partition(" (")[0]):
            if word in known and known[word] not in ELSEWHERE:
                yield about, known[word]


def words(name: str, base: dict[str, list[str]], prompts: str) -> str:
    """The flag as a reader would write it."""
    flag = flags()[name]
    if flag.type is bool:
        return flag.text
    value = VALUES.get(name) or " ".join(base[flag.text])
    return f"{flag.text} {value.replace('PROMPTS', prompts)}"


INSTEAD = [
    *recommended((f"--vllm-{name}", why) for name, why in {**RESERVED, **OWNED_FLAGS}.items()),
    *recommended((f"--{name}", why) for name, why in foreign.ADVICE.items() if why.startswith("write ")),
]


@pytest.mark.parametrize(("about", "name"), INSTEAD)
def test_what_stands_for_a_flag_from_elsewhere_may_be_written(
    problems: Problems, flags: dict[str, list[str]], prompts: str, about: str, name: str
) -> None:
    change, without = CONTEXT.get(name, ("", ()))
    written = words(name, flags, prompts)
    # No flag that the message does not speak of may be what makes it pass.
    gone = {*without, *({"--colocate"} - {written})}
    assert problems(f"{written} {change}", without=gone) == [], about


@pytest.mark.parametrize(
    ("name", "other"),
    [(name, other) for name, needed in NEEDS.items() for other in needed if name not in ELSEWHERE],
)
def test_what_an_option_is_said_to_need_is_enough(
    problems: Problems, flags: dict[str, list[str]], prompts: str, name: str, other: str
) -> None:
    more = [CONTEXT.get(one, ("", ())) for one in (name, other)]
    if name == "kl_loss_coef" or "kl_loss_type" in (name, other):
        flags["--kl-loss-type"] = ["k3"]  # k1 as a loss is refused for another reason
    change = " ".join([words(name, flags, prompts), words(other, flags, prompts), *(change for change, _ in more)])
    assert problems(change, without={flag for _, gone in more for flag in gone}) == []
