"""What is not written down: credentials in addresses, and the values of secrets."""

from __future__ import annotations

import json

import pytest

from vime.masking import is_secret, masked, masked_options, masked_words


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
    assert [n for n in ("hf-token", "api_key", "ssl-keyfile", "ssl-keyfile-password") if not is_secret(n)] == []
    for name in ("max-num-batched-tokens", "tokenizer-mode", "skip-tokenizer-init", "stop_token_ids", "keyboard"):
        assert not is_secret(name)


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
    assert masked_words(["--reward-key", "score", "--vllm-hf-token", "x"], "--vllm-")[1::2] == ["score", "***"]
