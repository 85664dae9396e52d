"""From a row of the prompt file to token ids, through the tokenizer's chat template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vime.config.rollout import DataOptions
from vime.errors import DataError
from vime.rollout.prompt_file import Row


@dataclass(frozen=True, slots=True)
class Example:
    """A row of supervised fine-tuning: the response is learned where ``loss_mask`` is 1."""

    prompt_tokens: list[int]
    response_tokens: list[int]
    loss_mask: list[int]


class ChatEncoder:
    """Renders and tokenizes rows.

    With ``--apply-chat-template`` a string becomes one user message, and the template's own special tokens are the only
    ones. Without it the string is tokenized as the tokenizer does by default (a BOS token where the model has one),
    unless it starts with that token already.
    """

    def __init__(self, tokenizer: Any, options: DataOptions) -> None:
        self.tokenizer, self._options = tokenizer, options
        if options.apply_chat_template and not getattr(tokenizer, "chat_template", None):
            raise DataError(
                "--apply-chat-template: the tokenizer of --hf-checkpoint has no chat template; leave the flag out or "
                "add chat_template.jinja beside the tokenizer"
            )

    def prompt(self, row: Row) -> list[int]:
        """Token ids of the prompt, the opening of the assistant's turn included."""
        if not self._options.apply_chat_template:
            assert isinstance(row.prompt, str)
            return self._plain(row.prompt)
        return self._templated(self._render(row, self.messages(row), answer_follows=True))

    def messages(self, row: Row) -> list[dict[str, Any]]:
        return [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt

    def example(self, row: Row) -> Example:
        """Prompt and learned answer of a row of supervised fine-tuning.

        The answer is the label, or else the assistant turns after the last user turn; what stands between them (tool
        results) is in the context and not learned. Prompt and answers are tokenized apart, as they are when an engine
        generates. Each answer ends with its EOS token; what the template writes after it is not learned.

        Raises:
            DataError: the template rewrites earlier turns when later ones come, so that no prefix is the prompt.
        """
        if not self._options.apply_chat_template:
            assert isinstance(row.prompt, str)
            tokens = [*self.tokenizer.encode(str(row.label), add_special_tokens=False), self.tokenizer.eos_token_id]
            return Example(self._plain(row.prompt), tokens, [1] * len(tokens))
        messages = self.messages(row)
        if row.label is not None:
            messages = [*messages, {"role": "assistant", "content": str(row.label)}]
        first = max((i + 1 for i, message in enumerate(messages) if message["role"] == "user"), default=0)
        turns = [i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"]
        if not turns:
            raise DataError(f"{row.where}: no assistant message after the last user message: nothing to learn")
        rendered, prompt, tokens, mask = "", [], [], []
        for turn in turns:
            before = self._render(row, messages[:turn], answer_follows=True)
            after = self._render(row, messages[: turn + 1], answer_follows=False)
            if not before.startswith(rendered) or not after.startswith(before):
                raise DataError(
                    f"{row.where}: the chat template renders message {turn} differently once it is answered; give one "
                    "assistant turn per row, or the text itself without --apply-chat-template"
                )
            between = self._templated(before[len(rendered) :])
            answer = self._until_eos(self._templated(after[len(before) :]))
            if turn == turns[0]:
                prompt = between
            else:
                tokens, mask = tokens + between, mask + [0] * len(between)
            tokens, mask = tokens + answer, mask + [1] * len(answer)
            # The text between this turn's EOS and the next turn belongs to the context, not to the answer.
            rendered = before + self.tokenizer.decode(answer, skip_special_tokens=False)
            if not after.startswith(rendered):
                rendered = after
        return Example(prompt, tokens, mask)

    def _until_eos(self, tokens: list[int]) -> list[int]:
        eos = self.tokenizer.eos_token_id
        if eos not in tokens:
            return tokens
        return tokens[: len(tokens) - tokens[::-1].index(eos)]

    def _render(self, row: Row, messages: list[dict[str, Any]], answer_follows: bool) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                messages,
                tools=row.tools,
                tokenize=False,
                add_generation_prompt=answer_follows,
                **self._options.apply_chat_template_kwargs,
            )
        except Exception as error:  # jinja runs the template author's code: any error may come
            raise DataError(f"{row.where}: the chat template refuses it: {type(error).__name__}: {error}") from error

    def _templated(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _plain(self, text: str) -> list[int]:
        bos = self.tokenizer.bos_token
        return self.tokenizer.encode(text, add_special_tokens=not (bos and text.startswith(bos)))
