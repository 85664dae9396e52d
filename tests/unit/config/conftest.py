from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.unit.config.runs import EXPERTS, command_line, required_run, write_checkpoint, write_prompts
from vime.config.check import check
from vime.config.machine import GIB, Machine
from vime.config.parse import parse_all

CPU = Machine("cpu", 0, None, "", 24 * GIB)
FOUR_GPUS = Machine("cuda", 4, 139 * GIB, "NVIDIA H200", 512 * GIB)

Problems = Callable[..., list[str]]


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_checkpoint(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="session")
def experts(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_checkpoint(tmp_path_factory.mktemp("experts"), **EXPERTS)


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl")


@pytest.fixture
def flags(dense: str, prompts: str) -> dict[str, list[str]]:
    """The required run; a test changes what it is about."""
    return required_run(dense, prompts)


@pytest.fixture
def problems(flags: dict[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Problems:
    """problems("--lr x ...", without=["--colocate"]): what `vime check` says to the required run so changed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def say(
        change: str = "", *, without: Iterable[str] = (), machine: Machine = CPU, words: Iterable[str] = ()
    ) -> list[str]:
        for flag in without:
            del flags[flag]
        last: list[str] = []
        for word in [*change.split(), *words]:
            if word.startswith("--"):
                flags[word] = last = []
            else:
                last.append(word)
        parsed = parse_all(command_line(flags))
        return parsed.problems + parsed.believable(check(parsed.config, machine))

    return say
