"""Megatron's torch_dist format, written by torch's own writer: threads of the trainer's process.

Megatron's writer starts a manager process by "spawn" (it imports the main script again and takes 2 to 3 s) and forks
one process per file, with CUDA initialised. That pays off only for saving asynchronously. The files are the same ones:
Megatron's reader, ours or Megatron-LM's, reads them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

WRITER_THREADS = 2  # files per rank


class TorchDistWriter(SaveShardedStrategy):
    """A strategy for ``megatron.core.dist_checkpointing.save``. A failure on one rank is raised on all."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    @property
    def can_handle_sharded_objects(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return True

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        # Only one replica of each tensor is kept, which makes the plans of the ranks disjoint.
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
        save(
            mcore_to_pyt_state_dict(by_key, False),
            storage_writer=FileSystemWriter(checkpoint_dir, thread_count=WRITER_THREADS),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )
