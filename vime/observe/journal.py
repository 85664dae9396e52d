"""Append-only JSON Lines files that survive a crash at any moment."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Whole rows of a JSON Lines file; a torn last line (a crash while it was written) is left out. [] if absent."""
    path = Path(path)
    return [row for row, _ in _whole_rows(path.read_bytes())] if path.exists() else []


def _whole_rows(data: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
    for line in data.splitlines(keepends=True):
        if not line.endswith(b"\n"):
            return
        try:
            row = json.loads(line, parse_constant=lambda name: None)  # NaN, which no JSON has
        except ValueError:  # a crash of the whole machine may leave zero bytes where a line should be
            return
        if not isinstance(row, dict):
            return
        yield row, line


def write_aside(path: Path, data: bytes) -> None:
    """Replace a file as a whole: whoever reads it, at any moment, sees the old content or the new one."""
    aside = path.with_name(path.name + ".tmp")
    with aside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # the rename itself
    finally:
        os.close(directory)


class Journal:
    """Rows of one run, each with a "step"; every row is on the disk when :meth:`append` returns.

    At opening a torn last line is dropped, and so are the rows of ``next_step`` and later: a run that continues from a
    checkpoint makes them anew, and the file ends up as if nothing had happened.
    """

    def __init__(self, path: str | Path, next_step: int = 0) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        data = self.path.read_bytes() if self.path.exists() else b""
        kept = [(row, line) for row, line in _whole_rows(data) if row.get("step", -1) < next_step]
        whole = b"".join(line for _, line in kept)
        if whole != data:
            write_aside(self.path, whole)
        self.last: dict[str, Any] | None = kept[-1][0] if kept else None
        self._last_offset = len(whole) - (len(kept[-1][1]) if kept else 0)
        self._file = self.path.open("r+b" if self.path.exists() else "w+b")
        self._file.seek(0, os.SEEK_END)

    def append(self, *rows: dict[str, Any]) -> None:
        """Append rows, one line each, in one write."""
        if not rows:
            return
        lines = [_line(row) for row in rows]
        end = self._file.seek(0, os.SEEK_END)
        self._last_offset = end + sum(map(len, lines[:-1]))
        self._write(b"".join(lines))
        self.last = rows[-1]

    def extend_last(self, more: dict[str, Any]) -> None:
        """Add entries to the last row, in place."""
        if self.last is None:
            raise ValueError(f"{self.path}: there is no row to extend")
        self.last = {**self.last, **more}
        self._file.seek(self._last_offset)
        self._write(_line(self.last))

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._file.truncate()
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _line(row: dict[str, Any]) -> bytes:
    return json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n"
