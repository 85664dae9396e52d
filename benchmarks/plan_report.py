"""The figures of plan_scale.py as tables, and the seconds that they predict."""

from __future__ import annotations

import datetime
import heapq
import platform
import shlex
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vime.backends.vllm_utils.adapter import check_version
from vime.models.layout import ParallelLayout, checkpoint_tensors
from vime.models.spec import ModelSpec

if TYPE_CHECKING:
    from plan_scale import Case, Result

LOCAL = 2.05e12  # bytes/s, of one GPU's memory to itself: 61.06 GB in 29.5 to 29.8 ms, weight_sync_h200.md
LINK = 363e9  # bytes/s that one GPU reads over NVLink: 30.5 GB in 84 ms, weight_sync_layouts_h200x2.md
NETWORK = 50e9  # bytes/s per GPU, each way: 400 Gb/s, an ASSUMPTION
AROUND = 0.050  # s of an update_weights() that are not the copy (pause to resume): 50 to 51 ms, weight_sync_h200.md


@dataclass
class Way:
    """What goes one way (local, link or network) in one sync of all engines, in bytes."""

    reader: int = 0  # most that one worker reads
    source: int = 0  # most that is read from one rank
    engine: int = 0  # most that the workers of one engine read together


def ways(result: Result) -> dict[str, Way]:
    found = {"local": Way(), "link": Way(), "network": Way()}
    for name, way in found.items():
        sources: dict[int, int] = defaultdict(int)
        engines: dict[int, int] = defaultdict(int)
        for reader, read in result.read.items():
            mine = {source: n for source, n in read.items() if way_of(result.case, reader, source) == name}
            way.reader = max(way.reader, sum(mine.values()))
            engines[reader // result.case.engine.workers] += sum(mine.values())
            for source, n in mine.items():
                sources[source] += n
        way.source, way.engine = max(sources.values(), default=0), max(engines.values())
    return found


def way_of(case: Case, reader: int, source: int) -> str:
    if reader == source:
        return "local"
    return "link" if case.node(reader) == case.node(source) else "network"


def predicted(found: dict[str, Way]) -> dict[str, float]:
    """Seconds of each way by its busiest GPU, none overlapping another. What comes over the network lands in a staging
    arena and is copied once more from there."""
    return {
        "local": (found["local"].reader + found["network"].reader) / LOCAL,
        "link": max(found["link"].reader, found["link"].source) / LINK,
        "network": max(found["network"].reader, found["network"].source) / NETWORK,
    }


def in_all(result: Result) -> float:
    found = predicted(ways(result))
    return found["local"] + found["link"] + streamed(result) + AROUND


def streamed(result: Result) -> float:
    """Seconds until every worker has what it reads over the network, one source after the other in the order of
    vime.weight_sync.remote, each source serving one worker at a time, first come, first served."""
    wanted = {
        reader: [(source, n) for source, n in in_order(result.case, reader, read) if n]
        for reader, read in result.read.items()
    }
    free: dict[int, float] = defaultdict(float)  # source -> when it has served all that came until now
    ready = [(0.0, reader, 0) for reader in wanted]
    end = 0.0
    while ready:
        now, reader, number = heapq.heappop(ready)
        end = max(end, now)
        if number < len(wanted[reader]):
            source, n = wanted[reader][number]
            free[source] = max(now, free[source]) + n / NETWORK
            heapq.heappush(ready, (free[source], reader, number + 1))
    return end


def in_order(case: Case, reader: int, read: dict[int, int]) -> list[tuple[int, int]]:
    """As vime.weight_sync.remote.chunks has it: every worker begins with its neighbour's rank."""
    found = [(source, n) for source, n in read.items() if way_of(case, reader, source) == "network"]
    return sorted(found, key=lambda part: (part[0] < reader, part[0]))


def gb(count: float) -> str:
    return f"{count / 1e9:.1f}" if count else "0"


def mb(count: float) -> str:
    return f"{count / 1e6:.2f}"


def s(seconds: float) -> str:
    return f"{seconds:.3f}" if seconds < 0.1 else f"{seconds:.2f}"


Columns = dict[str, Callable[["Result"], str]]
NAME: Columns = {"case": lambda r: r.case.name, "engine": lambda r: str(r.case.engine)}
TRAINER: Columns = {
    "case": lambda r: r.case.name,
    "parameters": lambda r: f"{model_bytes(r.spec) / 2e9:.1f} G",
    "checkpoint tensors": lambda r: str(len(r.trainer.shards.tensors)),
    "trainer": lambda r: describe_layout(r.case.trainer),
    "boxes": lambda r: str(len(r.trainer.shards.entries)),
    "describe, one rank, s": lambda r: s(r.trainer.seconds["describe"]),
    "all ranks' JSON, MB": lambda r: mb(r.trainer.part_bytes),
    "merge s": lambda r: s(r.trainer.seconds["merge"]),
    "whole map as JSON, MB": lambda r: mb(r.trainer.full_bytes),
    "encode s": lambda r: s(r.trainer.seconds["encode"]),
}
PLAN: Columns = NAME | {
    "JSON for an engine, MB": lambda r: mb(r.nearest_bytes),
    "choose, encode s": lambda r: s(r.seconds["nearest"]),
    "decode s": lambda r: s(r.seconds["decode"]),
    "trace s": lambda r: s(r.seconds["trace"]),
    "compose s": lambda r: s(r.seconds["compose"]),
    "table s": lambda r: s(r.seconds["table"]),
    "chunks s": lambda r: s(r.seconds["chunks"]),
    "**plan of a worker, s**": lambda r: (
        f"**{sum(r.seconds[k] for k in ('decode', 'trace', 'compose', 'table', 'chunks')):.1f}**"
    ),
    "copies": lambda r: span([w.copies for w in r.workers]),
    "runs": lambda r: span([w.runs for w in r.workers]),
    "left to torch": lambda r: span([w.left_to_torch for w in r.workers]),
    "table, MB": lambda r: mb(max(w.table_bytes for w in r.workers)),
    "chunks from other nodes": lambda r: span([w.chunks for w in r.workers]),
    "requests for them, MB": lambda r: mb(max(w.request_bytes for w in r.workers)),
}
BYTES: Columns = NAME | {
    "engines": lambda r: str(r.case.engines),
    "weights of a worker": lambda r: gb(max(sum(read.values()) for read in r.read.values())),
    "local, most of a worker": lambda r: gb(ways(r)["local"].reader),
    "link": lambda r: gb(ways(r)["link"].reader),
    "network": lambda r: gb(ways(r)["network"].reader),
    "local, of an engine": lambda r: gb(ways(r)["local"].engine),
    "link, engine": lambda r: gb(ways(r)["link"].engine),
    "network, engine": lambda r: gb(ways(r)["network"].engine),
    "link, read from one GPU": lambda r: gb(ways(r)["link"].source),
    "network, read from one GPU": lambda r: gb(ways(r)["network"].source),
}
SYNC: Columns = NAME | {
    "local s": lambda r: s(predicted(ways(r))["local"]),
    "link s": lambda r: s(predicted(ways(r))["link"]),
    "network s": lambda r: s(streamed(r)),
    "network s, without queueing": lambda r: s(predicted(ways(r))["network"]),
    "**update_weights(), s**": lambda r: f"**{s(in_all(r))}**",
}


def model_bytes(spec: ModelSpec) -> int:
    return 2 * sum(torch.Size(shape).numel() for shape in checkpoint_tensors(spec).values())


def describe_layout(layout: ParallelLayout) -> str:
    return f"{layout.world_size} ranks, TP{layout.tp} PP{layout.pp} EP{layout.ep} ETP{layout.etp}"


def span(values: list[int]) -> str:
    low, high = min(values), max(values)
    return str(high) if low == high else f"{low} to {high}"


def table(columns: Columns, results: list[Result]) -> list[str]:
    return [
        "| " + " | ".join(columns) + " |",
        "| " + " | ".join("---" for _ in columns) + " |",
        *("| " + " | ".join(show(result) for show in columns.values()) + " |" for result in results),
        "",
    ]


def report(results: list[Result]) -> str:
    trainers = list({result.case.name: result for result in results}.values())
    command = shlex.join(["python", "benchmarks/plan_scale.py", *sys.argv[1:]])
    return "\n".join(
        [
            "# Plans of large layouts",
            "",
            f"`{command}` on {datetime.date.today()}, one core of {cpu_name()}, Python {platform.python_version()}, "
            f"torch {torch.__version__}, vLLM {check_version()}. Nothing was copied; the plans are those of a real run "
            "(the script says how). Seconds are CPU seconds, on one core, of the slowest rank or worker.",
            "",
            *(f"- {result.case.name}: {describe_model(result)}" for result in trainers),
            "",
            "Trainer, once at connect (every rank describes itself, in parallel; every rank merges):",
            "",
            *table(TRAINER, trainers),
            "Engines, once at connect (the slot's leader chooses and encodes; workers do the rest, in parallel):",
            "",
            *table(PLAN, results),
            "Bytes of one sync of all engines, in GB: from the worker's own GPU (local), from another GPU of its node "
            f"of {results[0].case.gpus_per_node} (link), from another node (network). The last two columns: what all "
            "workers together read from one GPU.",
            "",
            *table(BYTES, results),
            "Predicted seconds of one sync of all engines at once, by the busiest GPU:",
            "",
            *table(SYNC, results),
            *NOTES,
        ]
    )


NOTES = (
    f"- local: {LOCAL / 1e12:.2f} TB/s, measured on one H200 (weight_sync_h200.md: 61.06 GB in 29.5 ms; strided rows "
    "of 256 B to 8 KiB within 4% of that).",
    f"- link: {LINK / 1e9:.0f} GB/s into one GPU, measured on two H200 (weight_sync_layouts_h200x2.md: half of "
    "30B-A3B, strided rows among it, 30.5 GB in 84 ms). That a GPU which several others read from gives as much in "
    "all is taken for granted, not measured.",
    f"- network: {NETWORK / 1e9:.0f} GB/s for each GPU and direction, 400 Gb/s: an assumption, not measured. Every "
    "worker takes from one source after the other, in the order of their ranks from its neighbour's on, and a source "
    "serves one worker at a time; without queueing: bytes of the busiest GPU over the bandwidth. What arrives is "
    "counted as local once more, since it is copied from a staging arena.",
    f"- update_weights(): the three one after the other, nothing overlapping, and the {AROUND * 1e3:.0f} ms that "
    "pausing, messages and resuming take (weight_sync_h200.md, one engine of one worker; without the checks).",
)


def describe_model(result: Result) -> str:
    spec, like = result.spec, result.case.model
    dense = spec.num_layers - sum(spec.moe_layers)
    return (
        f"{like}: {spec.num_layers} layers ({dense} of them dense), hidden size {spec.hidden_size}, {spec.num_experts} "
        f"experts of width {spec.moe_ffn_hidden_size}, {spec.num_attention_heads} heads, {spec.num_query_groups} "
        f"key/value heads, vocabulary {spec.vocab_size}; {model_bytes(spec) / 1e9:.0f} GB in bfloat16. "
        + DIFFERENCES.get(like, "")
    ).rstrip()


DIFFERENCES = {
    "DeepSeek-V3's size": "NOT DeepSeek's architecture, which vime does not have: Qwen3-MoE with its number and width "
    "of experts, hidden size, dense first layers and vocabulary. Plain grouped-query attention stands for MLA, there "
    "is no shared expert, and 60 layers stand for 61, which do not divide into pipeline stages. In bfloat16 it does "
    "not fit into an engine of 8 H200s (165 GB each, and the cache); an engine that quantises to fp8 reads as much and "
    "keeps half.",
}


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "an unknown CPU")
