"""The Megatron model of one rank: its configuration, layer specs and chunks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, cast

import torch

from vime.backends.megatron_utils import cpu_compat

cpu_compat.install()

from megatron.core import parallel_state as mpu  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.enums import AttnBackend  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # noqa: E402

from vime.backends.megatron_utils.attention import PackedAttention  # noqa: E402
from vime.backends.megatron_utils.experts import GroupedExperts  # noqa: E402
from vime.backends.megatron_utils.norm import RMSNorm  # noqa: E402
from vime.backends.megatron_utils.router import BalancedRouter  # noqa: E402
from vime.config import Config  # noqa: E402
from vime.models.layout import ParallelLayout  # noqa: E402
from vime.models.megatron import transformer_config_kwargs  # noqa: E402
from vime.models.spec import ModelSpec  # noqa: E402


class DecoderModel(GPTModel):
    """A GPTModel whose last stage returns the final hidden states [tokens, 1, hidden].

    Logits of a large vocabulary are the largest tensors of a step; ``log_probs`` makes them piece by piece, for the
    response tokens only. The rotary embedding is applied by the core attention (``position_embedding_type="none"``).
    """

    def _postprocess(self, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        return hidden_states

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """A layer's experts in descending order. DDP fills its buffers from the last parameter to the first, so there
        they ascend at equal distances, and grouped experts use them where they are (experts.stacked)."""
        held: list[tuple[int, str, torch.nn.Parameter]] = []

        def emptied() -> Iterator[tuple[str, torch.nn.Parameter]]:
            yield from ((name, parameter) for _, name, parameter in sorted(held, key=lambda item: -item[0]))
            held.clear()

        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            expert = re.search(r"\.local_experts\.(\d+)\.", name)
            if expert is not None:
                held.append((int(expert[1]), name, parameter))
                continue
            yield from emptied()
            yield name, parameter
        yield from emptied()

    def output_weight(self) -> torch.nn.Parameter:
        """[local vocabulary, hidden], of the output layer or, where tied, of the embedding."""
        if self.share_embeddings_and_output_weights:
            return cast(torch.nn.Parameter, self.shared_embedding_or_output_weight())
        return cast(torch.nn.Parameter, self.output_layer.weight)


def compute_dtype(config: Config, device: torch.device) -> torch.dtype:
    """``--dtype``; auto is bf16 on a GPU and fp32 on a CPU."""
    if config.train.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"bf16": torch.bfloat16, "fp32": torch.float32}[config.train.dtype]


def needs_rows_of_one_length(config: Config, spec: ModelSpec, layout: ParallelLayout) -> bool:
    """Interleaved stages hang when rows differ in length; the allgather dispatcher gathers equal numbers of tokens."""
    gathers = spec.num_experts is not None and config.model.moe_token_dispatcher_type == "allgather"
    return layout.vpp > 1 or gathers


def _leave(weight: torch.Tensor) -> torch.Tensor:
    return weight


def transformer_config(
    config: Config, spec: ModelSpec, layout: ParallelLayout, device: torch.device
) -> TransformerConfig:
    dtype = compute_dtype(config, device)
    model, train = config.model, config.train
    kwargs: dict[str, Any] = transformer_config_kwargs(spec)
    kwargs |= {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "sequence_parallel": config.parallel.cuts_sequences(spec.num_experts is not None),
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "attention_dropout": model.attention_dropout,
        "hidden_dropout": model.hidden_dropout,
        "attention_backend": AttnBackend[model.attention_backend],
        "attention_softmax_in_fp32": True,
        "recompute_granularity": train.recompute_granularity,
        "recompute_method": train.recompute_method,
        "recompute_num_layers": train.recompute_num_layers,
        # All weights come from a checkpoint. Not perform_initialization=False: Megatron marks parameters as cut over
        # tensor parallel ranks where it initialises them, and leaves unmarked ones out of the gradient norm.
        "init_method": _leave,
        "output_layer_init_method": _leave,
        "embedding_init_method": _leave,
        "use_cpu_initialization": False,
        # The step divides gradients by a number of tokens that the loss was multiplied with; see loss.py.
        "calculate_per_token_loss": True,
        # Rows differ in length, so stages tell each other the shapes.
        "variable_seq_lengths": layout.pp > 1 and not needs_rows_of_one_length(config, spec, layout),
        # Gloo sends from the tensor's memory after the call returned, so it must not be freed while sends overlap.
        "deallocate_pipeline_outputs": layout.pp > 1 and (layout.vpp == 1 or device.type == "cuda"),
        # With two interleaved stages, the next and the previous one are the same rank. Batched, Megatron's messages to
        # both match by order alone, and activations arrive as gradients: silently. Overlapped, each way has a group.
        "overlap_p2p_comm": layout.vpp > 1,
        "batch_p2p_comm": layout.vpp == 1,
        # Kernels of TransformerEngine and apex.
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "persist_layer_norm": False,
        # Megatron asks for it with variable_seq_lengths even where there are no experts.
        "moe_token_dispatcher_type": model.moe_token_dispatcher_type if spec.num_experts else "alltoall",
    }
    if spec.num_experts:
        kwargs |= {
            "moe_router_load_balancing_type": model.moe_router_load_balancing_type,
            "moe_aux_loss_coeff": model.moe_aux_loss_coeff,
            "moe_router_dtype": model.moe_router_dtype,
            "moe_enable_deepep": model.moe_enable_deepep,
            "moe_permute_fusion": False,
        }
    return TransformerConfig(**kwargs)


def layer_spec(config: Config, megatron: TransformerConfig, moe: bool) -> ModuleSpec:
    """Megatron's local decoder layer with our norm, attention and, with --moe-grouped-gemm, experts."""
    spec = get_gpt_layer_local_spec(
        num_experts=megatron.num_moe_experts if moe else None,
        qk_layernorm=megatron.qk_layernorm,
        normalization="RMSNorm",
    )
    layer: Any = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = PackedAttention
    if megatron.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if moe:
        layer.mlp.submodules.router = BalancedRouter
    if moe and config.model.moe_grouped_gemm:
        layer.mlp.submodules.experts.module = GroupedExperts
    return spec


def build_chunks(
    config: Config, spec: ModelSpec, layout: ParallelLayout, megatron: TransformerConfig
) -> list[DecoderModel]:
    """This rank's model chunks (one unless stages are interleaved), parameters uninitialised."""
    chunks = []
    stage = mpu.get_pipeline_model_parallel_rank()
    for chunk in range(layout.vpp):
        vp = chunk if layout.vpp > 1 else None
        layers = layout.layers(spec, stage, chunk)
        block = TransformerBlockSubmodules(
            layer_specs=[layer_spec(config, megatron, spec.moe_layers[layer]) for layer in layers],
            layer_norm=RMSNorm,  # pyright: ignore[reportArgumentType]
        )
        chunks.append(
            DecoderModel(
                config=megatron,
                transformer_layer_spec=block,  # pyright: ignore[reportArgumentType]
                vocab_size=spec.padded_vocab_size(layout.tp, layout.vocab_divisible_by),
                max_sequence_length=spec.max_position_embeddings,
                pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp),
                post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp),
                share_embeddings_and_output_weights=spec.tied,
                position_embedding_type="none",
                parallel_output=True,
                vp_stage=vp,
            )
        )
    return chunks
