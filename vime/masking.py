"""What must not be written down: credentials within addresses, and values whose names say what they are."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from typing import Any

HIDDEN = "***"
_SECRETS = {"key", "keyfile", "token", "password", "passwd", "secret", "credential", "credentials"}
# As far as a reader of text can tell where an address ends.
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)([^\s\"'<>]*)")


def masked(text: str) -> str:
    """``text``, with the user and password and the values of the query of every address in it replaced by ``***``.

    Hides too much rather than too little: a password may hold "/" or "?" although it should not.
    """
    return _ADDRESS.sub(lambda found: found[1] + _mask(found[2]), text)


def _mask(rest: str) -> str:
    """What follows ``scheme://``."""
    _, at, rest = rest.rpartition("@")
    place, mark, query = re.fullmatch(r"([^?#]*)([?#]?)(.*)", rest).groups()  # type: ignore[union-attr]  # matches all
    values = [
        f"{name}={HIDDEN}" if equals else HIDDEN for name, equals, _ in (p.partition("=") for p in query.split("&"))
    ]
    return (f"{HIDDEN}@" if at else "") + place + mark + ("&".join(values) if query else "")


def is_secret(name: str) -> bool:
    """Whether an option of this name holds a secret: ``hf-token`` does, ``max-num-batched-tokens`` does not."""
    return re.split(r"[^a-z]+", name.lower())[-1] in _SECRETS


def masked_options(value: Any, by_name: bool = True) -> Any:
    """A JSON value with :func:`masked` texts, at any depth, also in JSON that is a text itself. ``by_name``: and
    without the values of names that :func:`is_secret`."""
    if isinstance(value, dict):
        return {
            name: HIDDEN if by_name and is_secret(str(name)) else masked_options(inner, by_name)
            for name, inner in value.items()
        }
    if isinstance(value, list):
        return [masked_options(inner, by_name) for inner in value]
    if not isinstance(value, str):
        return value
    if by_name and value.lstrip().startswith(("{", "[")):
        with contextlib.suppress(ValueError):
            return json.dumps(masked_options(json.loads(value)))
    return masked(value)


def masked_words(words: Sequence[str], secrets_of: str = "--") -> list[str]:
    """A command line with :func:`masked` words, and without the values of flags that :func:`is_secret` and that begin
    with ``secrets_of``; a value is the next word or stands behind "="."""
    shown = []
    for before, word in zip(("", *words), words, strict=False):
        flag, equals, _ = word.partition("=")
        if equals and flag.startswith(secrets_of) and is_secret(flag):
            shown.append(f"{flag}={HIDDEN}")
        elif not word.startswith("--") and before.startswith(secrets_of) and is_secret(before):
            shown.append(HIDDEN)
        else:
            shown.append(masked(word))
    return shown
