"""What must not be written down: credentials within addresses, and values whose names say what they are."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from typing import Any

HIDDEN = "***"
OF_ENGINES = ("--vllm-", "--vllm_")  # the only flags of vime that hold secrets
_SECRETS = {"key", "apikey", "keyfile", "token", "password", "passwd", "secret", "credential", "credentials"}
# As far as a reader of text can tell where an address ends. (Not with what stands before "://": to look for that takes
# minutes in a word of a hundred thousand letters.)
_ADDRESS = re.compile(r"(?<=://)[^\s\"'<>]+")


def masked(text: str) -> str:
    """``text``, with the user and password and the values of the query of every address in it replaced by ``***``.

    Hides too much rather than too little: a password may hold "/" or "?" although it should not.
    """
    return _ADDRESS.sub(lambda found: _mask(found[0]), text)


def _mask(rest: str) -> str:
    """What follows ``scheme://``."""
    _, at, rest = rest.rpartition("@")
    place, mark, query = re.fullmatch(r"([^?#]*)([?#]?)(.*)", rest).groups()  # type: ignore[union-attr]  # matches all
    values = [
        f"{name}={HIDDEN}" if equals else HIDDEN for name, equals, _ in (p.partition("=") for p in query.split("&"))
    ]
    return (f"{HIDDEN}@" if at else "") + place + mark + ("&".join(values) if query else "")


def is_secret(name: str) -> bool:
    """Whether an option of this name holds a secret: ``hf-token`` and ``apiKey`` do, ``max-num-batched-tokens`` does
    not."""
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)
    return bool(words) and words[-1].lower() in _SECRETS


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
    return _masked_json(value) if by_name else masked(value)


def _masked_json(text: str) -> str:
    """A text that may be JSON, of which names say what is secret. As it is where nothing had to be hidden."""
    if text.lstrip().startswith(("{", "[")):
        with contextlib.suppress(ValueError):
            value = json.loads(text)
            shown = masked_options(value)
            return text if shown == value else json.dumps(shown)
    return masked(text)


def masked_words(words: Sequence[str], secrets_of: tuple[str, ...] = ("--",)) -> list[str]:
    """A command line with :func:`masked` words, and without the values of flags that :func:`is_secret` and that begin
    with one of ``secrets_of``; values are the words up to the next flag, or stand behind "=". In JSON that such a flag
    is given, names say what is secret."""
    shown, of_those, secret = [], False, False
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            of_those = flag.startswith(secrets_of)
            secret = of_those and is_secret(flag)
            shown.append(flag + equals + _masked_value(value, of_those, secret) if equals else masked(word))
        else:
            shown.append(_masked_value(word, of_those, secret))
    return shown


def _masked_value(value: str, by_name: bool, secret: bool) -> str:
    if secret:
        return HIDDEN
    return _masked_json(value) if by_name else masked(value)
