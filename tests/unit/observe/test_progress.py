from __future__ import annotations

import io
import logging
import threading

import pytest

from vime.observe import progress
from vime.observe.progress import LogHandler, Progress, duration


class Terminal(io.StringIO):
    """A stream that says when the n-th text was written to it."""

    def __init__(self, tty: bool, wanted: int) -> None:
        super().__init__()
        self.tty, self.wanted, self.enough = tty, wanted, threading.Event()

    def isatty(self) -> bool:
        return self.tty

    def write(self, text: str) -> int:
        count = super().write(text)
        self.wanted -= 1
        if self.wanted <= 0:
            self.enough.set()
        return count


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(progress._line, "interval", 0.01)
    yield progress._line
    progress.set_enabled(True)
    assert progress._line._thread is None  # nobody is left behind


@pytest.mark.parametrize("tty", [True, False])
def test_a_phase_that_only_waits_is_seen(line, monkeypatch: pytest.MonkeyPatch, tty: bool) -> None:
    out = Terminal(tty, wanted=3)
    monkeypatch.setattr(line, "stream", out)
    with Progress("step 1/4 · rollout"), Progress("generate", total=8, unit="answers") as inner:
        inner.update(2)
        inner.note("engine 0")
        assert out.enough.wait(10)
    text = out.getvalue()
    assert "step 1/4 · rollout · generate · 2/8 answers · 25% · engine 0 · 0 s" in text
    assert ("\r\x1b[2K" in text) == tty
    if tty:
        assert text.endswith("\r\x1b[2K")  # nothing of the live line stays


def test_log_lines_do_not_run_into_the_live_line(line, monkeypatch: pytest.MonkeyPatch) -> None:
    out = Terminal(True, wanted=1)
    monkeypatch.setattr(line, "stream", out)
    with Progress("wait"):
        assert out.enough.wait(10)
        LogHandler().emit(logging.makeLogRecord({"msg": "engine 1 is back"}))
    assert "\r\x1b[2Kengine 1 is back\n" in out.getvalue()


def test_switched_off(line, monkeypatch: pytest.MonkeyPatch) -> None:
    out = Terminal(True, wanted=1)
    monkeypatch.setattr(line, "stream", out)
    progress.set_enabled(False)
    with Progress("wait"):
        assert line._thread is None
    assert out.getvalue() == ""


def test_an_outer_one_may_end_first(line) -> None:
    first, second = Progress("a"), Progress("b")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert line.stack == [second]
    second.__exit__(None, None, None)


def test_duration() -> None:
    assert [duration(s) for s in (0.4, 99, 125, 7500)] == ["0 s", "99 s", "2 min 5 s", "2 h 5 min"]
