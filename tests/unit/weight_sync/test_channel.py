"""How a channel waits for messages between GPUs: on the host, and by its own clock. (Between CPUs: test_remote.py.)"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vime.weight_sync.channel import Channel


class Message:
    """Stands for NCCL's handle of a message that has passed at the ``after``-th look, or never."""

    def __init__(self, seen: list[str], after: int | None) -> None:
        self._seen, self._after = seen, after

    def is_completed(self) -> bool:
        self._seen.append("look")
        return self._after is not None and self._seen.count("look") > self._after

    def wait(self) -> None:
        self._seen.append("stream waits")


class Group:
    def __init__(self, message: Message) -> None:
        self._message = message

    def send(self, *_: Any) -> Message:
        return self._message

    recv = send

    def abort(self) -> None:
        pass


def channel(after: int | None, timeout: float = 60.0) -> tuple[Channel, list[str]]:
    made = Channel.__new__(Channel)
    seen: list[str] = []
    made.device, made._timeout, made._open = torch.device("cuda"), timeout, Group(Message(seen, after))
    return made, seen


@pytest.mark.parametrize("call", ["send", "receive"])
def test_a_stream_does_not_wait_for_a_message_that_has_not_passed(call: str) -> None:
    """Or two ranks with two workers each would wait for each other, as one rank's threads share a stream."""
    made, seen = channel(after=3)
    getattr(made, call)(torch.zeros(4), 1)
    assert seen == ["look"] * 4 + ["stream waits"]


@pytest.mark.parametrize("call", ["send", "receive"])
def test_a_message_that_does_not_pass_is_an_error_and_not_the_end_of_the_process(call: str) -> None:
    made, seen = channel(after=None, timeout=0.02)
    with pytest.raises(RuntimeError, match=r"a message has not passed within 0\.02 s"):
        getattr(made, call)(torch.zeros(4), 1)
    assert "stream waits" not in seen


def test_whoever_waits_in_a_channel_that_is_closed_stops() -> None:
    made, seen = channel(after=None)
    group = made._open

    class Closing(Message):
        def is_completed(self) -> bool:
            made.close()
            return False

    group._message = Closing(seen, None)
    with pytest.raises(RuntimeError, match="the channel was closed"):
        made.send(torch.zeros(4), 1)
