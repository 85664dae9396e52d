"""Rollouts by a real vLLM engine."""

from __future__ import annotations

import json

from transformers import AutoTokenizer

from tests.engine import TinyEngine, tiny_config
from vime.rollout.rollout import Rollout
from vime.types import EngineAddress, Status


class Served:
    def __init__(self, engine: TinyEngine) -> None:
        self._addresses = [EngineAddress(0, engine.url, 1, None)]

    def ready(self) -> list[EngineAddress]:
        return self._addresses

    def recover(self, index: int) -> EngineAddress:
        return self._addresses[index]


def test_a_run_is_reproducible_bit_for_bit_and_can_be_continued(engine: TinyEngine, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"def f{i}(", "label": "1"}) + "\n" for i in range(10)))
    tokenizer = AutoTokenizer.from_pretrained(engine.checkpoint)

    def rollout(concurrency: int) -> Rollout:
        config = tiny_config(engine.checkpoint, rollout_max_response_len=24, server_concurrency=concurrency)
        config.data.prompt_data, config.data.input_key, config.data.label_key = str(path), "prompt", "label"
        config.data.rollout_shuffle = True
        config.reward.rm_type = "random"
        return Rollout(config, tokenizer, Served(engine))

    whole = rollout(32)
    first, second = whole.generate(0), whole.generate(1)
    alone = rollout(3)  # other batches in the engine
    assert alone.generate(0) == first
    continued = rollout(32)
    continued.load_state_dict(json.loads(json.dumps(alone.state_dict())))
    assert continued.generate(1) == second

    assert len(first) == 32
    assert len({tuple(sample.response_tokens) for sample in first}) == 32  # every answer has its own seed
    for sample in first + second:
        assert len(sample.log_probs) == len(sample.response_tokens) == len(sample.loss_mask)
        assert all(log_prob <= 0 for log_prob in sample.log_probs)
        ended = sample.response_tokens[-1] == tokenizer.eos_token_id
        assert (sample.status is Status.COMPLETED) == ended
        assert ended or len(sample.response_tokens) == 24
    numbers = whole.metrics(second)
    assert numbers["rollout/response_length_mean"] == sum(len(sample.response_tokens) for sample in second) / 32
