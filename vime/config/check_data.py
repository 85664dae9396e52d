"""Prompt files: there, readable, with the columns that the flags name, and no bad row."""

from __future__ import annotations

import dataclasses
import time

from vime.config import Config
from vime.config.check_meaning import missing_package
from vime.errors import DataError

SECONDS = 4.0  # for all files together; of a very large file only the beginning is read


@dataclasses.dataclass
class Rows:
    """What was seen of a prompt file."""

    count: int = 0
    all: bool = True  # the whole file was read
    rewards: set[str] = dataclasses.field(default_factory=set)  # that rows ask for themselves


def check_data(config: Config) -> tuple[list[str], dict[str, Rows]]:
    """Problems of the prompt files (the first bad row of each, by line), and how many rows each has."""
    problems: list[str] = []
    seen: dict[str, Rows] = {}
    files = [("--prompt-data", config.data.prompt_data)] if config.data.prompt_data else []
    for name, path in _evaluation(config, problems):
        files.append((f"--eval-prompt-data {name}", path))
    deadline = time.monotonic() + SECONDS
    for flag, path in files:
        try:
            seen[path] = _read(config, path, deadline)
        except DataError as error:
            problems.append(f"{flag} {error}" if str(error).startswith(path) else f"{flag} {path}: {error}")
    if config.train.loss_type != "sft_loss" and config.reward.custom_rm_path is None:
        for path, rows in seen.items():
            for reward in sorted(filter(None, rows.rewards)):
                problems += missing_package(f"{path} asks for rm_type {reward}", reward)
    problems += _epochs(config, seen)
    return problems, seen


def _read(config: Config, path: str, deadline: float) -> Rows:
    from vime.rollout.prompt_file import read_prompts

    rows = Rows()
    for row in read_prompts(path, config.data, sft=config.train.loss_type == "sft_loss"):
        rows.count += 1
        if "rm_type" in row.metadata:
            rows.rewards.add(row.metadata["rm_type"])
        if rows.count % 256 == 0 and time.monotonic() > deadline:
            rows.all = False
            break
    return rows


def _evaluation(config: Config, problems: list[str]) -> list[tuple[str, str]]:
    words = config.eval.eval_prompt_data
    if len(words) % 2:
        problems.append(
            f"--eval-prompt-data {' '.join(words)}: takes pairs NAME PATH [NAME PATH ...], as in "
            f"--eval-prompt-data test {words[0] if len(words) == 1 else 'test.jsonl'}"
        )
        return []
    pairs = list(zip(words[::2], words[1::2], strict=True))
    names = [name for name, _ in pairs]
    for name in sorted({name for name in names if names.count(name) > 1}):
        problems.append(f"--eval-prompt-data: the name {name} stands twice; metrics are kept by name")
    return pairs


def _epochs(config: Config, seen: dict[str, Rows]) -> list[str]:
    rows = seen.get(config.data.prompt_data or "")
    epochs, batch = config.rollout.num_epoch, config.rollout.rollout_batch_size
    if rows is None or not rows.all or epochs is None or rows.count * epochs >= batch:
        return []
    return [f"--num-epoch {epochs} over {rows.count} prompts is less than one rollout (--rollout-batch-size {batch})"]
