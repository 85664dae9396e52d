"""What trainer ranks do in test_update_weight_apart.py: ranks on other nodes, played by ranks that say so."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.unit.backends.megatron_utils.update_weight.scenarios import attempt
from tests.unit.backends.megatron_utils.update_weight.toy_engine import SPEC, Rank, ask, digests, fail_at, make_config
from vime.backends.megatron_utils.update_weight import weight_update_class
from vime.models.layout import ParallelLayout
from vime.types import EngineAddress
from vime.weight_sync.remote import Sender


def sync(
    rank: int,
    layout: ParallelLayout,
    addresses: list[EngineAddress],
    elsewhere: tuple[int, ...] = (),
    versions: int = 2,
    before: dict[int, dict[str, Any]] | None = None,
    dies: tuple[int, int] | None = None,
    stale: bool = False,
    folder: str | None = None,
    clears: int | None = None,
    refuses_channel: bool = False,
    **options: Any,
) -> list[dict[str, Any]]:
    """Connect, and sync some versions.

    Args:
        elsewhere: ranks on another node.
        before: version -> what an engine shall do at its next calls: {"engine": index, path: kinds}.
        dies: a rank, and the version in which it is killed after it has begun to send.
        stale: the wrong rule of S10: from version 2 on, what is sent are the weights of version 1.
        folder: holds what UpdateWeightFromDisk writes.
        clears: after that version, the file in place of that folder is gone.
        refuses_channel: the first engine refuses to open its channel.
    """
    config = make_config(**options | ({"update_weight_disk_dir": f"{folder}/weights"} if folder else {}))
    if folder is not None:
        config.checkpoint.hf_checkpoint = folder
        Path(folder, "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    me = Rank(rank, layout)
    update = weight_update_class(config.weight_sync.update_weight_transport)
    me.update = update(config, SPEC, layout, rank, me.params, "cpu")
    if rank in elsewhere:
        me.update._node = "elsewhere"
    if refuses_channel:
        if rank == 0:
            fail_at(addresses[0], "vime_open_channel", "no room for a channel")
        dist.barrier()
        return [attempt(me.update.connect_rollout_engines, addresses)]
    me.update.connect_rollout_engines(addresses)
    found = []
    for version in range(1, versions + 1):
        if stale and version == 2:
            kept = {source: arena.clone() for source, arena in me.update._own.arenas().items()}
            me.update._own.arenas = lambda kept=kept: kept
        me.train(version)
        faults = dict((before or {}).get(version, {}))
        if faults and rank == 0:
            ask(addresses[faults.pop("engine")], "/test/faults", faults)
        dist.barrier()
        if dies == (rank, version):
            _die_while_sending()
        result = attempt(lambda version=version: me.update.update_weights(version))
        if dies and version == dies[1]:
            return [*found, result]
        dist.barrier()
        if rank == 0:
            result["digests"] = [digests(address) for address in addresses]
            result["channels"] = sorted(me.update._channels._ends)
            result["left"] = sorted(os.listdir(f"{folder}/weights")) if folder and clears != version else []
            if folder and clears == version:
                Path(folder, "weights").unlink()
        dist.barrier()
        found.append(result)
    return found


def _die_while_sending() -> None:
    def die(self: Sender, version: int, arenas: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    Sender.serve = die  # type: ignore[method-assign]
