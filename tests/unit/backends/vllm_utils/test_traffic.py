"""Requests come all the time while weights change: none fails or waits for ever, each is answered by one version."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.engine import TinyEngine
    from vime.backends.vllm_utils.generate import Generation

SYNCS = 50
PROMPTS = [[1, 5, 9, 13], [300, 200, 100], [7] * 20]
TOKENS = 24
CLIENTS = 6  # at once, each with one prompt


@dataclass
class Traffic:
    """What was asked and answered. ``failure``: what ended the clients, if anything did."""

    answers: list[tuple[int, list[int], list[int]]] = field(default_factory=list)  # prompt, tokens, versions
    failure: BaseException | None = None


async def _ask(url: str, prompts: list[int], seen: Callable[[int, Generation], bool]) -> None:
    """Ask for greedy answers, each client one prompt again and again, while ``seen`` says so."""
    from vime.backends.vllm_utils.client import AsyncEngineClient, SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    async with AsyncEngineClient(url) as client:

        async def repeat(number: int, prompt: int) -> None:
            count, goes_on = 0, True
            while goes_on:
                found = await client.generate(PROMPTS[prompt], sampling, f"traffic-{number}-{count}", timeout=60)
                goes_on = seen(prompt, found)
                count += 1

        await asyncio.gather(*(repeat(number, prompt) for number, prompt in enumerate(prompts)))


@contextmanager
def traffic(url: str) -> Iterator[Traffic]:
    """Until the block ends; then the requests on their way are waited for."""
    found, ended = Traffic(), threading.Event()

    def seen(prompt: int, answer: Generation) -> bool:
        found.answers.append((prompt, answer.token_ids, answer.weight_versions))
        return not ended.is_set()

    def run() -> None:
        try:
            asyncio.run(_ask(url, [client % len(PROMPTS) for client in range(CLIENTS)], seen))
        except BaseException as error:  # noqa: BLE001 - the test judges it
            found.failure = error

    clients = threading.Thread(target=run)
    clients.start()
    try:
        yield found
    finally:
        ended.set()
        clients.join(120)
        assert not clients.is_alive(), "a request waits for ever"


def quiet_answers(url: str) -> list[list[int]]:
    """To each prompt, when nothing else happens."""
    found: dict[int, list[int]] = {}

    def seen(prompt: int, answer: Generation) -> bool:
        found[prompt] = answer.token_ids
        return False

    asyncio.run(_ask(url, list(range(len(PROMPTS))), seen))
    return [found[prompt] for prompt in range(len(PROMPTS))]


def judge(found: Traffic, expected: list[list[list[int]]], versions: range) -> None:
    """Every answer is the one that the weights of the version it names give; ``expected``: of even and odd versions."""
    assert found.failure is None, found.failure
    for prompt, tokens, named in found.answers:
        assert len(named) == 1, named
        assert named[0] in versions
        assert tokens == expected[named[0] % 2][prompt], f"prompt {prompt}, version {named[0]}"
    served = {named[0] for _, _, named in found.answers}
    assert len(served) > len(versions) / 3  # the traffic went on between the syncs


@pytest.fixture(scope="module")
def tied_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyEngine]:
    from tests.engine import start_engine

    running = start_engine(tmp_path_factory.mktemp("tied"), tied=True)
    yield running
    running.client.close()
    running.process.terminate()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_traffic_during_fifty_syncs_is_answered_from_one_version_each(
    request: pytest.FixtureRequest, tmp_path: Path, tied: bool
) -> None:
    from tests.tiny import make_checkpoint
    from tests.unit.backends.vllm_utils.one_rank import OneRank

    engine: Any = request.getfixturevalue("tied_engine" if tied else "engine")
    trainer = OneRank(engine, check_weight_update="full")
    checkpoints = [engine.checkpoint, make_checkpoint(tmp_path, seed=7, tied=tied)]
    expected = []
    for version, checkpoint in enumerate(checkpoints):
        trainer.load(checkpoint)
        if not version:
            trainer.connect()
        trainer.update.update_weights(100 + version)
        expected.append(quiet_answers(engine.url))
    assert all(first != second for first, second in zip(*expected, strict=True))
    weights = []
    for checkpoint in checkpoints:
        trainer.load(checkpoint)
        weights.append({key: param.clone() for key, param in trainer.params.items()})

    versions = range(101, 102 + SYNCS)
    with traffic(engine.url) as found:
        for version in versions[1:]:
            for key, param in trainer.params.items():
                param.copy_(weights[version % 2][key])
            trainer.update.update_weights(version)
    judge(found, expected, versions)
    trainer.load(engine.checkpoint)
    trainer.update.update_weights(200)

    # The judgement sees an answer that is half one version and half another, and one that names another version.
    prompt, tokens, named = found.answers[0]
    for wrong in (tokens[:12] + expected[1 - named[0] % 2][prompt][12:], expected[1 - named[0] % 2][prompt]):
        with pytest.raises(AssertionError):
            judge(Traffic([*found.answers, (prompt, wrong, named)]), expected, versions)
