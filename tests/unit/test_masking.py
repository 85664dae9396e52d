"""What is not written down: credentials in addresses, and the values of secrets."""

from __future__ import annotations

import json

import pytest

from vime.masking import OF_ENGINES, is_secret, masked, masked_options, masked_words


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://user:hunter2@host:80/score", "http://***@host:80/score"),
        ("http://hunter2@host/", "http://***@host/"),
        ("see https://host/a?token=hunter2&n=1#x: no", "see https://host/a?token=***&n=***"),
        ("https://host/a?hunter2", "https://host/a?***"),
        ("http://u:hunter2/hunter2?hunter2@host/a", "http://***@host/a"),  # no address at all, strictly
        ("ray://u:hunter2@[::1]:10001 and http://x?k=hunter2", "ray://***@[::1]:10001 and http://x?k=***"),
        ("http://127.0.0.1:8000/score", "http://127.0.0.1:8000/score"),
        ("model@home, a?b=c", "model@home, a?b=c"),
    ],
)
def test_credentials_in_addresses(text: str, shown: str) -> None:
    result = masked(text)
    assert "hunter2" not in result
    assert result.startswith(shown)
    assert masked(result) == result


def test_names_of_secrets() -> None:
    for name in ("hf-token", "api_key", "ssl-keyfile", "ssl-keyfile-password", "apiKey", "APIKey", "HF_TOKEN"):
        assert is_secret(name), name
    for name in ("max-num-batched-tokens", "tokenizer-mode", "skip-tokenizer-init", "stop_token_ids", "keyboard", "7"):
        assert not is_secret(name), name


def test_options_at_any_depth() -> None:
    inner = json.dumps({"extra": {"api_key": "hunter2", "url": "http://u:hunter2@h", "size": 1}})
    shown = masked_options(
        {"a": [inner, "x"], "b": {"hf-token": "hunter2"}, "c": 1.5, "d": "{not json http://u:hunter2@h"}
    )
    assert "hunter2" not in json.dumps(shown)
    assert json.loads(shown["a"][0])["extra"]["size"] == 1
    assert (shown["a"][1], shown["c"]) == ("x", 1.5)
    assert masked_options({"reward_key": "score"}, by_name=False) == {"reward_key": "score"}


def test_command_lines() -> None:
    words = ["serve", "m", "--hf-token", "hunter2", "--api-key=hunter2", "--url", "http://hunter2@h", "--seed", "1"]
    shown = ["serve", "m", "--hf-token", "***", "--api-key=***", "--url", "http://***@h", "--seed", "1"]
    assert masked_words(words) == shown
    words = ["--reward-key", "score", "--vllm-hf-token", "x", "--vllm_hf_token", "x"]
    assert masked_words(words, OF_ENGINES)[1::2] == ["score", "***", "***"]
    words = ["--vllm-a-key", "hunter2", "hunter2", "--seed", "1"]
    assert masked_words(words, OF_ENGINES)[1:] == ["***", "***", "--seed", "1"]


@pytest.mark.parametrize("form", ["--vllm-loader-config {}", "--vllm-loader-config={}"])
def test_json_on_a_command_line(form: str) -> None:
    """Options of engines are often whole dictionaries."""
    words = form.format('{"size":1,"apiKey":"hunter2"}').split()
    shown = masked_words(words, OF_ENGINES)
    assert "hunter2" not in str(shown)
    assert '"size": 1' in shown[-1]
    harmless = form.format('{"size":1,"keys":[2]}').split()  # no secret: not even written in another way
    assert masked_words(harmless, OF_ENGINES) == harmless
    # Of a flag of ours a name says nothing: --eval-... and the like hold none.
    assert masked_words(["--x", '{"key":"name"}'], OF_ENGINES) == ["--x", '{"key":"name"}']


def test_a_word_of_any_length_is_looked_through_once() -> None:
    """A problem may quote a whole file. Each letter looked at once for each before it: that took minutes."""
    word = "a" * (1 << 20)
    assert masked(f"{word} http://u:hunter2@h") == f"{word} http://***@h"
