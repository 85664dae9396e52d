"""What one update measured, over all workers and engines."""

from __future__ import annotations

from typing import Any

from vime.backends.megatron_utils.update_weight.engine_update import EngineUpdate


def engine_stats(update: EngineUpdate) -> dict[str, Any]:
    """What the summary needs of one engine."""
    slot = update.address.slot
    total = local = 0
    for worker, state in enumerate(update.states):
        by_rank = {int(rank): count for rank, count in state.get("bytes_by_rank", {}).items()}
        total += sum(by_rank.values())
        local += by_rank.get(slot.start + worker, 0) if slot is not None else 0
    phases = ("direct", "staged", "check")  # on a GPU the first two only enqueue, and the last one waits
    copying = [sum(state["seconds"].get(phase, 0.0) for phase in phases) for state in update.states]
    return {"bytes": total, "local": local, "copy": max(copying, default=0.0), "seconds": update.seconds}


def summary(engines: list[dict[str, Any]], waited: float, seconds: float) -> dict[str, float]:
    """Figures of one update over all engines.

    ``bytes`` read by all workers; ``seconds`` in all; ``copy_seconds`` of the slowest worker and ``gb_per_second`` of
    all together while copying; ``local_share`` of the bytes came from the rank on the worker's own device,
    ``link_share`` from others of its node; ``ready_seconds`` this rank waited for the slowest rank;
    ``<phase>_seconds`` of the slowest engine.
    """
    total, local = sum(e["bytes"] for e in engines), sum(e["local"] for e in engines)
    copying = max((e["copy"] for e in engines), default=0.0)
    out = {
        "bytes": float(total),
        "seconds": seconds,
        "copy_seconds": copying,
        "gb_per_second": total / copying / 1e9 if copying else 0.0,
        "local_share": local / total if total else 0.0,
        "link_share": (total - local) / total if total else 0.0,
        "ready_seconds": waited,
    }
    for phase in dict.fromkeys(phase for e in engines for phase in e["seconds"]):
        out[f"{phase}_seconds"] = max(e["seconds"].get(phase, 0.0) for e in engines)
    return out
