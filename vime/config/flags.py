"""The flags, read off the option dataclasses: their names, types, bounds, and how text becomes a value."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass
from typing import Any

from vime.config import Config

_LARGEST = 2**63 - 1
TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@dataclass(frozen=True)
class Flag:
    """One option. ``name`` is the attribute (``rollout_batch_size``), ``text`` the flag (``--rollout-batch-size``)."""

    name: str
    topic: str  # the field of Config that holds it
    type: type  # bool, int, float, str, list or dict
    item: type  # of a list's elements; otherwise the same as ``type``
    optional: bool  # None is a value
    required: bool
    metadata: Mapping[str, Any]
    default: Any

    @property
    def text(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def help(self) -> str:
        return self.metadata["help"]

    @property
    def has_negation(self) -> bool:
        """``--no-x`` exists where "not given" is a third answer beside yes and no."""
        return self.type is bool and self.optional

    @property
    def placeholder(self) -> str:
        """What stands for the value in ``--help``; empty for a switch."""
        if self.type is bool:
            return ""
        if self.metadata["metavar"]:
            return self.metadata["metavar"]
        if self.metadata["choices"]:
            return "{" + ",".join(map(str, self.metadata["choices"])) + "}"
        word = {int: "N", float: "X", str: "TEXT", dict: "JSON"}.get(self.item, "TEXT")
        if self.metadata["kind"] == "path":
            word = "PATH"
        if self.metadata["kind"] == "function":
            word = "MODULE.FUNCTION"
        return f"{word} [{word} ...]" if self.type is list else word

    def convert(self, values: Sequence[Any]) -> Any:
        """Turn the words after the flag, or the value in a YAML file, into the option's value.

        Raises:
            ValueError: with a sentence that starts with the flag and says what is wrong and what would be right.
        """
        if self.type is bool:
            if not values:
                return True
            word = str(values[0]).lower()
            if len(values) == 1 and word in TRUE + FALSE:
                return word in TRUE
            raise ValueError(f"{self.text} is a switch and takes no value, but {_quoted(values)} follows it")
        if not values:
            raise ValueError(f"{self.text} needs a value: {self.placeholder} ({self.help})")
        if self.type is list:
            return [self._scalar(value) for value in values]
        if len(values) > 1:
            hint = " (quote a value that has spaces in it)" if self.item in (str, dict) else ""
            raise ValueError(f"{self.text} takes one value, but got {len(values)}: {_quoted(values)}{hint}")
        return self._scalar(values[0])

    def _scalar(self, value: Any) -> Any:
        value = self._typed(value)
        choices, low, above, high = (self.metadata[key] for key in ("choices", "minimum", "above", "maximum"))
        if choices and value not in choices:
            raise ValueError(
                f"{self.text} {value}: must be one of {', '.join(map(str, choices))}{did_you_mean(str(value), choices)}"
            )
        if low is not None and value < low:
            raise ValueError(f"{self.text} {value}: must be at least {low}")
        if above is not None and value <= above:
            raise ValueError(f"{self.text} {value}: must be greater than {above}")
        if high is not None and value > high:
            raise ValueError(f"{self.text} {value}: must be at most {high}")
        return value

    def _typed(self, value: Any) -> Any:
        wrong = ValueError(f"{self.text} {value!s}: not {_article(self.item)}")
        if isinstance(value, bool):
            raise wrong
        if self.item is int:
            if isinstance(value, float) and not value.is_integer():
                raise wrong
            try:
                number = int(value)
            except (TypeError, ValueError, OverflowError):
                raise wrong from None
            if abs(number) > _LARGEST:
                raise ValueError(f"{self.text} {value}: beyond what 64 bits hold")
            return number
        if self.item is float:
            try:
                number = float(value)
            except (TypeError, ValueError):
                raise wrong from None
            if not math.isfinite(number):
                raise ValueError(f"{self.text} {value}: must be finite")
            return number
        if self.item is dict:
            if isinstance(value, dict):
                return value
            try:
                parsed = json.loads(value)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{self.text} {value}: not valid JSON ({error})") from None
            if not isinstance(parsed, dict):
                raise ValueError(f"{self.text} {value}: must be a JSON object, as in '{{\"key\": true}}'")
            return parsed
        if not isinstance(value, str | int | float):
            raise wrong
        text = str(value)
        if not text.strip() or "\0" in text:
            what = "holds a null character" if text.strip() else "is empty"
            raise ValueError(
                f"{self.text} {text!r} {what}; leave the flag out, or say {self.placeholder} ({self.help})"
            )
        if text.startswith("--") and " " in text:
            raise ValueError(f"{self.text} is followed by {text!r}: a flag and its value were quoted into one word")
        return text


def did_you_mean(word: str, candidates: Sequence[str], *, cutoff: float = 0.6, prefix: str = "") -> str:
    """``"; did you mean X?"``, or nothing when no candidate is near."""
    match = closest(word, candidates, cutoff=cutoff)
    return f"; did you mean {prefix}{match}?" if match else ""


def closest(word: str, candidates: Sequence[str], *, cutoff: float = 0.6) -> str | None:
    """The candidate a person most likely meant: the one it abbreviates, else the most similar one."""
    import difflib

    word = word.replace("_", "-").lower()
    names = {candidate.replace("_", "-").lower(): candidate for candidate in map(str, candidates)}
    if word in names:
        return names[word]
    abbreviated = [name for name in names if len(word) > 3 and (name.startswith(word) or name.endswith("-" + word))]
    if len(abbreviated) == 1:
        return names[abbreviated[0]]
    near = difflib.get_close_matches(word, names, n=1, cutoff=cutoff)
    return names[near[0]] if near else None


def _quoted(values: Sequence[Any]) -> str:
    return " ".join(repr(str(value)) for value in values)


def _article(kind: type) -> str:
    return {int: "a whole number", float: "a number", str: "a text", dict: "a JSON object"}[kind]


@functools.cache
def topics() -> dict[str, type]:
    """Name of each topic (a field of :class:`Config`) and the dataclass that holds its options."""
    hints = typing.get_type_hints(Config)
    return {name: kind for name, kind in hints.items() if dataclasses.is_dataclass(kind)}  # type: ignore[misc]


@functools.cache
def flags() -> dict[str, Flag]:
    """Every flag by the name of its option."""
    found: dict[str, Flag] = {}
    for topic, owner in topics().items():
        hints = typing.get_type_hints(owner)
        for field in dataclasses.fields(owner):
            if "help" not in field.metadata:
                continue  # not an option of its own: RolloutOptions.vllm
            if field.name in found:
                raise TypeError(f"option {field.name} is declared in {found[field.name].topic} and in {topic}")
            kind, optional = _strip_none(hints[field.name])
            if field.default is not MISSING:
                default = field.default
            else:
                default = field.default_factory() if field.default_factory is not MISSING else None
            required = field.default is MISSING and field.default_factory is MISSING
            base = typing.get_origin(kind) or kind
            item = typing.get_args(kind)[0] if base is list else base
            found[field.name] = Flag(field.name, topic, base, item, optional, required, field.metadata, default)
    return found


def _strip_none(hint: Any) -> tuple[Any, bool]:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        inner = [argument for argument in typing.get_args(hint) if argument is not type(None)]
        if len(inner) == 1:
            return inner[0], True
        raise TypeError(f"an option has one type, not {hint}")
    return hint, False


def value_of(config: Config, name: str) -> Any:
    """The value of the option called ``name``, whatever its topic."""
    return getattr(getattr(config, flags()[name].topic), name)


def is_given(config: Config, name: str) -> bool:
    """Whether somebody asked for this option: it was written down, or (in a Config made by code) is not the default."""
    return name in config.given or value_of(config, name) != flags()[name].default
