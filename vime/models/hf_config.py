"""Reading a Hugging Face ``config.json`` without transformers: both spellings, defaults, and refusals in words."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from vime.errors import DataError

_MISSING = object()


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises DataError naming the file and the place of a syntax error."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{path} holds a {type(value).__name__}, not a JSON object")
    return value


class HFConfig:
    """One ``config.json`` as transformers 4 or 5 writes it. ``problems`` collects what vime does not implement."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.path = self.directory / "config.json"
        if not self.directory.is_dir():
            raise DataError(f"{self.directory} is not a directory (expected a Hugging Face checkpoint directory)")
        self.values = read_json(self.path)
        self.problems: list[str] = []

    @property
    def model_type(self) -> str:
        return str(self.values.get("model_type"))

    def get(self, *names: str, default: Any = _MISSING) -> Any:
        """The first of ``names`` that is there and not null. Raises DataError if none is and there is no default."""
        for name in names:
            if self.values.get(name) is not None:
                return self.values[name]
        if default is _MISSING:
            raise DataError(f"{self.path} has no '{names[0]}'")
        return default

    def size(self, *names: str, default: Any = _MISSING) -> int:
        """A positive whole number. Raises DataError otherwise."""
        value = self.get(*names, default=default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._wrong(names[0], value, "a positive whole number")
        return value

    def number(self, *names: str, default: float) -> float:
        """A positive number. Raises DataError otherwise."""
        return self._positive(names[0], self.get(*names, default=default))

    def switch(self, name: str) -> bool:
        """True or false, absent being false. Raises DataError otherwise."""
        value = self.get(name, default=False)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def numbers(self, name: str) -> list[int]:
        """A list of whole numbers, absent being empty. Raises DataError otherwise."""
        value = self.get(name, default=[])
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise self._wrong(name, value, "a list of whole numbers")
        return value

    def _positive(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self._wrong(name, value, "a positive number")
        return float(value)

    def _wrong(self, name: str, value: Any, wanted: str) -> DataError:
        return DataError(f"{self.path}: '{name}' is {value!r:.100}, not {wanted}")

    def refuse(self, what: str) -> None:
        self.problems.append(what)

    def refuse_unless(self, name: str, *allowed: Any) -> None:
        """Refuse every value of ``name`` but null, absence and ``allowed``."""
        value = self.values.get(name)
        if value is not None and value not in allowed:
            self.refuse(f"{name} = {value!r} (implemented: {', '.join(map(repr, allowed))})")

    @property
    def dtype(self) -> str:
        """Name of the checkpoint's torch dtype (``dtype`` in transformers 5, ``torch_dtype`` in 4)."""
        return str(self.get("dtype", "torch_dtype", default="float32")).removeprefix("torch.")

    def rotary_base(self) -> float:
        """The rotary embedding's base; every kind of position scaling is refused."""
        rope = self.get("rope_parameters", default=None)
        if isinstance(rope, dict) and any(isinstance(value, dict) for value in rope.values()):
            self.refuse("rope_parameters that differ between kinds of layers")
            return 10000.0
        scaling = rope or self.get("rope_scaling", default=None) or {}
        if not isinstance(scaling, dict):
            raise self._wrong("rope_parameters" if rope else "rope_scaling", scaling, "an object")
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind != "default":
            self.refuse(f"rope scaling of type {kind!r} (implemented: plain rotary embedding)")
        factor = scaling.get("partial_rotary_factor", self.get("partial_rotary_factor", default=1.0))
        if factor != 1.0:
            self.refuse(f"partial_rotary_factor = {factor!r} (implemented: 1.0)")
        theta = scaling.get("rope_theta")
        return self.number("rope_theta", default=10000.0) if theta is None else self._positive("rope_theta", theta)

    def refuse_sliding_window(self) -> None:
        """Refuse sliding-window attention where it is in use (many configs carry the numbers and switch it off)."""
        layer_types = self.get("layer_types", default=None)
        if layer_types is not None:
            if not isinstance(layer_types, list) or not all(isinstance(kind, str) for kind in layer_types):
                raise self._wrong("layer_types", layer_types, "a list of names")
            other = sorted(set(layer_types) - {"full_attention"})
            if other:
                self.refuse(f"layers of type {', '.join(map(repr, other))} (implemented: 'full_attention')")
        elif self.get("use_sliding_window", default=False) and self.get("sliding_window", default=None):
            self.refuse("sliding-window attention (use_sliding_window = true)")

    def eos_token_ids(self) -> tuple[int, ...]:
        """config.json's end tokens, then generation_config.json's, each once."""
        found = self._token_ids(self.path, self.values)
        generation = self.directory / "generation_config.json"
        if generation.is_file():
            found += self._token_ids(generation, read_json(generation))
        return tuple(dict.fromkeys(found))

    def _token_ids(self, path: Path, values: dict[str, Any]) -> list[int]:
        said = values.get("eos_token_id")
        if said is None:
            return []
        tokens = said if isinstance(said, list) else [said]
        size = self.size("vocab_size")
        for token in tokens:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < size:
                raise DataError(f"{path}: 'eos_token_id' is {said!r:.100}, not ids of the {size} tokens (vocab_size)")
        return tokens
