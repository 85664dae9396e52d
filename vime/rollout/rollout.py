"""From prompts to rewarded answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from vime.backends.vllm_utils.command import max_model_len
from vime.backends.vllm_utils.sampling import SamplingParams
from vime.config import Config
from vime.errors import ConfigError, VimeError
from vime.models.spec import spec_from_hf
from vime.observe.progress import Progress
from vime.rollout import batch
from vime.rollout.answering import Engines, Round, Setting
from vime.rollout.data import PromptDataset
from vime.rollout.functions import load_function
from vime.rollout.groups import Group, all_or_error, collect_groups
from vime.rollout.rewards import Rewarder, custom
from vime.rollout.suspicions import Suspicions
from vime.types import Sample, TrainBatch


class Rollout:
    """Draws prompts, has them answered, rewards the answers as they arrive.

    An answer depends on the weights, its prompt, ``--rollout-seed`` and its place in the run only, so a run that is
    continued from :meth:`state_dict` makes the same ones.

    Args:
        config: the run's options.
        tokenizer: Hugging Face tokenizer of the checkpoint.
        engines: who answers; None where nobody has to (``--loss-type sft_loss``), or :meth:`answer_with` says later.

    Attributes:
        prompts: the run's prompts; their number is that of one epoch.
        eval_samples: by the set's name, the answers of the last :meth:`evaluate`.

    Raises:
        ConfigError, DataError: options or files that cannot work.
    """

    def __init__(self, config: Config, tokenizer: Any, engines: Engines | None = None) -> None:
        self._config, self._tokenizer = config, tokenizer
        self._sft = config.train.loss_type == "sft_loss"
        if config.data.prompt_data is None:
            raise ConfigError(["--prompt-data is missing"])
        if self._sft and config.rollout.n_samples_per_prompt != 1:
            number = config.rollout.n_samples_per_prompt
            raise ConfigError(
                [f"--loss-type sft_loss learns each answer once: --n-samples-per-prompt {number} must be 1"]
            )
        spec = spec_from_hf(config.checkpoint.hf_checkpoint)
        self._eos, self._max_context = spec.eos_token_ids, max_model_len(config, spec)
        rollout, reward = config.rollout, None if self._sft else Rewarder(config)
        self._setting: Setting | None = None
        self._suspicions = self._filter = self._function = None
        if reward is not None:
            path, flag = rollout.custom_generate_function_path, "--custom-generate-function-path"
            self._function = load_function(path, flag) if path else None
            path, flag = rollout.dynamic_sampling_filter_path, "--dynamic-sampling-filter-path"
            self._filter = load_function(path, flag) if path else None
            self._suspicions = Suspicions(reward)
        self._rewarder = reward
        if engines is not None:
            self.answer_with(engines)
        self.prompts = self._dataset(config.data.prompt_data)
        self._eval_sets = {name: self._dataset(path) for name, path in _pairs(config.eval.eval_prompt_data)}
        self.eval_samples: dict[str, list[Sample]] = {}
        self._rejected = 0

    def _dataset(self, path: str) -> PromptDataset:
        if self._sft:
            return PromptDataset(path, self._config.data, self._tokenizer, max_tokens=self._max_context, sft=True)
        limit = self._max_context - 1  # one token of answer at least
        if self._config.data.rollout_max_prompt_len is not None:
            limit = min(limit, self._config.data.rollout_max_prompt_len)
        return PromptDataset(path, self._config.data, self._tokenizer, max_tokens=limit)

    def answer_with(self, engines: Engines) -> None:
        """Have ``engines`` answer, where they were not there yet when the rollout was made."""
        if self._rewarder is not None:
            self._setting = Setting(
                self._config, self._tokenizer, engines, self._rewarder, self._function, self._max_context
            )

    def generate(self, rollout_id: int) -> list[Sample]:
        """The answers of one rollout, rewarded: groups in the prompts' order, ``n_samples_per_prompt`` each.

        Raises:
            VimeError: not all answers within ``--rollout-timeout``, an engine that cannot be replaced, a reward that
                cannot be had. Never fewer answers than asked for.
        """
        return asyncio.run(self._generate(rollout_id))

    def evaluate(self, rollout_id: int) -> dict[str, float]:
        """Answer every evaluation prompt; ``eval/<name>/{reward_mean,response_length_mean,truncated_fraction}``.

        The seeds are the same at every evaluation, so that curves move by what was learned alone.
        """
        return asyncio.run(self._evaluate(rollout_id))

    def longest(self, evaluation: bool = False) -> float:
        """Seconds after which :meth:`generate` or :meth:`evaluate` must have ended by its own deadlines."""
        rounds = len(self._eval_sets) if evaluation else 1
        return rounds * self._config.rollout.rollout_timeout + 60

    def sft_batch(self, rollout_id: int) -> TrainBatch:
        """The next ``rollout_batch_size`` rows with the answers that stand in them (``--loss-type sft_loss``)."""
        prompts = self.prompts.take(self._config.rollout.rollout_batch_size)
        examples = [self.prompts.encoder.example(prompt.row) for prompt in prompts]
        return TrainBatch(
            tokens=[example.prompt_tokens + example.response_tokens for example in examples],
            response_lengths=[len(example.response_tokens) for example in examples],
            loss_masks=[example.loss_mask for example in examples],
            rewards=[0.0] * len(examples),
            group_ids=[prompt.position for prompt in prompts],
        )

    def metrics(self, samples: Sequence[Sample]) -> dict[str, float]:
        """What :func:`vime.rollout.batch.metrics` says, and how many groups the filter rejected for these."""
        numbers = batch.metrics(samples)
        return numbers if self._filter is None else {**numbers, "rollout/rejected_groups": float(self._rejected)}

    def to_train_batch(self, samples: Sequence[Sample]) -> TrainBatch:
        return batch.to_train_batch(samples)

    def state_dict(self) -> dict[str, Any]:
        """What a continued run needs; plain JSON."""
        return {"prompts": self.prompts.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.prompts.load_state_dict(state["prompts"])

    def close(self) -> None:
        """End the processes that rewards use."""
        if self._rewarder is not None:
            self._rewarder.close()

    async def _generate(self, rollout_id: int) -> list[Sample]:
        options = self._config.rollout
        size, per_prompt = options.rollout_batch_size, options.n_samples_per_prompt
        start = self.prompts.drawn
        async with self._round("train", per_prompt, Progress("sampling", size * per_prompt, "answers")) as round:
            work = collect_groups(
                self.prompts,
                size,
                round.group,
                keep=self._keep if self._filter else None,
                at_once=options.over_sampling_batch_size,
                rejected=round.reject,
            )
            groups = await round.within_deadline(f"rollout {rollout_id}", work)
        self._rejected = self.prompts.drawn - start - size
        samples = [sample for group in groups for sample in group]
        if len(samples) != size * per_prompt:
            raise VimeError(f"rollout {rollout_id}: {len(samples)} answers instead of {size * per_prompt}")
        for position, sample in enumerate(samples):
            sample.index = rollout_id * size * per_prompt + position
        if self._suspicions is not None:
            self._suspicions.look(samples, f"rollout {rollout_id}")
        return samples

    async def _evaluate(self, rollout_id: int) -> dict[str, float]:
        per_prompt = self._config.eval.n_samples_per_eval_prompt
        self.eval_samples, numbers = {}, {}
        for name, dataset in self._eval_sets.items():
            progress = Progress(name, len(dataset) * per_prompt, "answers")
            async with self._round(f"eval/{name}", per_prompt, progress, evaluation=True) as round:
                work = all_or_error(round.group(prompt) for prompt in dataset.all())
                groups = await round.within_deadline(f"evaluation '{name}' at rollout {rollout_id}", work)
            samples = self.eval_samples[name] = [sample for group in groups for sample in group]
            for key, value in batch.metrics(samples, f"eval/{name}").items():
                if key.endswith(("reward_mean", "response_length_mean", "truncated_fraction")):
                    numbers[key] = value
        return numbers

    def _round(self, kind: str, per_prompt: int, progress: Progress, evaluation: bool = False) -> Round:
        if self._setting is None:
            raise VimeError("nobody to answer: this run has no engines")
        sampling = SamplingParams.from_config(self._config, evaluation=evaluation, eos_token_ids=self._eos)
        return Round(self._setting, sampling, kind, per_prompt, progress)

    async def _keep(self, group: Group) -> bool:
        assert self._filter is not None
        flag, seconds = "--dynamic-sampling-filter-path", self._config.reward.rm_timeout
        return bool(await custom.call(self._filter, flag, seconds, self._config, group))


def _pairs(words: Sequence[str]) -> list[tuple[str, str]]:
    if len(words) % 2:
        raise ConfigError([f"--eval-prompt-data takes NAME PATH pairs, got {len(words)} words: {' '.join(words)}"])
    pairs = list(zip(words[::2], words[1::2], strict=True))
    if len(dict(pairs)) != len(pairs):
        raise ConfigError([f"--eval-prompt-data: a name stands twice: {' '.join(words[::2])}"])
    return pairs
