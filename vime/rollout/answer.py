"""One answer: the request for it, or the user's own generate function, and the checks of what came back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vime.config import Config
from vime.errors import VimeError
from vime.rollout import seeds
from vime.rollout.pool import EnginePool
from vime.rollout.rewards import custom
from vime.types import Sample, Status

if TYPE_CHECKING:
    from vime.backends.vllm_utils.generate import Generation
    from vime.backends.vllm_utils.sampling import SamplingParams

_STATUS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}


class SampleClient:
    """The engines as one answer sees them; what ``--custom-generate-function-path`` gets as ``client``.

    Attributes:
        sampling: the run's sampling parameters.
        tokenizer: the Hugging Face tokenizer.
        max_context: tokens of prompt and answer at most.
    """

    def __init__(
        self,
        pool: EnginePool,
        sampling: SamplingParams,
        tokenizer: Any,
        max_context: int,
        rollout_seed: int,
        place: tuple[int | str, ...],
    ) -> None:
        self._pool, self.sampling, self.tokenizer, self.max_context = pool, sampling, tokenizer, max_context
        self._seed, self._place, self._requests = rollout_seed, place, 0

    async def generate(self, token_ids: Sequence[int], max_tokens: int | None = None) -> Generation:
        """Continue ``token_ids``. Every request of the same answer has a seed of its own, in their order.

        Args:
            token_ids: the whole context so far.
            max_tokens: at most so many new tokens (default: the run's limit); less where the context ends before.

        Raises:
            EngineError: no answer; see :class:`vime.rollout.pool.EnginePool`.
            VimeError: no room is left in the context.
        """
        room = self.max_context - len(token_ids)
        if room < 1:
            raise VimeError(f"{len(token_ids)} tokens leave no room for an answer in a context of {self.max_context}")
        place = (*self._place, self._requests) if self._requests else self._place
        self._requests += 1
        sampling = dataclasses.replace(
            self.sampling,
            max_tokens=min(self.sampling.max_tokens if max_tokens is None else max_tokens, room),
            seed=seeds.request_seed(self._seed, *place),
        )
        return await self._pool.generate(token_ids, sampling, "-".join(map(str, place)).replace("/", "."))


async def answer(config: Config, sample: Sample, client: SampleClient, function: Callable[..., Any] | None) -> Sample:
    """Fill in response, log-probs, loss mask and status.

    Raises:
        EngineError: no engine gave an answer.
        VimeError: the user's function failed, or what it returned does not fit together.
    """
    if function is None:
        generation = await client.generate(sample.prompt_tokens)
        sample.response_tokens = list(generation.token_ids)
        sample.log_probs = list(generation.log_probs)
        sample.status = _STATUS[generation.finish_reason]
        sample.weight_versions = list(generation.weight_versions)
    else:
        flag, seconds = "--custom-generate-function-path", config.rollout.rollout_timeout
        place = (sample.index, sample.group_index)
        sample = await custom.call(function, flag, seconds, config, sample, client)
        if not isinstance(sample, Sample):
            raise VimeError(f"{flag} must return a Sample, it returned {type(sample).__name__}")
        if (sample.index, sample.group_index) != place:
            raise VimeError(f"{flag} must keep index and group_index of the sample, {place} became another")
    if not sample.loss_mask:
        sample.loss_mask = [1] * len(sample.response_tokens)
    # Also of one engine request: text is not asked of the engine, so that it never differs from the tokens learned.
    sample.response = sample.response or client.tokenizer.decode(sample.response_tokens, skip_special_tokens=True)
    _check(sample)
    return sample


def _check(sample: Sample) -> None:
    tokens, name = len(sample.response_tokens), f"answer {sample.index}"
    if tokens == 0:
        raise VimeError(f"{name} has no tokens")
    if len(sample.log_probs) != tokens or len(sample.loss_mask) != tokens:
        raise VimeError(
            f"{name} has {tokens} response tokens, {len(sample.log_probs)} log-probs and {len(sample.loss_mask)} mask "
            "entries: must be equal"
        )
    if sample.status is Status.ABORTED:
        raise VimeError(f"{name} is only a part (status aborted): it must be asked for again")
