"""The prompts of a run, in an order that depends on the seed alone and can be continued exactly."""

from __future__ import annotations

import array
import logging
import random
from dataclasses import dataclass
from typing import Any

from vime.config.rollout import DataOptions
from vime.errors import DataError
from vime.observe.progress import Progress
from vime.rollout.chat import ChatEncoder
from vime.rollout.prompt_file import Row, read_prompts, validate_prompt_file

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt at its place in the run: the ``position``-th that was drawn, counted from 0."""

    position: int
    row: Row
    tokens: list[int]


class PromptDataset:
    """Prompts of one file, drawn in batches that run on across the borders of epochs.

    Epoch e is the file in its order, or with ``--rollout-shuffle`` a permutation that depends on ``--rollout-seed`` and
    e alone. The place reached is one number, the prompts drawn so far.

    Args:
        path: JSONL or Parquet file, with or without a slice.
        options: columns, template, shuffle.
        tokenizer: Hugging Face tokenizer.
        max_tokens: longer prompts are dropped, counted and reported in one log line; None: no limit.
        sft: rows hold the answers too; ``max_tokens`` is then the limit of prompt and answer together.

    Attributes:
        drawn: prompts drawn so far in the run.
        dropped: prompts that were too long.

    Raises:
        DataError: a bad row by line, or no prompt short enough.
    """

    def __init__(
        self, path: str, options: DataOptions, tokenizer: Any, *, max_tokens: int | None = None, sft: bool = False
    ) -> None:
        self.path, self._options = path, options
        self.encoder = ChatEncoder(tokenizer, options)
        self._rows = list(read_prompts(path, options, sft=sft))
        self._tokens: list[array.array | None] = [None] * len(self._rows)  # 4 bytes a token; lists of int take 36
        self.dropped = 0
        if max_tokens is not None:
            self._drop_longer_than(max_tokens, sft)
        self.drawn = 0
        self._order: tuple[int, list[int]] = (-1, [])

    def __len__(self) -> int:
        """Prompts of one epoch."""
        return len(self._rows)

    @property
    def epoch(self) -> int:
        return self.drawn // len(self)

    def take(self, count: int) -> list[Prompt]:
        """The next ``count`` prompts."""
        drawn = [self._prompt(position) for position in range(self.drawn, self.drawn + count)]
        self.drawn += count
        return drawn

    def rewind(self, position: int) -> None:
        """Draw again from ``position`` on: prompts that were taken in advance and not used are not lost."""
        if not 0 <= position <= self.drawn:
            raise ValueError(f"cannot go back to prompt {position} from {self.drawn}")
        self.drawn = position

    def all(self) -> list[Prompt]:
        """Every prompt once, in the file's order (evaluation)."""
        return [Prompt(index, row, self._encode(index)) for index, row in enumerate(self._rows)]

    def state_dict(self) -> dict[str, Any]:
        """What a continued run needs; plain JSON."""
        return {
            "drawn": self.drawn,
            "prompts": len(self),
            "seed": self._options.rollout_seed,
            "shuffle": self._options.rollout_shuffle,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken.

        Raises:
            DataError: number of prompts, seed or shuffling have changed, so that the order would be another one.
        """
        mine = {**self.state_dict(), "drawn": state["drawn"]}
        if mine != state:
            changed = [f"{key} was {state.get(key)} and is {mine[key]}" for key in mine if mine[key] != state.get(key)]
            raise DataError(f"{self.path}: cannot go on in the checkpoint's order of prompts: {', '.join(changed)}")
        self.drawn = state["drawn"]

    def _prompt(self, position: int) -> Prompt:
        epoch, offset = divmod(position, len(self))
        if self._order[0] != epoch:
            order = list(range(len(self)))
            if self._options.rollout_shuffle:
                # A string seed goes through SHA-512: epochs are independent, and it is the same on every Python.
                random.Random(f"{self._options.rollout_seed}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        index = self._order[1][offset]
        return Prompt(position, self._rows[index], self._encode(index))

    def _encode(self, index: int) -> list[int]:
        tokens = self._tokens[index]
        return list(tokens) if tokens is not None else self.encoder.prompt(self._rows[index])

    def _drop_longer_than(self, limit: int, sft: bool) -> None:
        rows, kept, longest = [], [], 0
        with Progress("read prompts", len(self._rows), "prompts") as progress:
            for row in self._rows:
                if sft:
                    example = self.encoder.example(row)
                    tokens, length = None, len(example.prompt_tokens) + len(example.response_tokens)
                else:
                    tokens = array.array("i", self.encoder.prompt(row))
                    length = len(tokens)
                longest = max(longest, length)
                if length <= limit:
                    rows.append(row)
                    kept.append(tokens)
                progress.update()
        self.dropped = len(self._rows) - len(rows)
        if not rows:
            raise DataError(f"{self.path}: every prompt is longer than {limit} tokens (the longest has {longest})")
        if self.dropped:
            logger.warning(
                "%s: dropped %d of %d prompts that are longer than %d tokens (the longest has %d)",
                self.path,
                self.dropped,
                len(self._rows),
                limit,
                longest,
            )
        self._rows, self._tokens = rows, kept


__all__ = ["Prompt", "PromptDataset", "Row", "validate_prompt_file"]
