"""Timeline of a run as a Chrome trace: open ``trace.json`` in https://ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vime.observe.journal import write_aside


class Trace:
    """One JSON array, one event per line, written as events end; the viewers accept the array without its end, so a
    killed run's trace can be opened too. A continued run adds to the file.

    ``span`` times are seconds since the epoch (``time.time``); the file holds microseconds, as the format wants.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        events = self._read()
        self._tracks: dict[str, int] = {
            event["args"]["name"]: event["tid"] for event in events if event.get("name") == "thread_name"
        }
        write_aside(self.path, b"[\n" + b"".join(self._line(event) for event in events))
        self._file = self.path.open("ab")

    def span(self, name: str, start: float, end: float, track: str = "driver", **args: Any) -> None:
        """Add one event on the line ``track`` of the timeline; ``args`` are shown when it is clicked."""
        if track not in self._tracks:
            self._tracks[track] = len(self._tracks)
            tid = self._tracks[track]
            self._add({"name": "thread_name", "ph": "M", "pid": 0, "tid": tid, "args": {"name": track}})
        event = {"name": name, "ph": "X", "pid": 0, "tid": self._tracks[track]}
        event |= {"ts": round(start * 1e6), "dur": round((end - start) * 1e6)}
        self._add(event | ({"args": args} if args else {}))

    def close(self) -> None:
        """End the array, so that strict JSON readers accept the file as well."""
        if not self._file.closed:
            self._file.close()
            events = self._read()
            write_aside(self.path, ("[\n" + ",\n".join(json.dumps(event) for event in events) + "\n]\n").encode())

    def _add(self, event: dict[str, Any]) -> None:
        self._file.write(self._line(event))
        self._file.flush()

    @staticmethod
    def _line(event: dict[str, Any]) -> bytes:
        return json.dumps(event).encode() + b",\n"

    def _read(self) -> list[dict[str, Any]]:
        events = []
        for line in self.path.read_text().splitlines() if self.path.exists() else []:
            try:
                event = json.loads(line.rstrip(","))
            except ValueError:
                continue  # the brackets of the array, or the torn last line of a killed run
            if isinstance(event, dict):
                events.append(event)
        return events
