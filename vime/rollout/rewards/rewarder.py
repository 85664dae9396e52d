"""Gives every answer its reward, by ``--rm-type`` or ``--custom-rm-path``."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

from vime.config import Config
from vime.config.rollout import LABELLED, RM_TYPES
from vime.errors import ConfigError, DataError, VimeError
from vime.rollout.functions import load_function
from vime.rollout.rewards import boxed_math, custom, dapo, deepscaler
from vime.rollout.rewards.f1 import f1
from vime.rollout.rewards.mathematics import MathGrader
from vime.rollout.rewards.remote import RemoteReward
from vime.types import Sample

MATHEMATICAL: dict[str, ModuleType] = {"deepscaler": deepscaler, "math": boxed_math, "dapo": dapo}
COMPARING: dict[str, Callable[[str, Any], Any]] = {"f1": f1}  # of response and label
_MATH_SECONDS = 10.0  # sympy needs milliseconds; what takes longer is an answer made to take longer


class Rewarder:
    """Sets ``sample.reward`` and ``sample.reward_info``.

    A prompt's ``metadata["rm_type"]`` goes before ``--rm-type``, so that one file may mix kinds of problems. Use as an
    async context manager around each batch of calls (it holds the connections of ``remote_rm``), and :meth:`close` it
    at the end of the run.

    Raises:
        ConfigError: options that do not fit together, or a function that cannot be loaded.
    """

    def __init__(self, config: Config) -> None:
        self._config, options = config, config.reward
        self._options = options
        self._function = load_function(options.custom_rm_path, "--custom-rm-path") if options.custom_rm_path else None
        problems = []
        if self._function is None and options.group_rm:
            problems.append("--group-rm needs --custom-rm-path")
        if options.rm_type in LABELLED and self._function is None and config.data.label_key is None:
            problems.append(f"--rm-type {options.rm_type} compares with the right answer: --label-key is missing")
        if options.rm_type == "remote_rm" and not options.rm_url:
            problems.append("--rm-type remote_rm needs --rm-url")
        if problems:
            raise ConfigError(problems)
        self._remote = RemoteReward(options.rm_url, options.rm_timeout) if options.rm_url else None
        self._grader = MathGrader(min(_MATH_SECONDS, options.rm_timeout))

    @property
    def by_group(self) -> bool:
        """Whether all answers to a prompt are rewarded in one call."""
        return self._options.group_rm

    async def __aenter__(self) -> Rewarder:
        if self._remote is not None:
            await self._remote.__aenter__()
        return self

    async def __aexit__(self, *details: object) -> None:
        if self._remote is not None:
            await self._remote.__aexit__(*details)

    def close(self) -> None:
        """End the processes that compare mathematical answers."""
        self._grader.close()

    async def score(self, sample: Sample) -> None:
        """Reward one answer.

        Raises:
            VimeError: no reward could be had, or it is not a finite number.
        """
        if self._function is not None:
            seconds = self._options.rm_timeout
            value = await custom.call(self._function, "--custom-rm-path", seconds, self._config, sample)
        else:
            value = await self._built_in(sample)
        self._set(sample, value)

    async def score_group(self, samples: list[Sample]) -> None:
        """Reward all answers to one prompt in one call of the user's function (``--group-rm``)."""
        assert self._function is not None
        seconds = self._options.rm_timeout
        values = await custom.call(self._function, "--custom-rm-path", seconds, self._config, samples)
        if not isinstance(values, list | tuple) or len(values) != len(samples):
            raise VimeError(
                f"--custom-rm-path {self._options.custom_rm_path} with --group-rm must return a list of "
                f"{len(samples)} rewards, it returned {values!r:.100}"
            )
        for sample, value in zip(samples, values, strict=True):
            self._set(sample, value)

    def kind(self, sample: Sample) -> str | None:
        """The built-in reward of this answer; None: the user's function."""
        return None if self._function is not None else sample.metadata.get("rm_type") or self._options.rm_type

    async def _built_in(self, sample: Sample) -> Any:
        kind = self.kind(sample)
        if kind in LABELLED and sample.label is None:
            raise DataError(f"the prompt of answer {sample.index} has no label, which reward '{kind}' compares with")
        if kind in MATHEMATICAL:
            module = MATHEMATICAL[kind]
            answer = module.extract(sample.response)
            right = answer is not None and await self._grader.equal(sample.label, answer)
            sample.reward_info = {"answer": answer, "correct": right}
            return module.RIGHT if right else module.WRONG
        if kind in COMPARING:
            return COMPARING[kind](sample.response, sample.label)
        if kind == "random":
            return random.Random(f"{self._config.data.rollout_seed}/random/{sample.index}").randint(0, 1)
        if kind == "remote_rm":
            if self._remote is None:
                raise ConfigError(["--rm-type remote_rm needs --rm-url"])
            return await self._remote.score(sample)
        known = ", ".join(RM_TYPES)
        if kind is None:
            raise ConfigError([f"nothing says what an answer is worth: --rm-type ({known}) or --custom-rm-path"])
        raise ConfigError([f"no reward '{kind}': --rm-type (or a prompt's metadata) may be {known}"])

    def _set(self, sample: Sample, value: Any) -> None:
        if isinstance(value, dict):
            sample.reward_info = {**sample.reward_info, **value}
            key = self._options.reward_key
            if key is None or key not in value:
                wanted = "--reward-key says which entry counts" if key is None else f"no '{key}' (--reward-key) in it"
                raise VimeError(f"the reward of answer {sample.index} is a dictionary ({', '.join(value)}): {wanted}")
            value = value[key]
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise VimeError(f"the reward of answer {sample.index} is {value!r:.100}; it must be a finite number")
        sample.reward = number
