"""What the parts of vime hand to each other. Plain data: no torch, no Ray, no Megatron, no vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    COMPLETED = "completed"  # ended by a stop token or stop string
    TRUNCATED = "truncated"  # ended by the length limit
    ABORTED = "aborted"  # ended by us (an engine paused or died); never trained on


@dataclass(slots=True)
class Sample:
    """One answer to one prompt, from the prompt file to the trainer."""

    index: int  # position in the run: rollout_id * rollout_batch_size * n_samples_per_prompt + position in the batch
    group_index: int  # answers to the same prompt share it (the prompt's own position in the run)
    prompt: str | list[dict[str, Any]]
    prompt_tokens: list[int]
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] | None = None
    response: str = ""
    response_tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)  # the engine's, of the sampled tokens, one each
    loss_mask: list[int] = field(default_factory=list)  # 1: this response token is learned from; one each
    status: Status = Status.COMPLETED
    reward: float | None = None
    reward_info: dict[str, Any] = field(default_factory=dict)  # what the reward function says beside the number
    weight_versions: list[int] = field(default_factory=list)  # versions of the weights that produced it, in order


@dataclass(slots=True)
class TrainBatch:
    """A whole rollout as the trainer takes it; every list has one entry per answer, in the same order."""

    tokens: list[list[int]]  # prompt followed by response
    response_lengths: list[int]
    loss_masks: list[list[int]]  # over the response tokens
    rewards: list[float]
    group_ids: list[int]
    rollout_log_probs: list[list[float]] | None = None  # None where no engine produced the answers (SFT)


@dataclass(frozen=True, slots=True)
class Slot:
    """The trainer ranks [start, end) that share their GPUs with one engine, which has end - start workers."""

    start: int
    end: int

    @property
    def leader(self) -> int:
        return self.start

    def __contains__(self, rank: object) -> bool:
        return isinstance(rank, int) and self.start <= rank < self.end


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """How to reach one engine. ``slot`` is None for an engine that shares no GPU with a trainer rank; ``log`` is the
    file, on its node, that takes the output of its processes."""

    index: int
    url: str
    world_size: int
    slot: Slot | None
    node: str = "127.0.0.1"
    log: str | None = None
