"""Answers of the real engine against transformers, and what the client does with answers that are not whole."""

from __future__ import annotations

import asyncio
import copy
import random
from functools import cache
from typing import Any

import pytest
import requests
import torch

from tests.engine import TinyEngine, eventually
from vime.backends.vllm_utils.client import LOADED_AT_START, AsyncEngineClient, Generation, SamplingParams
from vime.backends.vllm_utils.generate import parse_generation
from vime.errors import EngineError

LONG = SamplingParams(max_tokens=1900, ignore_eos=True, seed=1)


def prompt(seed: int, length: int = 12) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(3, 512) for _ in range(length)]


def ask(engine: TinyEngine, requests_: list[tuple[list[int], SamplingParams]]) -> list[Generation]:
    async def main() -> list[Generation]:
        async with AsyncEngineClient(engine.url, timeout=60) as client:
            return await asyncio.gather(*[client.generate(p, s, f"t{i}") for i, (p, s) in enumerate(requests_)])

    return asyncio.run(main())


@cache
def model(checkpoint: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@torch.no_grad()
def logits_of_response(checkpoint: str, tokens: list[int], response: list[int]) -> torch.Tensor:
    """Logits [len(response), vocabulary] that predict each response token, by transformers in fp32."""
    logits = model(checkpoint)(torch.tensor([tokens + response])).logits[0]
    return logits[len(tokens) - 1 : -1]


def running(engine: TinyEngine) -> float:
    lines = requests.get(engine.url + "/metrics", timeout=10).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running"))


def test_greedy_answers_equal_those_of_transformers(engine: TinyEngine) -> None:
    greedy = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)
    prompts = [prompt(seed, 5 + 9 * seed) for seed in range(4)]
    for tokens, answer in zip(prompts, ask(engine, [(p, greedy) for p in prompts]), strict=True):
        expected = model(engine.checkpoint).generate(
            torch.tensor([tokens]), max_new_tokens=32, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert answer.token_ids == expected[0, len(tokens) :].tolist()
        assert answer.finish_reason == "length"


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, -1), (0.6, -1), (1.7, -1), (0.8, 20)])
def test_log_probs_are_those_of_the_distribution_sampled_from(
    engine: TinyEngine, temperature: float, top_k: int
) -> None:
    sampling = SamplingParams(max_tokens=48, temperature=temperature, top_k=top_k, seed=5, ignore_eos=True)
    tokens = prompt(1)
    (answer,) = ask(engine, [(tokens, sampling)])
    logits = logits_of_response(engine.checkpoint, tokens, answer.token_ids) / temperature
    if top_k > 0:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
    # 1e-5: the same fp32 sums in another order (vLLM's fused projections and its attention by blocks)
    torch.testing.assert_close(torch.tensor(answer.log_probs), expected, atol=1e-5, rtol=0)
    assert len(set(answer.token_ids)) > 5  # it was sampled, not argmax


def test_a_seed_repeats_an_answer_bit_for_bit_whatever_else_runs(engine: TinyEngine) -> None:
    sampled = [(prompt(i), SamplingParams(max_tokens=24, seed=i, ignore_eos=True)) for i in range(6)]
    together = ask(engine, sampled)
    alone = [ask(engine, [one])[0] for one in sampled]
    assert together == alone
    assert together[0].token_ids != ask(engine, [(prompt(0), SamplingParams(max_tokens=24, seed=9))])[0].token_ids


def test_answers_end_at_stop_tokens_and_strings_with_the_end_included(engine: TinyEngine) -> None:
    full = ask(engine, [(prompt(2), SamplingParams(max_tokens=24, seed=3, ignore_eos=True))])[0]
    end = full.token_ids[7]
    first = full.token_ids.index(end)
    by_token = SamplingParams(max_tokens=24, seed=3, ignore_eos=True, stop_token_ids=(end,))
    from transformers import AutoTokenizer

    text = AutoTokenizer.from_pretrained(engine.checkpoint).decode(full.token_ids[:12])
    by_text = SamplingParams(max_tokens=24, seed=3, ignore_eos=True, stop=(text[4:7],))
    token_answer, text_answer = ask(engine, [(prompt(2), by_token), (prompt(2), by_text)])
    assert (token_answer.finish_reason, token_answer.stop_reason) == ("stop", end)
    assert token_answer.token_ids == full.token_ids[: first + 1]
    assert token_answer.log_probs == full.log_probs[: first + 1]
    assert (text_answer.finish_reason, text_answer.stop_reason) == ("stop", text[4:7])
    assert text_answer.token_ids == full.token_ids[: len(text_answer.token_ids)]


def test_end_token_of_the_checkpoint_ends_an_answer(engine: TinyEngine) -> None:
    answers = ask(engine, [(prompt(i), SamplingParams(max_tokens=1500, seed=i)) for i in range(4)])
    for answer in answers:  # about one token in 500 is the end token of this random model
        assert (answer.finish_reason == "stop") == (answer.token_ids[-1] == 2)
        assert 2 not in answer.token_ids[:-1]
    assert any(answer.finish_reason == "stop" for answer in answers)


def test_more_prompts_than_fit_into_a_step_are_answered_and_keep_their_seeds(engine: TinyEngine) -> None:
    """Else vLLM splits the last prompt of a step, and where its request has a seed it ends on a CPU: "CPU Generator
    does not use offset". The prompts come while the first one is computed, and are more than three steps take."""
    asked = [
        (prompt(seed, 1500 + seed), SamplingParams(max_tokens=4, temperature=1.0, ignore_eos=True, seed=seed))
        for seed in range(16)
    ]
    together = ask(engine, asked)
    alone = [ask(engine, [one])[0] for one in asked]
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]


def test_pause_aborts_what_runs_and_holds_back_what_comes(engine: TinyEngine) -> None:
    async def main() -> tuple[list[Generation], Generation]:
        async with AsyncEngineClient(engine.url, timeout=60) as client:
            tasks = [asyncio.create_task(client.generate(prompt(i), LONG, f"long{i}")) for i in range(3)]
            await asyncio.to_thread(eventually, lambda: running(engine) == 3)
            await asyncio.to_thread(engine.client.pause, "abort")
            aborted = await asyncio.gather(*tasks)
            assert engine.client.is_paused()
            late = asyncio.create_task(client.generate(prompt(9), SamplingParams(max_tokens=4), "late"))
            done, _ = await asyncio.wait([late], timeout=0.3)
            assert not done, "a paused engine answered"
            await asyncio.to_thread(engine.client.resume)
            return aborted, await late

    aborted, late = asyncio.run(main())
    assert [answer.finish_reason for answer in aborted] == ["abort"] * 3
    for answer in aborted:
        assert 0 <= len(answer.token_ids) < 1900
        assert len(answer.log_probs) == len(answer.token_ids)
    assert len(late.token_ids) == 4


def test_an_answer_across_an_update_names_both_versions(engine: TinyEngine) -> None:
    def label(version: str) -> None:
        engine.client.pause("keep")
        requests.post(
            engine.url + "/update_weight_version", json={"new_version": version}, timeout=10
        ).raise_for_status()
        engine.client.resume()

    async def main() -> Generation:
        async with AsyncEngineClient(engine.url, timeout=60) as client:
            task = asyncio.create_task(client.generate(prompt(0), LONG, "spans"))
            await asyncio.to_thread(eventually, lambda: running(engine) == 1)
            await asyncio.to_thread(label, "8")
            return await task

    label("7")
    assert ask(engine, [(prompt(0), SamplingParams(max_tokens=2))])[0].weight_versions == [7]
    answer = asyncio.run(main())
    assert answer.weight_versions == [7, 8]
    assert len(answer.token_ids) == 1900
    assert engine.client.weight_version() == 8
    label("default")
    assert engine.client.weight_version() == LOADED_AT_START


@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_a_request_given_up_is_aborted_in_the_engine(engine: TinyEngine, how: str) -> None:
    """The engine is frozen meanwhile, so the request cannot end by itself, only by being aborted."""

    async def main() -> None:
        async with AsyncEngineClient(engine.url, timeout=60) as client:
            timeout = 4.0 if how == "deadline" else None
            task = asyncio.create_task(client.generate(prompt(0), LONG, how, timeout=timeout))
            await asyncio.to_thread(eventually, lambda: running(engine) == 1)
            await asyncio.to_thread(engine.client.pause, "keep")
            assert [running(engine) for _ in range(5)] == [1] * 5
            if how == "cancel":
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                with pytest.raises(EngineError, match=r"engine 0 .*generate failed: no answer within 4 s") as caught:
                    await task
                assert caught.value.retryable
                assert not caught.value.unreachable
            await asyncio.to_thread(eventually, lambda: running(engine) == 0)

    try:
        asyncio.run(main())
    finally:
        engine.client.resume()


def test_an_answer_ends_where_the_context_does(engine: TinyEngine) -> None:
    (answer,) = ask(engine, [(prompt(0, 2000), SamplingParams(max_tokens=100, ignore_eos=True))])
    assert (len(answer.token_ids), answer.finish_reason) == (48, "length")


def test_bad_requests_are_not_asked_again(engine: TinyEngine) -> None:
    with pytest.raises(EngineError, match=r"answered 400: .*2048") as caught:
        ask(engine, [(prompt(0, 2100), SamplingParams(max_tokens=1))])
    assert not caught.value.retryable
    assert caught.value.status == 400


def test_nobody_there(engine: TinyEngine) -> None:
    async def main() -> None:
        async with AsyncEngineClient("http://127.0.0.1:9", 3) as client:
            await client.generate([5], SamplingParams(max_tokens=1), "x")

    with pytest.raises(EngineError, match=r"engine 3 \(http://127.0.0.1:9\)") as caught:
        asyncio.run(main())
    assert caught.value.retryable
    assert caught.value.unreachable


# ---- replies, without an engine ----


def reply(version: str = "0.32") -> dict[str, Any]:
    content: list[dict[str, Any]] = [{"token_id": 5, "logprob": -0.5}, {"token_id": 6, "logprob": -1.5}]
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop", "token_ids": [5, 6]}
    if version == "0.32":
        spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]
        choice |= {"stop_reason": 6, "weight_versions": spans}
    else:
        content = [{"token": f"token_id:{entry['token_id']}", "logprob": entry["logprob"]} for entry in content]
    return {"choices": [choice | {"logprobs": {"content": content}}]}


def test_replies_of_both_releases() -> None:
    assert parse_generation(reply("0.32"), 2) == Generation([5, 6], [-0.5, -1.5], "stop", 6, [3, 4])
    assert parse_generation(reply("0.26"), 2) == Generation([5, 6], [-0.5, -1.5], "stop", None, [])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r["choices"].append(r["choices"][0]), "2 answers to one request"),
        (lambda r: r["choices"].clear(), "0 answers to one request"),
        (lambda r: r["choices"][0].update(token_ids=[]), "without tokens"),
        (lambda r: r["choices"][0].update(logprobs=None), "0 log-probs for 2 tokens"),
        (lambda r: r["choices"][0]["logprobs"]["content"].pop(), "1 log-probs for 2 tokens"),
        (lambda r: r["choices"][0]["logprobs"]["content"].reverse(), "log-prob 0 is of token 6"),
        (
            lambda r: r["choices"][0]["logprobs"]["content"][1].update(logprob=float("nan")),
            "log-prob 1 is not a number",
        ),
        (lambda r: r["choices"][0]["logprobs"]["content"][1].update(logprob=None), "log-prob 1 is not a number"),
        (lambda r: r["choices"][0]["logprobs"]["content"][0].update(logprob=-9999.0), "log-prob 0 is not a number"),
        (lambda r: r["choices"][0].update(finish_reason="error"), "finish reason 'error'"),
        (lambda r: r["choices"][0]["token_ids"].append(7), "3 tokens, 2 were asked for"),
    ],
)
def test_an_answer_that_is_not_whole_is_an_error(change: Any, message: str) -> None:
    damaged = copy.deepcopy(reply())
    change(damaged)
    with pytest.raises(ValueError, match=message):
        parse_generation(damaged, 2)
