"""Model families: Hugging Face config and names <-> Megatron config and parameters. A new family is one file here."""

from __future__ import annotations

from vime.models import llama, qwen2, qwen3, qwen3_moe
from vime.models.family import Family

FAMILIES: dict[str, Family] = {module.FAMILY.model_type: module.FAMILY for module in (llama, qwen2, qwen3, qwen3_moe)}

__all__ = ["FAMILIES", "Family"]
