"""A program that runs the training loop and, after every sync, compares the engine with transformers.

``python -m tests.e2e.after_every_sync FOLDER FLAGS``: exports the weights to FOLDER after every sync and asks every
engine for greedy answers, which must be those of transformers on the exported directory. Prints what it compared.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from pathlib import Path
from typing import Any

from vime.cluster.process import start_of_process
from vime.config.parse import parse
from vime.types import EngineAddress

PROMPTS = [[5, 6, 7, 8], [400, 300, 200, 100, 9, 8, 7, 6], [11]]
TOKENS = 24


async def engine_answers(address: EngineAddress) -> list[list[int]]:
    from vime.backends.vllm_utils.generate import AsyncEngineClient
    from vime.backends.vllm_utils.sampling import SamplingParams

    sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0)
    async with AsyncEngineClient(address.url, address.index) as client:
        answers = [await client.generate(prompt, sampling, f"greedy-{i}") for i, prompt in enumerate(PROMPTS)]
    return [answer.token_ids for answer in answers]


def transformers_answers(directory: Path) -> list[list[int]]:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False, pad_token_id=0
        )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def main() -> None:
    folder, config = Path(sys.argv[1]), parse(sys.argv[2:])
    start_of_process(config.cluster.existing_ray)
    from vime.run import open_run

    seen: list[list[list[int]]] = []
    with open_run(config) as run:
        assert run.serving is not None
        run.serving.start(version=0)
        for rollout_id in range(run.num_rollout + 1):
            directory = folder / str(rollout_id)
            run.trainer.save_hf(directory)
            expected = transformers_answers(directory)
            for address in run.serving.ready():
                assert asyncio.run(engine_answers(address)) == expected, f"engine {address.index}, version {rollout_id}"
            seen.append(expected)
            if rollout_id < run.num_rollout:
                samples = run.rollout.generate(rollout_id)
                run.serving.to_trainer()
                run.trainer.train(rollout_id, run.rollout.to_train_batch(samples))
                run.serving.to_engines(version=rollout_id + 1)
    assert all(before != after for before, after in itertools.pairwise(seen)), "the weights did not change"
    print(f"{len(seen)} versions: greedy answers equal")


if __name__ == "__main__":
    main()
