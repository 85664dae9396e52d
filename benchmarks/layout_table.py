"""The table that weight_sync_layouts.py writes, and what is held against it."""

from __future__ import annotations

import argparse
import datetime
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.layout_ranks import OWN, REST

TIMEOUT = 60.0  # seconds that one phase of an update may take, and so the time to the error after a kill
_IN_THE_MIDDLE = "update|done"  # phases in which a kill in the middle is noticed
LIMITS = {
    "copy": 1.3,  # x predicted
    "beside": 80e-3,  # seconds beside that
    "link": 350e9,  # bytes/s of a worker for which what is copied on its own GPU is less than a hundredth of the time
}


class Table:
    def __init__(self, options: argparse.Namespace) -> None:
        self.rows: list[dict[str, Any]] = []
        self.kills: list[dict[str, Any]] = []
        self.bandwidths: dict[str, float | None] = {}
        self.finished = False
        self._rounds, self._on_gpus = options.rounds, options.device == "cuda"
        self._device = (
            "2 x " + torch.cuda.get_device_name() if options.device == "cuda" else "a CPU, models in miniature"
        )
        default = "h200x2" if options.device == "cuda" else "cpu"
        self._path = options.out or Path(__file__).parent / f"weight_sync_layouts_{default}.md"

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.write()

    def usual_seconds(self, model: str, trainer: str, engine: str, transport: str) -> float:
        """In a case that was measured (else 0) what the call takes in which an engine's workers copy; of the bucketed
        path what all calls take with which buckets are sent."""
        trainer += "" if transport == "planned" else f", {transport}"
        case = {"model": model, "trainer": trainer, "engine": engine, "view": OWN.name}
        found = [row["call"] for row in self.rows if case.items() <= row.items() and "call" in row]
        return found[0] if found else 0.0

    def broken(self) -> list[str]:
        """What does not hold, of what is measured and asserted."""
        out = []
        for row in self.rows:
            name = ", ".join(row[key] for key in ("model", "trainer", "engine", "view"))
            if "expandable" in row["view"]:
                if "memory of expandable segments has no IPC handle" not in row.get("error", ""):
                    out.append(f"{name}: not refused in words")
            elif "error" in row:
                out.append(f"{name}: {row['error']}")
            else:
                out += [f"{name}: {what}" for what in _broken(row, self._on_gpus)]
        for kill in self.kills:
            said = {text for text in kill["said"] if text != "killed"}  # of two ranks that live the same
            where = kill["victim"] if "rank" in kill["victim"] else "engine 0"
            wanted = f"weight update failed in phase '({_IN_THE_MIDDLE})' at {where} "
            if kill["seconds"] > TIMEOUT or len(said) != 1 or not re.search(wanted, next(iter(said))):
                out.append(f"{kill['model']}, {kill['engine']}, {kill['victim']} killed: {sorted(said)}")
        if not self.finished:
            out.append("the program has not ended")
        return out

    def write(self) -> None:
        self._path.write_text(self.text())

    def text(self) -> str:
        measured = ", ".join(f"{k} {v / 1e9:.0f} GB/s" for k, v in self.bandwidths.items() if v)
        lines = [
            "# Weight sync between layouts on two devices",
            "",
            f"`python {shlex.join(['benchmarks/weight_sync_layouts.py', *sys.argv[1:]])}` on {datetime.date.today()}, "
            f"{self._device}, torch {torch.__version__}. Trainer ranks are stand-ins (parameters of the real names, "
            "shapes and cuts; values by tensor and place, others at every update). Every case was first proved equal, "
            "planned path and vLLM's own loading, in a digest of every parameter and buffer; then come two updates "
            f"with the full check, and {self._rounds} with the sampled one, which are measured (median, least and "
            f"most), each after {REST:.1f} s of rest. After the last one every engine held the same as after the first "
            "case, whatever the trainer's layout and the path; buckets are sent once.",
            "",
            f"Measured in the same run by torch's own copies, one way: {measured}. Predicted: local and link bytes of "
            "the slowest worker at these, one after the other. Bytes over the link are of one update, all workers; "
            "counters also count the check, and what NCCL and others send.",
            "",
            "| model | trainer | engines | trainer ranks see | leaders | GB | link GB, planned | link GB, counted "
            "| slowest worker: local, link GB | by copy engines | copy | predicted | GB/s of it | update "
            "| with full check |",
            "| --- |" + " --- |" * 14,
            *(self._line(row) for row in self.rows),
            "",
        ]
        if self.kills:
            when = "half of the usual time after the call in which workers copy, or buckets are sent, was made"
            lines += [f"Killed {when} (by plan from PP2, by buckets from TP2; deadline {TIMEOUT:.0f} s):", ""]
            for kill in self.kills:
                said = "; ".join(f"rank {rank}: {text[:300]}" for rank, text in enumerate(kill["said"]))
                case = f"{kill['model']}, {kill['engine']}, {kill['transport']}, {kill['victim']}"
                lines.append(f"- {case}: after {kill['seconds']:.2f} s; {said}")
            lines.append("")
        broken = self.broken()
        lines += ["Not as it must be:", "", *(f"- {text}" for text in broken)] if broken else ["All limits hold."]
        return "\n".join(lines) + "\n"

    def _line(self, row: dict[str, Any]) -> str:
        start = [row["model"], row["trainer"], row["engine"], row["view"]]
        if "error" in row:
            return "| " + " | ".join([*start, row["error"][:300].replace("\n", " "), *[""] * 10]) + " |"
        worker, crossed = row["worker"], row["crossed"]
        copy = worker["copy"]
        rate = (worker["local"] + worker["link"]) / copy / 1e9 if copy else 0.0
        cells = [
            *start,
            " and ".join(map(str, row["leaders"])) + ("" if row["starts"] else " (starts counted wrong)"),
            f"{row['bytes'] / 1e9:.2f}" if row["bytes"] is not None else "",
            f"{row['link'] / 1e9:.3f}" if row["link"] is not None else "",
            f"{crossed / 1e9:.3f}" if crossed is not None else "",
            f"{worker['local'] / 1e9:.2f}, {worker['link'] / 1e9:.2f}" if copy else "",
            f"{worker['engines'] / worker['link']:.0%}" if copy and worker["link"] else "",
            f"{copy * 1e3:.2f} ms" if copy else "",
            f"{worker['predicted'] * 1e3:.2f} ms ({copy / worker['predicted']:.2f}x)" if copy else "",
            f"{rate:.0f}" if copy else "",
            f"**{row['update'] * 1e3:.0f} ms** ({min(row['updates']) * 1e3:.0f} to {max(row['updates']) * 1e3:.0f})",
            f"{row['full'] * 1e3:.0f} ms" if row["full"] else "",
        ]
        return "| " + " | ".join(cells) + " |"


def _broken(row: dict[str, Any], on_gpus: bool) -> list[str]:
    """Of one case. On a CPU there are neither links nor limits for speed."""
    worker, planned, counted = row["worker"], row["link"], row["crossed"]
    out = [] if set(row["leaders"]) == {1} and row["starts"] else [f"leaders {row['leaders']}"]
    if not on_gpus:
        return out
    if worker["copy"]:
        if any(each["copy"] > LIMITS["copy"] * each["predicted"] for each in row["workers"]):
            out.append("a copy takes too long")
        if row["update"] > LIMITS["copy"] * worker["predicted"] + LIMITS["beside"]:
            out.append("the update takes too long")
        pulls = [each for each in row["workers"] if each["link"] > 0 and each["beside"] < 0.01 * each["copy"]]
        out += ["the link is too slow" for each in pulls if each["link"] / each["copy"] < LIMITS["link"]]
        # Half of a layer is in large pieces, whatever the layout; 2 GB are well above what is worth it.
        idle = [each for each in row["workers"] if each["link"] > 2e9 and each["engines"] < 0.4 * each["link"]]
        out += ["copy engines read too little" for _ in idle]
    if counted is None:
        out.append("what crossed the link was not counted")
    elif planned is not None and not planned <= counted + 1e4 <= planned * 1.02 + 1e6:
        out.append(f"{counted:.0f} bytes crossed the link, {planned:.0f} were planned")
    return out
