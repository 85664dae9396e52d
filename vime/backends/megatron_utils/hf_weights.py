"""Reading Hugging Face weights into Megatron's parameters; each rank reads only the slices that it holds.

The other direction is hf_export.py; where a tensor lies is vime/models/layout.py's to say.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from vime.backends.megatron_utils.hf_export import INDEX, ByteProgress, export_hf_weights
from vime.errors import DataError
from vime.models.hf_config import read_json
from vime.models.layout import Piece, checkpoint_tensors
from vime.models.spec import ModelSpec, spec_from_hf

__all__ = ["export_hf_weights", "load_hf_weights", "weight_files"]

NamedParams = Mapping[tuple[int, str], torch.Tensor]  # (model chunk, name in it) -> the parameter's data
_PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")  # their last rows may be padding


def weight_files(directory: str | Path) -> dict[str, Path]:
    """Tensor name -> the safetensors file that holds it.

    Raises DataError where there are no safetensors, the index names a file that is missing, or a file is damaged.
    """
    directory = Path(directory)
    index = directory / INDEX
    if index.is_file():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict):
            raise DataError(f"{index} has no 'weight_map'")
        missing = sorted({name for name in names.values() if not (directory / name).is_file()})
        if missing:
            raise DataError(f"{index} names files that are not there: {', '.join(missing)}")
        return {tensor: directory / name for tensor, name in names.items()}
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        others = sorted(path.name for path in directory.glob("*.bin"))
        hint = f" (it has {others[0]}; save the model again as safetensors)" if others else ""
        raise DataError(f"{directory} has no safetensors weights{hint}")
    found = {}
    for path in files:
        with _open(path) as file:
            found.update(dict.fromkeys(file.keys(), path))
    return found


def load_hf_weights(
    path: str | Path, named_params: NamedParams, pieces: Iterable[Piece], spec: ModelSpec | None = None
) -> None:
    """Fill this rank's parameters from the safetensors in ``path``, converting to each parameter's dtype.

    No communication. Padded vocabulary rows become zero.

    Args:
        path: a Hugging Face directory (one file, or several with an index).
        named_params: every parameter of this rank's model chunks; contiguous, any device.
        pieces: ``vime.models.layout.pieces`` of this rank.
        spec: the model's shape (default: read from ``path``).

    Raises:
        DataError: a tensor that is missing, has another shape than ``spec`` says, or cannot be read; parameters and
            pieces that do not match. Nothing has been written when a name or a shape is wrong.
    """
    pieces = list(pieces)
    shapes = checkpoint_tensors(spec if spec is not None else spec_from_hf(path))
    _check_parameters(named_params, pieces)
    files = weight_files(path)
    wanted = {piece.tensor for piece in pieces}
    missing = [name for name in shapes if name in wanted and name not in files]
    if missing:
        raise DataError(f"{path} has no tensor {_some(missing)}, which the model in its config.json needs")
    by_file: dict[Path, list[Piece]] = defaultdict(list)
    for piece in pieces:
        by_file[files[piece.tensor]].append(piece)
    for file_path, held in by_file.items():
        _check_shapes(file_path, {piece.tensor for piece in held}, shapes)

    total = sum(piece.numel * named_params[piece.chunk, piece.param].element_size() for piece in pieces)
    with torch.no_grad(), ByteProgress("read weights", total) as progress:
        for (_, name), parameter in named_params.items():
            if name in _PADDED:
                parameter.zero_()
        for file_path, held in by_file.items():
            try:
                with _open(file_path) as file:
                    for piece in held:
                        values = file.get_slice(piece.tensor)[piece.slices]
                        target = piece.view(named_params[piece.chunk, piece.param])
                        target.copy_(values)
                        progress.update(target.nbytes)
            except SafetensorError as error:
                raise DataError(f"cannot read {file_path}: {error}") from error


def _check_parameters(named_params: NamedParams, pieces: list[Piece]) -> None:
    """Pieces and parameters name the same things, and the pieces fill each parameter (padding apart)."""
    filled: dict[tuple[int, str], int] = defaultdict(int)
    for piece in pieces:
        filled[piece.chunk, piece.param] += piece.numel
    absent = [f"{name} (chunk {chunk})" for chunk, name in filled if (chunk, name) not in named_params]
    if absent:
        raise DataError(f"the Megatron model has no parameter {_some(absent)}, where checkpoint tensors belong")
    for (chunk, name), parameter in named_params.items():
        have, need = filled.get((chunk, name), 0), parameter.numel()
        if have > need or (have < need and name not in _PADDED):
            raise DataError(
                f"the checkpoint fills {have} elements of Megatron's parameter {name} (chunk {chunk}), which has "
                f"{need} (shape {tuple(parameter.shape)})"
            )


def _check_shapes(path: Path, tensors: set[str], shapes: Mapping[str, tuple[int, ...]]) -> None:
    with _open(path) as file:
        present = set(file.keys())
        for name in sorted(tensors):
            if name not in present:
                raise DataError(f"{path} has no tensor {name}, which the index says it holds")
            shape = tuple(file.get_slice(name).get_shape())
            if name not in shapes or shape != shapes[name]:
                raise DataError(f"{name} in {path} has shape {shape}, but the model needs {shapes.get(name)}")


def _open(path: Path):
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise DataError(f"cannot read {path}: {error}") from error


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
