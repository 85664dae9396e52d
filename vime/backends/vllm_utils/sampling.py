"""How one answer is sampled, in the words of vLLM's own SamplingParams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vime.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """One request asks for one answer. There is no ``n``: vLLM loses answers of n > 1 on the token route."""

    max_tokens: int
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = -1  # -1: all tokens
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False
    min_tokens: int = 0

    @classmethod
    def from_config(
        cls, config: Config, *, evaluation: bool = False, eos_token_ids: Sequence[int] = ()
    ) -> SamplingParams:
        """The run's settings, with the ``--eval-*`` ones in front of them for an evaluation.

        ``eos_token_ids`` end an answer whatever the tokenizer's own end token is (the checkpoint may name several).
        """
        rollout, evaluate = config.rollout, config.eval
        temperature, top_p = rollout.rollout_temperature, rollout.rollout_top_p
        max_tokens = rollout.rollout_max_response_len
        if evaluation:
            temperature = temperature if evaluate.eval_temperature is None else evaluate.eval_temperature
            top_p = top_p if evaluate.eval_top_p is None else evaluate.eval_top_p
            max_tokens = evaluate.eval_max_response_len or max_tokens
        return cls(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=rollout.rollout_top_k,
            stop=tuple(rollout.rollout_stop),
            stop_token_ids=tuple(dict.fromkeys([*rollout.rollout_stop_token_ids, *eos_token_ids])),
        )

    def body(self) -> dict[str, Any]:
        """The ``sampling_params`` of ``/inference/v1/generate``. Text is made only where stop strings need it."""
        body: dict[str, Any] = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "logprobs": 0,  # of the sampled token alone
            "detokenize": bool(self.stop),
        }
        if self.stop:
            body |= {"stop": list(self.stop), "include_stop_str_in_output": True}
        if self.stop_token_ids:
            body["stop_token_ids"] = list(self.stop_token_ids)
        if self.seed is not None:
            body["seed"] = self.seed
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.min_tokens:
            body["min_tokens"] = self.min_tokens
        return body
