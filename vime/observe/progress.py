"""One live line for whatever is being waited for.

On a terminal the line is redrawn in place; elsewhere (a file, CI) a plain line appears every ten seconds. A thread
keeps the clock running, so that a phase that only waits still shows that it is alive. Nested ``Progress`` objects share
the one line: the outer labels come first, the innermost one shows its count::

    step 3/40 · generate · 212/512 answers · 41% · 6 s
"""

from __future__ import annotations

import logging
import shutil
import sys
import threading
import time
from types import TracebackType
from typing import TextIO

TTY_INTERVAL = 0.2  # seconds between redraws of the live line
PLAIN_INTERVAL = 10.0  # seconds between lines where there is no terminal


class _Line:
    """The line of this process: who is on it, and the thread that redraws it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.stack: list[Progress] = []
        self.enabled = True
        self.stream: TextIO | None = None  # None: sys.stderr as it is at the moment of writing
        self.interval: float | None = None  # seconds between lines; None: by the kind of stream
        self.shown = False
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def out(self) -> TextIO:
        return self.stream or sys.stderr

    def is_tty(self) -> bool:
        return self.out().isatty()

    def push(self, progress: Progress) -> None:
        with self.lock:
            self.stack.append(progress)
            if self.enabled and self._thread is None:
                self._wake.clear()
                self._thread = threading.Thread(target=self._run, name="vime-progress", daemon=True)
                self._thread.start()

    def pop(self, progress: Progress) -> None:
        with self.lock:
            if progress in self.stack:
                self.stack.remove(progress)  # concurrent tasks need not leave in the order in which they came
            self.clear()
            thread = None
            if not self.stack and self._thread is not None:
                thread, self._thread = self._thread, None
                self._wake.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=2)

    def _run(self) -> None:
        wake = self._wake
        interval = self.interval or (TTY_INTERVAL if self.is_tty() else PLAIN_INTERVAL)
        while not wake.wait(interval):
            with self.lock:
                if wake.is_set() or not self.stack:
                    return
                self.draw()

    def draw(self) -> None:
        text = " · ".join(progress.text(inner=progress is self.stack[-1]) for progress in self.stack)
        out = self.out()
        if self.is_tty():
            width = shutil.get_terminal_size().columns
            out.write("\r\x1b[2K" + text[: max(width - 1, 20)])
            self.shown = True
        else:
            out.write(text + "\n")
        out.flush()

    def clear(self) -> None:
        if self.shown:
            self.out().write("\r\x1b[2K")
            self.out().flush()
            self.shown = False


_line = _Line()


def set_enabled(enabled: bool) -> None:
    """Switch the lines of this process on or off (``--no-progress``)."""
    with _line.lock:
        _line.enabled = enabled


def write(text: str) -> None:
    """Print a line that stays, above the live one."""
    with _line.lock:
        _line.clear()
        out = _line.out()
        out.write(text + "\n")
        out.flush()


class LogHandler(logging.Handler):
    """Logging handler that does not run into the live line."""

    def emit(self, record: logging.LogRecord) -> None:
        write(self.format(record))


class Progress:
    """Context manager for something that takes a while.

    Args:
        label: what is being done, one or two words.
        total: how many units there are, if known.
        unit: what is counted, in the plural ("answers").
    """

    def __init__(self, label: str, total: int | None = None, unit: str = "") -> None:
        self.label, self.total, self.unit = label, total, unit
        self.done = 0
        self._note = ""
        self._start = time.monotonic()

    def __enter__(self) -> Progress:
        self._start = time.monotonic()
        _line.push(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _line.pop(self)

    def update(self, n: int = 1) -> None:
        """Count ``n`` more units as done."""
        with _line.lock:
            self.done += n

    def note(self, text: str) -> None:
        """Show ``text`` behind the count until the next note."""
        with _line.lock:
            self._note = text

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def text(self, inner: bool = True) -> str:
        """The line as it would be shown now; an outer one shows its label and count only."""
        parts = [self.label]
        if self.total is not None:
            parts.append(f"{self.done}/{self.total} {self.unit}".rstrip())
            if inner and self.total:
                parts.append(f"{self.done / self.total:.0%}")
        elif self.done:
            parts.append(f"{self.done} {self.unit}".rstrip())
        if self._note:
            parts.append(self._note)
        if inner:
            parts.append(duration(self.seconds))
        return " · ".join(parts)


def duration(seconds: float) -> str:
    """Seconds as a person says them: ``6 s``, ``3 min 20 s``, ``2 h 5 min``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 100:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"
