"""One worker of a vLLM engine without its weights, its GPU and the other workers: vLLM's own model on the meta device.

A worker's plan depends on the model, the engine's parallel sizes and the worker's number. vLLM's model finds those in
its process groups, which here are torch's "fake" ones (torch.testing._internal.distributed.fake_pg): they have a size
and a rank, and do nothing. Modules, loaders and expert placement are those of a real worker; only what would talk to
other processes is left out (device communicators, message queues).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@dataclass(frozen=True)
class EngineLayout:
    """Workers of an engine are numbered dp * tp + tp rank, as in vime's adapter. ``ep``: --enable-expert-parallel."""

    tp: int
    dp: int = 1
    ep: bool = False

    @property
    def workers(self) -> int:
        return self.tp * self.dp

    def __str__(self) -> str:
        return f"TP{self.tp}" + (f" DP{self.dp}" if self.dp > 1 else "") + (f" EP{self.workers}" if self.ep else "")


@contextmanager
def worker_model(checkpoint: str, engine: EngineLayout, worker: int) -> Iterator[Any]:
    """The model of one worker, in bfloat16 on the meta device; vLLM's parallel state exists while this is open.

    Its load_weights can be traced as the adapter does it: with its own loaders, on meta tensors.
    """
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = EngineArgs(
        model=checkpoint,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=512,
        kv_cache_memory_bytes=64 << 20,
        tensor_parallel_size=engine.tp,
        enable_expert_parallel=engine.ep,
    ).create_engine_config()
    parallel = config.parallel_config
    # EngineArgs takes a data parallel engine only together with its coordinator; the model reads no more than these.
    parallel.data_parallel_size = engine.dp
    parallel.data_parallel_rank = parallel.data_parallel_index = worker // engine.tp
    parallel.rank = worker % engine.tp
    dist.init_process_group("fake", rank=worker, world_size=engine.workers, store=FakeStore())
    try:
        with set_current_vllm_config(config), _alone():
            parallel_state.init_distributed_environment(engine.tp, parallel.rank, "env://", 0, "fake")
            parallel_state.initialize_model_parallel(engine.tp, backend="fake")
            with set_default_torch_dtype(torch.bfloat16), torch.device("meta"):
                model = initialize_model(vllm_config=config)
            yield model
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


@contextmanager
def _alone() -> Iterator[None]:
    """Groups of one process that plays all sizes, and the map of experts in real memory: loaders read it."""
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers.fused_moe import expert_map_manager

    new_group, determine = dist.new_group, expert_map_manager.determine_expert_map

    def fake_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        return new_group(ranks, backend="fake")

    def coordinator(group_ranks: Any, local_rank: int, backend: str, **kwargs: Any) -> Any:
        name = kwargs.get("group_name")
        return parallel_state.GroupCoordinator(group_ranks, local_rank, backend, False, group_name=name)

    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        with torch.device("cpu"):
            return determine(*args, **kwargs)

    with ExitStack() as patches:
        for owner, name, ours in (
            (dist, "new_group", fake_group),
            (parallel_state, "init_model_parallel_group", coordinator),
            (parallel_state, "in_the_same_node_as", lambda group, source_rank=0: [True] * group.size()),
            (expert_map_manager, "determine_expert_map", on_cpu),
        ):
            patches.enter_context(mock.patch.object(owner, name, ours))
        yield
