"""Writing the trainer's weights as a Hugging Face directory, from any parallel layout.

Every rank knows by arithmetic where every tensor lies, so nothing is negotiated: the tensors are cut into shards, each
shard has one writer, and for each shard every holder sends its writer one flat buffer. Writers work side by side, and
no rank holds more than about two shards in host memory.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file

from vime.errors import DataError
from vime.files import publish_directory, sync_file
from vime.models.hf_config import read_json
from vime.models.layout import ParallelLayout, Piece, checkpoint_tensors, pieces
from vime.models.spec import ModelSpec
from vime.observe.progress import Progress
from vime.weight_sync.arrivals import checksums

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
COPIED = (".json", ".txt", ".model", ".jinja", ".tiktoken")  # config, tokenizer, generation settings
log = logging.getLogger(__name__)


class ByteProgress:
    """A progress line in MB, shown by rank 0 (or where there is no process group) and silent elsewhere."""

    def __init__(self, label: str, total: int) -> None:
        shown = not dist.is_initialized() or dist.get_rank() == 0
        self._progress = Progress(label, max(1, total // 10**6), "MB") if shown else None
        self._bytes = 0

    def __enter__(self) -> ByteProgress:
        if self._progress is not None:
            self._progress.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._progress is not None:
            self._progress.__exit__(*error)

    def update(self, count: int) -> None:
        before, self._bytes = self._bytes // 10**6, self._bytes + count
        if self._progress is not None:
            self._progress.update(self._bytes // 10**6 - before)


@dataclass
class Shard:
    """One file: whole tensors, and who sends which of their boxes to the writer."""

    writer: int
    tensors: list[str] = field(default_factory=list)
    sources: dict[int, list[Piece]] = field(default_factory=lambda: defaultdict(list))  # rank -> pieces, in order
    bytes: int = 0


def plan_shards(spec: ModelSpec, layout: ParallelLayout, element_size: int, max_shard_bytes: int) -> list[Shard]:
    """The same on every rank: each checkpoint tensor once, written by a rank that holds part of it, work spread evenly
    over those ranks; each box comes from the writer where it has it, else from its lowest holder."""
    holders: dict[str, dict[Any, dict[int, Piece]]] = defaultdict(lambda: defaultdict(dict))
    for rank in range(layout.world_size):
        for piece in pieces(spec, layout, rank):
            holders[piece.tensor][piece.box].setdefault(rank, piece)
    shards: list[Shard] = []
    current: dict[int, Shard] = {}
    load: dict[int, int] = defaultdict(int)
    for name, shape in checkpoint_tensors(spec).items():
        boxes = holders[name]
        size = element_size * torch.Size(shape).numel()
        writer = min({rank for ranks in boxes.values() for rank in ranks}, key=lambda rank: (load[rank], rank))
        load[writer] += size
        shard = current.get(writer)
        if shard is None or shard.bytes + size > max_shard_bytes:
            shard = current[writer] = Shard(writer)
            shards.append(shard)
        shard.tensors.append(name)
        shard.bytes += size
        for ranks in boxes.values():
            source = writer if writer in ranks else min(ranks)
            shard.sources[source].append(ranks[source])
    return shards


def export_hf_weights(
    directory: str | Path,
    named_params: Mapping[tuple[int, str], torch.Tensor],
    spec: ModelSpec,
    layout: ParallelLayout,
    rank: int,
    *,
    source_hf_dir: str | Path,
    group: dist.ProcessGroup | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 1 << 30,
    sums: dict[str, str] | None = None,
) -> None:
    """Write safetensors, their index, config and tokenizer to ``directory``; every rank of the trainer must call it.

    The directory appears, or replaces an earlier export, only when it is complete and on the disk. With several nodes
    it must be on a file system that they share.

    Args:
        named_params: every parameter of this rank; any device.
        source_hf_dir: where config, tokenizer and generation settings are copied from.
        group: Gloo group of all ranks (default: the default group; unused in a world of one rank).
        dtype: of the written weights (default: the parameters').
        sums: where the checksums are put of what this rank writes, as it was before it was written.

    Raises:
        DataError: on every rank, if any rank could not write; what was there before is untouched.
    """
    final = Path(directory)
    aside = final.with_name(final.name + ".tmp")
    source = Path(source_hf_dir)
    out_dtype = dtype if dtype is not None else next(iter(named_params.values())).dtype
    shards = plan_shards(spec, layout, out_dtype.itemsize, max_shard_bytes)
    total = sum(shard.bytes for shard in shards)
    problem = _prepare(final, aside, source, total) if rank == 0 else None
    _agree(problem, layout.world_size, group)

    names = _file_names(len(shards))
    problem = None
    with torch.no_grad(), ByteProgress("write HF weights", total) as progress:
        for shard, name in zip(shards, names, strict=True):
            tensors = _collect(shard, rank, named_params, spec, out_dtype, group)
            if tensors is not None and sums is not None:
                sums |= zip(tensors, checksums(list(tensors.values())), strict=True)
            if tensors is not None and problem is None:
                # A full disk must not stop this rank from sending what others wait for: told at the end.
                problem = _write(tensors, aside / name)
            progress.update(shard.bytes)
    _agree(problem, layout.world_size, group)
    problem = _finish(final, aside, source, shards, names, total, out_dtype) if rank == 0 else None
    _agree(problem, layout.world_size, group)


def _file_names(count: int) -> list[str]:
    return [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def _collect(
    shard: Shard,
    rank: int,
    named_params: Mapping[tuple[int, str], torch.Tensor],
    spec: ModelSpec,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None,
) -> dict[str, torch.Tensor] | None:
    """The shard's tensors on its writer; every other holder sends its part. None on all but the writer."""
    if rank != shard.writer:
        if rank in shard.sources:
            dist.send(_pack(shard.sources[rank], named_params, dtype), dst=shard.writer, group=group)
        return None
    shapes = checkpoint_tensors(spec)
    tensors = {name: torch.empty(shapes[name], dtype=dtype) for name in shard.tensors}
    for source, held in shard.sources.items():
        if source == rank:
            for piece in held:
                tensors[piece.tensor][piece.slices].copy_(piece.view(named_params[piece.chunk, piece.param]))
            continue
        flat = torch.empty(sum(piece.numel for piece in held), dtype=dtype)
        dist.recv(flat, src=source, group=group)
        start = 0
        for piece in held:
            tensors[piece.tensor][piece.slices] = flat[start : start + piece.numel].view(piece.shape)
            start += piece.numel
    return tensors


def _pack(held: list[Piece], named_params: Mapping[tuple[int, str], torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    flat = torch.empty(sum(piece.numel for piece in held), dtype=dtype)
    start = 0
    for piece in held:
        flat[start : start + piece.numel].view(piece.shape).copy_(piece.view(named_params[piece.chunk, piece.param]))
        start += piece.numel
    return flat


def _write(tensors: dict[str, torch.Tensor], path: Path) -> str | None:
    try:
        save_file(tensors, path, metadata={"format": "pt"})
        sync_file(path)
    except (OSError, SafetensorError) as error:
        return f"cannot write {path}: {error}"
    return None


def _prepare(final: Path, aside: Path, source: Path, total: int) -> str | None:
    """Make the directory to write in; says why not."""
    try:
        if final.resolve() == source.resolve():
            return f"{final} is the checkpoint that the run started from; it is not overwritten"
        if final.exists() and not final.is_dir():
            return f"{final} is not a directory"
        if final.is_dir() and any(final.iterdir()) and not (final / "config.json").is_file():
            return f"{final} exists and is not an earlier export (it has no config.json); it is not overwritten"
        if aside.exists():
            shutil.rmtree(aside)
        aside.mkdir(parents=True)
        free = shutil.disk_usage(aside).free
        if free < total:
            aside.rmdir()
            return f"{final} needs {total / 1e9:.1f} GB, but its disk has {free / 1e9:.1f} GB left"
    except OSError as error:
        return f"cannot write to {final}: {error}"
    return None


def _finish(
    final: Path, aside: Path, source: Path, shards: list[Shard], names: list[str], total: int, dtype: torch.dtype
) -> str | None:
    try:
        if len(shards) > 1:
            where = {tensor: name for shard, name in zip(shards, names, strict=True) for tensor in shard.tensors}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
            (aside / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        for path in sorted(source.iterdir()):
            if path.is_file() and path.suffix in COPIED and not path.name.endswith(".index.json"):
                shutil.copyfile(path, aside / path.name)
        config = read_json(source / "config.json")
        spelled = "torch_dtype" if "torch_dtype" in config else "dtype"
        config[spelled] = str(dtype).removeprefix("torch.")
        (aside / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        publish_directory(aside, final)
    except (OSError, DataError) as error:
        return f"cannot write {final}: {error}"
    log.info("wrote %s: %d files, %.2f GB", final, len(shards), total / 1e9)
    return None


def _agree(problem: str | None, world_size: int, group: dist.ProcessGroup | None) -> None:
    """Meet; if any rank has a problem, raise it on all of them. Plain tensors: nothing is unpickled."""
    texts = [problem or ""]
    if world_size > 1:
        mine = torch.zeros(2048, dtype=torch.uint8)
        encoded = list((problem or "").encode()[: mine.numel()])
        mine[: len(encoded)] = torch.tensor(encoded, dtype=torch.uint8)
        everyone = [torch.empty_like(mine) for _ in range(world_size)]
        dist.all_gather(everyone, mine, group=group)
        texts = [bytes(text.tolist()).rstrip(b"\0").decode(errors="replace") for text in everyone]
    found = [f"rank {rank}: {text}" if world_size > 1 else text for rank, text in enumerate(texts) if text]
    if found:
        raise DataError("; ".join(found))
