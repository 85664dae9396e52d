"""How an option is declared: a typed dataclass field whose name is the flag's name (``rollout_batch_size`` is
``--rollout-batch-size`` on the command line, ``rollout_batch_size`` or ``rollout-batch-size`` in YAML).

The flag, the YAML key and the attribute are one word, so that one search finds all three.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, field
from typing import Any

LONGEST = 7 * 86400.0  # seconds of a deadline: sockets and timers have their own largest numbers, and say so badly


def option(
    default: Any = MISSING,
    help: str = "",
    *,
    choices: tuple[Any, ...] | None = None,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    metavar: str | None = None,
    kind: str | None = None,
    default_factory: Callable[[], Any] | Any = MISSING,
) -> Any:
    """Declare one option.

    Args:
        default: value when the flag is absent; leave it out for a required option.
        help: one sentence for ``--help``.
        choices: the values allowed.
        minimum, above, maximum: bounds (inclusive, exclusive, inclusive) for numbers.
        metavar: placeholder in ``--help``.
        kind: ``"path"`` (must exist when given), ``"function"`` (``module.function``) or None.
        default_factory: as in :func:`dataclasses.field`.
    """
    metadata = {
        "help": help,
        "choices": choices,
        "minimum": minimum,
        "above": above,
        "maximum": maximum,
        "metavar": metavar,
        "kind": kind,
    }
    if default_factory is not MISSING:
        return field(default_factory=default_factory, metadata=metadata)
    return field(default=default, metadata=metadata)
