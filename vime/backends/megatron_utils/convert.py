"""``vime convert``: a Hugging Face directory <-> a Megatron torch_dist checkpoint, in one process."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vime.backends.megatron_utils import cpu_compat

cpu_compat.install()  # before anything imports Megatron

from vime.backends.megatron_utils import megatron_fixes, parallel  # noqa: E402
from vime.backends.megatron_utils.checkpoint import load_model_weights, save_checkpoint  # noqa: E402
from vime.backends.megatron_utils.checkpoint_directory import CheckpointDirectory  # noqa: E402
from vime.backends.megatron_utils.hf_weights import export_hf_weights, load_hf_weights  # noqa: E402
from vime.backends.megatron_utils.model_provider import build_chunks, transformer_config  # noqa: E402
from vime.config import CheckpointOptions, Config, RolloutOptions, TrainOptions  # noqa: E402
from vime.models.layout import ParallelLayout, pieces  # noqa: E402
from vime.models.spec import ModelSpec, spec_from_hf  # noqa: E402

NamedParams = dict[tuple[int, str], torch.Tensor]


def hf_to_torch_dist(source: str, target: str, dtype: str) -> Path:
    """Write the weights of the Hugging Face directory ``source`` as TARGET/iter_0000000; returns that directory.

    Args:
        dtype: "bf16", "fp32" or "auto" (the checkpoint's; fp32 for one in half precision).

    Raises:
        DataError: ``source`` cannot be read or ``target`` not be written.
    """
    spec = spec_from_hf(source)
    directory = CheckpointDirectory(target)
    with _model(source, spec, dtype) as (chunks, weights, layout):
        load_hf_weights(source, weights, pieces(spec, layout, 0), spec)
        with directory.writing(0) as folder:
            save_checkpoint(folder, chunks, None, None, spec=spec, layout=layout)
    return directory.path_of(0)


def torch_dist_to_hf(source: str, target: str, hf_checkpoint: str, dtype: str) -> Path:
    """Write the weights of a torch_dist checkpoint (the newest of a folder of them) as a Hugging Face directory.

    Args:
        hf_checkpoint: Hugging Face directory of the same model: its config and tokenizer are copied.
        dtype: "bf16", "fp32" or "auto" (that of ``hf_checkpoint``; fp32 for one in half precision).

    Raises:
        DataError: ``source`` is no such checkpoint, or of another model, or ``target`` cannot be written.
    """
    spec = spec_from_hf(hf_checkpoint)
    with _model(hf_checkpoint, spec, dtype) as (chunks, weights, layout):
        load_model_weights(source, chunks, spec)
        export_hf_weights(target, weights, spec, layout, 0, source_hf_dir=hf_checkpoint)
    return Path(target)


@contextmanager
def _model(hf_checkpoint: str, spec: ModelSpec, dtype: str) -> Iterator[tuple[list[Any], NamedParams, ParallelLayout]]:
    """The whole model on one rank, its weights not yet loaded."""
    if dtype == "auto":
        dtype = "bf16" if spec.dtype == "bfloat16" else "fp32"
    config = Config(
        checkpoint=CheckpointOptions(hf_checkpoint=hf_checkpoint),
        rollout=RolloutOptions(rollout_batch_size=1),
        train=TrainOptions(dtype=dtype),
    )
    layout = ParallelLayout(world_size=1)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    with tempfile.TemporaryDirectory(prefix="vime-convert-") as folder, cpu_compat.cpu_for_cuda():
        megatron_fixes.apply()
        store = dist.FileStore(f"{folder}/rendezvous", 1)  # pyright: ignore[reportPrivateImportUsage]
        parallel.initialize(config, layout, rank=0, world_size=1, store=store, device=device)
        try:
            chunks = build_chunks(config, spec, layout, transformer_config(config, spec, layout, device))
            for chunk in chunks:
                chunk.to(device)
            yield (
                chunks,
                {
                    (index, name): parameter.data
                    for index, chunk in enumerate(chunks)
                    for name, parameter in chunk.named_parameters()
                },
                layout,
            )
        finally:
            parallel.destroy(process_group=True)
