"""Megatron's optimizer and data parallel wrapper, and one guarded optimizer step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.transformer import TransformerConfig

from vime.backends.megatron_utils.experts import GroupedExperts
from vime.backends.megatron_utils.megatron_fixes import reduce_expert_gradients
from vime.backends.megatron_utils.model_provider import DecoderModel
from vime.config import Config
from vime.errors import TrainerError


def wrap_chunks(
    config: Config, megatron: TransformerConfig, chunks: Sequence[DecoderModel]
) -> list[DistributedDataParallel]:
    """Wrap model chunks so that gradients gather in flat buffers and are reduced over data parallel ranks."""
    parallel = config.parallel
    options = DistributedDataParallelConfig(
        use_distributed_optimizer=parallel.use_distributed_optimizer,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        grad_reduce_in_fp32=parallel.accumulate_allreduce_grads_in_fp32,
        # Non-finite values are looked for once per step, on all ranks together: guarded_step.
        check_for_nan_in_grad=False,
    )
    wrapped = []
    for index, chunk in enumerate(chunks):
        reduce_expert_gradients(chunk)
        wrapped.append(DistributedDataParallel(megatron, options, chunk, disable_bucketing=index > 0))
        if parallel.overlap_param_gather:
            _wait_where_others_read(wrapped[-1], chunk)
    megatron.finalize_model_grads_func = finalize_model_grads
    if parallel.overlap_grad_reduce:
        no_sync = [ddp.no_sync for ddp in wrapped]
        megatron.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]  # pyright: ignore[reportAttributeAccessIssue]
    return wrapped


def _wait_where_others_read(ddp: DistributedDataParallel, chunk: DecoderModel) -> None:
    """Wait for the gather of parameters that are read outside the forward of the module that owns them.

    Megatron waits in a hook before each module's own forward. Grouped experts read their linear layers' weights, and
    the loss reads the output layer's, without calling those modules: they would compute with weights from before the
    optimizer step, and a gather left unfinished would count as the next one.
    """

    def waits_for(parameters: Sequence[torch.nn.Parameter]) -> Callable[..., None]:
        def wait(*_: object) -> None:
            for parameter in parameters:
                ddp.param_to_bucket_group[parameter].finish_param_sync()

        return wait

    for module in chunk.modules():
        if isinstance(module, GroupedExperts):
            module.register_forward_pre_hook(waits_for(list(module.parameters())))
    if chunk.post_process:  # the loss follows the last stage's forward at once
        chunk.register_forward_hook(waits_for([chunk.output_weight()]))


def build_optimizer(
    config: Config, dtype: torch.dtype, device: torch.device, ddp_chunks: Sequence[DistributedDataParallel]
) -> Any:
    """AdamW, with fp32 master weights of bf16 parameters. Build it after the parameters have their final place."""
    options, parallel = config.optimizer, config.parallel
    optimizer: Any = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=options.lr,
            min_lr=options.min_lr,
            weight_decay=options.weight_decay,
            adam_beta1=options.adam_beta1,
            adam_beta2=options.adam_beta2,
            adam_eps=options.adam_eps,
            clip_grad=options.clip_grad,
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=parallel.use_distributed_optimizer,
            overlap_param_gather=parallel.overlap_param_gather,
        ),
        list(ddp_chunks),
    )
    if device.type == "cuda":
        for part in optimizer.chained_optimizers:
            for group in part.optimizer.param_groups if part.optimizer is not None else ():
                group["fused"], group["foreach"] = True, False  # torch's one-kernel AdamW
    return optimizer


def guarded_step(optimizer: Any, what: str) -> float:
    """Clip and apply the gradients; returns the norm before clipping, over all parameters of the whole model.

    Raises:
        TrainerError: the norm is not finite. Nothing has been updated. Norms are sums over all ranks, so all raise.
    """
    if optimizer.prepare_grads():
        raise TrainerError(f"{what}: gradients overflowed")
    norm = float(optimizer.get_grad_norm() or 0.0)
    if not math.isfinite(norm):
        raise TrainerError(
            f"{what}: the gradient norm is {norm}, so no weight was changed. The loss was finite: a gradient "
            "overflowed or the backward pass divided by zero; try a lower --lr, --clip-grad, or fp32 gradients "
            "(--accumulate-allreduce-grads-in-fp32)"
        )
    for part in optimizer.chained_optimizers:
        parameters = [] if getattr(part, "is_stub_optimizer", False) else part.get_parameters()
        if parameters and part.config.clip_grad > 0:
            clip_grad_by_total_norm_fp32(parameters, max_norm=part.config.clip_grad, total_norm=norm)
    if not optimizer.step_with_ready_grads():
        raise TrainerError(f"{what}: Megatron's optimizer refused the step")
    return norm
