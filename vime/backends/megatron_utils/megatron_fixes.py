"""Corrections to megatron-core 0.16.1 without TransformerEngine and apex. All are needed on GPUs too unless it says so.

Each replaces one private name; tests/unit/backends/megatron_utils/test_megatron_fixes.py has a test per correction that
fails when Megatron's own code becomes right or moves. This module imports Megatron, so ``cpu_compat.install()`` first.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import distrib_optimizer
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.moe import moe_utils, token_dispatcher

SUPPORTED_VERSION = "0.16.1"
_applied = False


def apply() -> None:
    """Apply the module-level corrections once per process."""
    global _applied
    if _applied:
        return
    _applied = True
    if not hasattr(moe_utils, "te_general_gemm"):
        # The router's gating calls it if it is not None, but without TransformerEngine the name is never bound.
        moe_utils.te_general_gemm = None  # pyright: ignore[reportAttributeAccessIssue]
    token_dispatcher.maybe_move_tensor_to_cpu = _move_tensor_to_cpu
    mappings._gather_along_first_dim = _gather
    mappings._reduce_scatter_along_first_dim = _reduce_scatter
    if not distrib_optimizer.HAVE_APEX_OR_TE:
        distrib_optimizer.DistributedOptimizer._set_main_param_and_optimizer_states = _set_main_param_and_states


_original_move = moe_utils.maybe_move_tensor_to_cpu


def _move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """CPU only: the alltoall dispatcher needs its split sizes in numpy; Megatron converts only tensors on a GPU."""
    if as_numpy and torch.is_tensor(tensor) and tensor.device.type == "cpu":
        return tensor.numpy()
    return _original_move(tensor, as_numpy=as_numpy, record_stream=record_stream)


_original_gather, _original_reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim


def _gather(input_: torch.Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
    """CPU only: with EP and ETP the ranks of an expert's tensor parallel group have unlike numbers of tokens to gather,
    which NCCL can and Gloo cannot. The sum of zeros and one rank's values is those values."""
    if output_split_sizes is None or input_.device.type != "cpu" or group.size() == 1:
        return _original_gather(input_, group, output_split_sizes, use_global_buffer)
    output = input_.new_zeros((sum(output_split_sizes), *input_.shape[1:]))
    output.split(output_split_sizes)[group.rank()].copy_(input_)
    dist.all_reduce(output, group=group)
    return output


def _reduce_scatter(
    input_: torch.Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False
) -> Any:
    """CPU only, as :func:`_gather`, of which it is the backward pass, and the way back of the experts' outputs."""
    if input_split_sizes is None or input_.device.type != "cpu" or group.size() == 1:
        return _original_reduce_scatter(input_, group, input_split_sizes, use_global_buffer)
    summed = input_.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(summed, group=group)
    return summed.split(input_split_sizes)[group.rank()].clone()


def _set_main_param_and_states(self: Any, model_param: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
    """Copy loaded optimizer state into the distributed optimizer's shards.

    Megatron's own loops over every key of the state and asks the checkpoint for each, but torch's AdamW keeps its
    ``step`` per parameter and the checkpoint keeps it per group: KeyError. For fp32 it also writes to a leaf in place.
    """
    group, order = self.model_param_group_index_map[model_param]
    main = self.optimizer.param_groups[group]["params"][order]
    with torch.no_grad():
        for key, value in {"param": main, **self.optimizer.state[main]}.items():
            if key in tensors:
                value.copy_(tensors[key])


def unshare_adam_steps(optimizer: Any) -> None:
    """Give each parameter its own ``step``; call after every ``load_state_dict`` of an optimizer.

    DistributedOptimizer.load_state_dict gives all parameters the same tensor. torch's AdamW adds one to it once per
    parameter, so the bias correction silently goes wrong (grad norm 1.639 instead of 1.629 one step later).
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for state in part.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()


def reduce_expert_gradients(model: torch.nn.Module) -> None:
    """Have the DDP wrapper reduce expert gradients over the *expert* data parallel group; call before it is built.

    Megatron marks expert parameters only if expert_model_parallel_size > 1. With TP2, ETP1, EP1 the experts are
    replicated over the TP ranks but their gradients are reduced over the ordinary data parallel group: silently wrong.
    """
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False  # pyright: ignore[reportAttributeAccessIssue]
