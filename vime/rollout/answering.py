"""One round of answering: a rollout or an evaluation, with its connections, its live line and its deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from vime.backends.vllm_utils.generate import AsyncEngineClient
from vime.backends.vllm_utils.sampling import SamplingParams
from vime.config import Config
from vime.errors import VimeError
from vime.observe.progress import Progress
from vime.rollout.answer import SampleClient, answer
from vime.rollout.batch import reward_of
from vime.rollout.data import Prompt
from vime.rollout.groups import Group, all_or_error
from vime.rollout.pool import EnginePool
from vime.rollout.rewards import Rewarder
from vime.rollout.threads import in_thread
from vime.types import EngineAddress, Sample

T = TypeVar("T")


class Engines(Protocol):
    """Who serves (:class:`vime.cluster.serving.Serving`)."""

    def ready(self) -> list[EngineAddress]:
        """Addresses of all engines, once every one has the current weights. May block for minutes."""
        ...

    def recover(self, index: int) -> EngineAddress:
        """Replace engine ``index`` if it has died; its address, a new one if it was replaced. May block for minutes."""
        ...


@dataclass(frozen=True)
class Setting:
    """What all rounds of a run have in common."""

    config: Config
    tokenizer: Any
    engines: Engines
    rewarder: Rewarder
    function: Callable[..., Any] | None  # --custom-generate-function-path
    max_context: int  # tokens of prompt and answer


class Round:
    """Answers prompts, and rewards each answer when it arrives. An async context manager.

    Args:
        setting: the run's.
        sampling: how answers are sampled.
        kind: tells the seeds of this kind of round from those of others: "train", "eval/<name>".
        per_prompt: answers to each prompt.
        progress: the line to count on.
    """

    def __init__(
        self, setting: Setting, sampling: SamplingParams, kind: str, per_prompt: int, progress: Progress
    ) -> None:
        self._setting, self._config, self._rewarder = setting, setting.config, setting.rewarder
        self._sampling, self._kind, self._per_prompt, self._progress = sampling, kind, per_prompt, progress
        self._answered, self._tokens, self._rewards = 0, 0, 0.0
        self._until = 0.0  # on the loop's clock: --rollout-timeout after the round's begin

    async def __aenter__(self) -> Round:
        options, engines = self._config.rollout, self._setting.engines
        self._until = asyncio.get_running_loop().time() + options.rollout_timeout
        self._addresses = await self._before_deadline(
            in_thread(engines.ready),
            lambda within: f"the engines were not ready {within}: one that died before is still being replaced",
        )
        self._pool = EnginePool(
            [self._client(address) for address in self._addresses],
            self._recover,
            concurrency=options.server_concurrency,
            timeout=options.request_timeout,
            retries=options.request_retries,
        )
        self._stack = AsyncExitStack()
        self._stack.push_async_callback(self._pool.close)
        await self._stack.enter_async_context(self._rewarder)
        self._stack.enter_context(self._progress)
        self._start = time.monotonic()
        return self

    async def __aexit__(self, *details: Any) -> None:
        await self._stack.aclose()

    async def within_deadline(self, what: str, work: Awaitable[T]) -> T:
        """Result of ``work``.

        Raises:
            VimeError: it took longer than ``--rollout-timeout``, counted from the round's begin; says how far it got.
        """

        def how_far(within: str) -> str:
            engines = ", ".join(address.url for address in self._addresses)
            done = f"{self._answered} of {self._progress.total} answers {within}"
            return f"{what}: {done}; gave up waiting for the rest from {engines}"

        return await self._before_deadline(work, how_far)

    async def _before_deadline(self, work: Awaitable[T], message: Callable[[str], str]) -> T:
        deadline = asyncio.timeout_at(self._until)
        try:
            async with deadline:
                return await work
        except TimeoutError as error:
            if not deadline.expired():
                raise
            within = f"within --rollout-timeout {self._config.rollout.rollout_timeout:g} s"
            raise VimeError(message(within)) from error

    async def group(self, prompt: Prompt) -> Group:
        """All answers to one prompt, rewarded."""
        first = prompt.position * self._per_prompt
        samples = await all_or_error(self._one(prompt, first + number) for number in range(self._per_prompt))
        if self._rewarder.by_group:
            await self._rewarder.score_group(samples)
            for sample in samples:
                self._count(sample)
        return samples

    def reject(self) -> None:
        """A group was filtered out: its answers do not count."""
        self._progress.update(-self._per_prompt)

    async def _one(self, prompt: Prompt, index: int) -> Sample:
        setting, row = self._setting, prompt.row
        sample = Sample(
            index=index,
            group_index=prompt.position,
            prompt=row.prompt,
            prompt_tokens=list(prompt.tokens),
            label=row.label,
            metadata=dict(row.metadata),
            tools=row.tools,
        )
        seed, place = self._config.data.rollout_seed, (self._kind, index)
        client = SampleClient(self._pool, self._sampling, setting.tokenizer, setting.max_context, seed, place)
        sample = await answer(self._config, sample, client, setting.function)
        if not self._rewarder.by_group:
            if sample.reward is None:  # the user's generate function may have rewarded it
                await self._rewarder.score(sample)
            self._count(sample)
        return sample

    def _count(self, sample: Sample) -> None:
        self._answered += 1
        self._tokens += len(sample.response_tokens)
        self._rewards += reward_of(sample)
        speed = self._tokens / max(time.monotonic() - self._start, 1e-3)
        self._progress.update()
        self._progress.note(f"reward {self._rewards / self._answered:.2f} · {speed:.0f} tokens/s")

    def _client(self, address: EngineAddress) -> AsyncEngineClient:
        client = AsyncEngineClient(address.url, address.index, log=address.log)
        client.weight_version = getattr(self._setting.engines, "version", None)
        return client

    async def _recover(self, index: int, url: str) -> AsyncEngineClient | None:
        address = await in_thread(self._setting.engines.recover, index)
        return None if address.url.rstrip("/") == url else self._client(address)
