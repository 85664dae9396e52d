"""What one update measured, over all workers and engines."""

from __future__ import annotations

from typing import Any

from vime.backends.megatron_utils.update_weight.engine_update import EngineUpdate


def engine_stats(update: EngineUpdate) -> dict[str, Any]:
    """What the summary needs of one engine."""
    total = local = network = 0
    for state in update.states:
        by_rank = {int(rank): count for rank, count in state.get("bytes_by_rank", {}).items()}
        senders = state.get("senders", [])
        total += sum(by_rank.values())
        network += sum(by_rank.get(rank, 0) for rank in senders)
        if (neighbour := state.get("neighbour")) is not None and neighbour not in senders:
            local += by_rank.get(neighbour, 0)
    phases = ("direct", "staged", "check")  # on a GPU the first two only enqueue, and the last one waits
    copying = [sum(state["seconds"].get(phase, 0.0) for phase in phases) for state in update.states]
    moved = {"bytes": total, "local": local, "network": network}
    return moved | {"copy": max(copying, default=0.0), "seconds": update.seconds}


def unused_by_all(states: list[dict[str, Any]]) -> list[str]:
    """Checkpoint tensors from which no worker of an engine takes anything: with pipeline or expert parallelism each
    worker leaves out what the others hold."""
    others = [set(state["unused"]) for state in states[1:]]
    return [name for name in states[0]["unused"] if all(name in unused for unused in others)]


def summary(engines: list[dict[str, Any]], waited: float, seconds: float) -> dict[str, float]:
    """Figures of one update over all engines.

    ``bytes`` read by all workers; ``seconds`` in all; ``copy_seconds`` of the slowest worker and ``gb_per_second`` of
    all together while copying; ``local_share`` of the bytes came from the rank on the worker's own device,
    ``link_share`` from others whose memory it opened, ``network_share`` was sent to it; ``ready_seconds`` this rank
    waited for the slowest rank; ``<phase>_seconds`` of the slowest engine.
    """
    total, local, network = (sum(e[kind] for e in engines) for kind in ("bytes", "local", "network"))
    copying = max((e["copy"] for e in engines), default=0.0)
    out = {
        "bytes": float(total),
        "seconds": seconds,
        "copy_seconds": copying,
        "gb_per_second": total / copying / 1e9 if copying else 0.0,
        "local_share": local / total if total else 0.0,
        "link_share": (total - local - network) / total if total else 0.0,
        "network_share": network / total if total else 0.0,
        "ready_seconds": waited,
    }
    for phase in dict.fromkeys(phase for e in engines for phase in e["seconds"]):
        out[f"{phase}_seconds"] = max(e["seconds"].get(phase, 0.0) for e in engines)
    return out
