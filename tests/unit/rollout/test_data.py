"""Order, continuation, templates and lengths of prompts, with a real tokenizer."""

from __future__ import annotations

import json
import logging

import pytest

from tests.tiny import make_tokenizer
from vime.config.rollout import DataOptions
from vime.errors import DataError
from vime.rollout.data import PromptDataset

SIZE = 7


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def write(tmp_path):
    def write(rows):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


def dataset(write, tokenizer, rows=None, limit=None, sft=False, **over):
    rows = [{"input": f"prompt {i}"} for i in range(SIZE)] if rows is None else rows
    return PromptDataset(write(rows), DataOptions(**over), tokenizer, max_tokens=limit, sft=sft)


def names(prompts):
    return [prompt.row.prompt for prompt in prompts]


def test_batches_run_on_across_epochs(write, tokenizer):
    data = dataset(write, tokenizer)
    drawn = [prompt for _ in range(6) for prompt in data.take(4)]
    assert names(drawn) == [f"prompt {i % SIZE}" for i in range(24)]
    assert [prompt.position for prompt in drawn] == list(range(24))
    assert data.epoch == 24 // SIZE
    assert names(data.take(20)) == [f"prompt {i % SIZE}" for i in range(24, 44)]  # a batch of several epochs


def test_every_epoch_is_another_permutation_of_all(write, tokenizer):
    data = dataset(write, tokenizer, rollout_shuffle=True)
    epochs = [names(data.take(SIZE)) for _ in range(4)]
    assert all(sorted(epoch) == [f"prompt {i}" for i in range(SIZE)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    again = dataset(write, tokenizer, rollout_shuffle=True)
    assert names(again.take(3 * SIZE)) == [name for epoch in epochs[:3] for name in epoch]
    other = dataset(write, tokenizer, rollout_shuffle=True, rollout_seed=43)
    assert names(other.take(SIZE)) != epochs[0]


def test_the_order_is_pinned(write, tokenizer):
    """A run must continue under another Python: this order may never change."""
    data = dataset(write, tokenizer, rollout_shuffle=True)
    numbers = [int(str(name).split()[1]) for name in names(data.take(2 * SIZE))]
    assert numbers == [
        6,
        4,
        1,
        5,
        0,
        3,
        2,
        5,
        0,
        1,
        6,
        3,
        2,
        4,
    ]


@pytest.mark.parametrize("before", [0, 3, SIZE, 17])
def test_a_continued_run_goes_on_exactly(write, tokenizer, before):
    whole = dataset(write, tokenizer, rollout_shuffle=True)
    whole.take(before)
    state = json.loads(json.dumps(whole.state_dict()))
    later = dataset(write, tokenizer, rollout_shuffle=True)
    later.load_state_dict(state)
    assert later.take(15) == whole.take(15)


@pytest.mark.parametrize("change", [{"rollout_seed": 1}, {"rollout_shuffle": False}])
def test_another_order_is_not_continued(write, tokenizer, change):
    state = dataset(write, tokenizer, rollout_shuffle=True).state_dict()
    with pytest.raises(DataError, match=r"cannot go on.*(seed was 42 and is 1|shuffle was True and is False)"):
        dataset(write, tokenizer, **{"rollout_shuffle": True, **change}).load_state_dict(state)
    with pytest.raises(DataError, match="prompts was 7 and is 2"):
        dataset(write, tokenizer, [{"input": "a"}] * 2, rollout_shuffle=True).load_state_dict(state)


def test_rewinding_draws_again(write, tokenizer):
    data = dataset(write, tokenizer, rollout_shuffle=True)
    first = data.take(10)
    data.rewind(4)
    assert data.take(6) == first[4:]
    with pytest.raises(ValueError, match="cannot go back to prompt 11 from 10"):
        data.rewind(11)


def test_long_prompts_are_dropped_and_counted_in_one_line(write, tokenizer, caplog):
    rows = [{"input": "short"}, {"input": "very " * 50}, {"input": "short too"}, {"input": "long " * 60}]
    with caplog.at_level(logging.WARNING):
        data = dataset(write, tokenizer, rows, limit=20)
    assert names(data.take(2)) == ["short", "short too"]
    assert (len(data), data.dropped) == (2, 2)
    (record,) = caplog.records
    assert "dropped 2 of 4 prompts that are longer than 20 tokens" in record.getMessage()
    with pytest.raises(DataError, match="every prompt is longer than 1 tokens"):
        dataset(write, tokenizer, rows, limit=1)


def test_limit_is_inclusive(write, tokenizer):
    length = len(tokenizer.encode("some words here"))
    assert len(dataset(write, tokenizer, [{"input": "some words here"}], limit=length)) == 1
    with pytest.raises(DataError):
        dataset(write, tokenizer, [{"input": "some words here"}], limit=length - 1)


def test_templates(write, tokenizer):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    data = dataset(write, tokenizer, [{"input": "hi"}, {"input": messages}], apply_chat_template=True)
    first, second = data.take(2)
    assert tokenizer.decode(first.tokens) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(second.tokens).startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi")
    assert first.tokens[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")
    plain = dataset(write, tokenizer, [{"input": "hi"}])
    assert tokenizer.decode(plain.take(1)[0].tokens) == "hi"


def test_template_arguments_and_tools_reach_the_template(write):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ greeting }} {{ tools[0].name if tools else 'none' }} {{ messages[0].content }}"
    rows = [{"input": "x", "t": [{"name": "search"}]}, {"input": "y"}]
    data = dataset(
        write,
        tokenizer,
        rows,
        apply_chat_template=True,
        tool_key="t",
        apply_chat_template_kwargs={"greeting": "hello"},
    )
    assert [tokenizer.decode(prompt.tokens) for prompt in data.take(2)] == ["hello search x", "hello none y"]


def test_what_the_template_cannot_do_names_the_line(write):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% if messages[0].role != 'user' %}{{ raise_exception('no system') }}{% endif %}x"
    rows = [{"input": "fine"}, {"input": [{"role": "system", "content": "x"}]}]
    with pytest.raises(DataError, match=r"rows.jsonl:2: the chat template refuses it: .*no system"):
        dataset(write, tokenizer, rows, limit=99, apply_chat_template=True)
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="has no chat template"):
        dataset(write, tokenizer, rows, apply_chat_template=True)


def test_bos_is_added_once(write):
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer()
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", tokenizer.bos_token_id)]
    )
    data = dataset(write, tokenizer, [{"input": "hi"}, {"input": "<|endoftext|>hi"}])
    first, second = data.take(2)
    assert first.tokens == second.tokens
    assert first.tokens.count(tokenizer.bos_token_id) == 1


def learned(tokenizer, example):
    return tokenizer.decode([t for t, m in zip(example.response_tokens, example.loss_mask, strict=True) if m])


def test_sft_learns_the_label_and_the_end(write, tokenizer):
    for chat in (True, False):
        rows = [{"input": "2+2=", "label": 4}]
        data = dataset(write, tokenizer, rows, sft=True, label_key="label", apply_chat_template=chat)
        (prompt,) = data.take(1)
        example = data.encoder.example(prompt.row)
        assert example.prompt_tokens == prompt.tokens  # as the engine will see it
        assert tokenizer.decode(example.response_tokens) == "4<|im_end|>"
        assert example.loss_mask == [1] * len(example.response_tokens)


def test_sft_learns_the_turns_after_the_last_question(write, tokenizer):
    messages = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "old answer"},
        {"role": "user", "content": "second"},
        {"role": "assistant", "content": "calling"},
        {"role": "tool", "content": "result"},
        {"role": "assistant", "content": "done"},
    ]
    data = dataset(write, tokenizer, [{"input": messages}], sft=True, apply_chat_template=True)
    example = data.encoder.example(data.take(1)[0].row)
    assert learned(tokenizer, example) == "calling<|im_end|>done<|im_end|>"
    whole = tokenizer.decode(example.prompt_tokens + example.response_tokens)
    assert whole + "\n" == tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer.decode(example.prompt_tokens).endswith("second<|im_end|>\n<|im_start|>assistant\n")


def test_sft_refuses_a_template_that_rewrites_history(write):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    rows = [{"input": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    data = dataset(write, tokenizer, rows, sft=True, apply_chat_template=True)
    with pytest.raises(DataError, match=r"rows.jsonl:1: the chat template renders message 1 differently"):
        data.encoder.example(data.take(1)[0].row)


def test_sft_length_counts_prompt_and_answer(write, tokenizer, caplog):
    rows = [{"input": "q", "label": "a"}, {"input": "q", "label": "a " * 100}]
    data = dataset(write, tokenizer, rows, limit=30, sft=True, label_key="label")
    assert (len(data), data.dropped) == (1, 1)
