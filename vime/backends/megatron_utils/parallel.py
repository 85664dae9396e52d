"""Process group, Megatron's parallel groups and random seeds of one trainer rank."""

from __future__ import annotations

import datetime
import random
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy
import torch
import torch.distributed as dist

from vime.backends.megatron_utils import cpu_compat

cpu_compat.install()  # before Megatron, which binds torch.cuda's functions at import time

from megatron.core import parallel_state as mpu  # noqa: E402
from megatron.core import tensor_parallel  # noqa: E402

from vime.config import Config  # noqa: E402
from vime.models.layout import ParallelLayout  # noqa: E402


@dataclass(frozen=True)
class Groups:
    """The groups and coordinates that the trainer's own code uses; everything else asks Megatron."""

    tp: dist.ProcessGroup
    cp: dist.ProcessGroup
    pp: dist.ProcessGroup
    dp_cp: dist.ProcessGroup  # ranks that hold the same dense weights and see other tokens
    tp_rank: int
    cp_rank: int
    cp_size: int
    dp_rank: int
    dp_size: int
    last_stage_rank: int  # global rank of this pipeline's last stage
    is_last_stage: bool


def initialize(
    config: Config,
    layout: ParallelLayout,
    *,
    rank: int,
    world_size: int,
    store: Any,
    device: torch.device,
) -> Groups:
    """Form the process group (unless there is one), Megatron's groups in their default order, and seed everything.

    Args:
        store: torch's, where the ranks meet; None where there is a process group.
    """
    timeout = datetime.timedelta(seconds=config.train.train_timeout)
    on_gpu: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        store.set_timeout(timeout)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            **on_gpu,
        )
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        distributed_timeout_minutes=max(1, round(config.train.train_timeout / 60)),
    )
    seed_everything(config.train.seed)
    return groups()


def seed_everything(seed: int) -> None:
    """Seed every generator. Pipeline stages differ; data parallel ranks agree, as in Megatron-LM."""
    seed += 100 * mpu.get_pipeline_model_parallel_rank()
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def groups() -> Groups:
    group = partial(cast, dist.ProcessGroup)
    last = mpu.get_pipeline_model_parallel_last_rank()
    return Groups(
        tp=group(mpu.get_tensor_model_parallel_group()),
        cp=group(mpu.get_context_parallel_group()),
        pp=group(mpu.get_pipeline_model_parallel_group()),
        dp_cp=group(mpu.get_data_parallel_group(with_context_parallel=True)),
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        cp_rank=mpu.get_context_parallel_rank(),
        cp_size=mpu.get_context_parallel_world_size(),
        dp_rank=mpu.get_data_parallel_rank(),
        dp_size=mpu.get_data_parallel_world_size(),
        last_stage_rank=last,
        is_last_stage=last == dist.get_rank(),
    )


def sum_over_tokens(value: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Sum what the last stages of all data and context parallel ranks hold; every rank gets the result, in place."""
    if groups.is_last_stage and groups.dp_cp.size() > 1:
        dist.all_reduce(value, group=groups.dp_cp)
    if groups.pp.size() > 1:
        dist.broadcast(value, src=groups.last_stage_rank, group=groups.pp)
    return value


def gather_flags(flag: bool, device: torch.device) -> list[int]:
    """Global ranks on which ``flag`` is True."""
    flags: Any = torch.zeros(dist.get_world_size(), dtype=torch.int32, device=device)
    flags[dist.get_rank()] = int(flag)
    dist.all_reduce(flags)
    return flags.nonzero().flatten().tolist()


def destroy(process_group: bool) -> None:
    """Forget Megatron's groups and, where asked, the process group."""
    mpu.destroy_model_parallel()
    if process_group and dist.is_initialized():
        dist.destroy_process_group()
