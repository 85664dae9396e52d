"""Whether an answer equals the right one mathematically, with a deadline that always holds."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import queue
import re
import select
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path

from vime.errors import VimeError
from vime.rollout.rewards.extract import boxed

logger = logging.getLogger(__name__)

_WORKER = Path(__file__).with_name("math_worker.py")
_START_SECONDS = 120.0  # importing sympy on a machine that is busy
_GRACE_SECONDS = 2.0  # the worker ends itself at the deadline; after this much more it is killed
_NUMBER = re.compile(r"[+-]?(\d+|\d{1,3}(,\d{3})+)?(\.\d+)?")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_WORDS = re.compile(r"[A-Za-z][A-Za-z' -]{3,}")


def plain(answer: str) -> str:
    r"""Without what does not change the meaning: ``$``, spaces around, a final full stop, ``\text{}`` around words."""
    answer = answer.strip().removesuffix(".").strip(" \t\n$").removesuffix(".").strip()
    return _TEXT.sub(r"\1", answer).strip()


def quick_equal(gold: str, answer: str) -> bool | None:
    """The easy cases, decided without sympy: equal strings, two plain numbers, words. None: not an easy case."""
    if gold == answer:
        return True
    if not gold or not answer:
        return False
    if (left := _number(gold)) is not None and (right := _number(answer)) is not None:
        return left == right
    if _WORDS.fullmatch(gold):  # sympy sees products of letters, which are equal for anagrams
        return gold.casefold() == answer.casefold()
    return None


def _number(text: str) -> Decimal | None:
    if not text[-1:].isdigit() or not text.isascii() or not _NUMBER.fullmatch(text):
        return None
    return Decimal(text.replace(",", ""))


class MathGrader:
    """A few worker processes that compare answers; safe to use from any thread and any event loop.

    Args:
        workers: processes, started when first needed. Default: half of the processor's cores, at most 8.
        seconds: how long one comparison may take. A comparison that takes longer counts as wrong.
    """

    def __init__(self, seconds: float = 10.0, workers: int | None = None) -> None:
        self.seconds = seconds
        self._count = workers or max(1, min(8, (os.cpu_count() or 2) // 2))
        self._threads: ThreadPoolExecutor | None = None
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        self._workers: set[_Worker] = set()
        self._warned = False

    async def equal(self, label: object, answer: str) -> bool:
        r"""Whether ``answer`` equals ``label`` (string, maybe with ``\boxed{}``, number, or a list of such)."""
        if isinstance(label, list | tuple):
            for one in label:
                if await self.equal(one, answer):
                    return True
            return False
        gold = str(label)
        inner = boxed(gold)
        gold, answer = plain(gold if inner is None else inner), plain(answer)
        decided = quick_equal(gold, answer)
        if decided is not None:
            return decided
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._count, thread_name_prefix="vime-math")
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._compare, gold, answer)

    def _compare(self, gold: str, answer: str) -> bool:
        try:
            worker = self._idle.get_nowait()
        except queue.Empty:
            worker = _Worker()
            self._workers.add(worker)
        result = worker.compare(gold, answer, self.seconds)
        if result is None:
            worker.stop()
            self._workers.discard(worker)
            if not self._warned:
                self._warned = True
                logger.warning(
                    "comparing an answer took more than %g s or too much memory and counts as wrong (said once): "
                    "%.80r against %.80r",
                    self.seconds,
                    answer,
                    gold,
                )
            return False
        self._idle.put(worker)
        return result

    def close(self) -> None:
        """End the processes. The grader may be used again afterwards."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)  # what has not begun: each would take its deadline
        for worker in list(self._workers):
            worker.stop()  # also makes a thread that waits for it return
        if self._threads is not None:
            self._threads.shutdown(wait=True)
            self._threads = None
        for worker in list(self._workers):
            worker.stop()
        self._workers.clear()
        self._idle = queue.LifoQueue()


class _Worker:
    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - until it has started
        # -P: the script's own directory must not be searched for modules.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for us; it ends when its stdin does
        )
        self._started = False

    def compare(self, gold: str, answer: str, seconds: float) -> bool | None:
        """None: it did not answer in time, or died."""
        if not self._started:
            self._start()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([gold, answer, seconds]).encode() + b"\n")
        except BrokenPipeError:
            return None
        line = self._line(seconds + _GRACE_SECONDS)
        return None if line is None else json.loads(line)

    def _start(self) -> None:
        """Raises VimeError: it ended instead, with its last words; or is not ready in time."""
        ready = self._line(_START_SECONDS) == b"ready"
        if not ready:
            try:  # its pipe is closed before it has ended
                code = self._process.wait(_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                how = f"was not ready within {_START_SECONDS:g} s"
            else:
                how = f"ended when it started (exit code {code})"
            self.stop()
            self._errors.seek(0)
            words = self._errors.read().decode(errors="replace").strip().splitlines()
            said = f": {words[-1]}" if words else ""
            raise VimeError(
                f"the process that compares mathematical answers {how}{said}; "
                f"'{sys.executable} -c \"import math_verify\"' should work (package math-verify)"
            )
        self._errors.close()
        self._started = True

    def _line(self, seconds: float) -> bytes | None:
        assert self._process.stdout is not None
        deadline, line = time.monotonic() + seconds, b""
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                return None
            piece = self._process.stdout.read(4096)
            if not piece:
                return None
            line += piece
        return line.strip()

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
