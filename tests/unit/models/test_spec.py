"""Shapes from Hugging Face configs, against transformers; what is not implemented is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tests.tiny import FAMILIES, make_checkpoint
from vime.config import ModelOptions
from vime.errors import DataError
from vime.models.layout import checkpoint_tensors
from vime.models.spec import disagreements, spec_from_hf

# As published, in transformers 4's spelling.
QWEN3_0_6B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN25_7B: dict[str, Any] = {
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN3_30B_A3B = QWEN3_0_6B | {
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
LLAMA2 = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "rms_norm_eps": 1e-05,
    "vocab_size": 32000,
    "torch_dtype": "float16",
    "eos_token_id": 2,
}


def write(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_5_writes(tmp_path: Path, family: str, tied: bool) -> None:
    """The sizes are those of the tensors that transformers saved for the config."""
    more: dict[str, Any] = {"num_hidden_layers": 4, "rope_theta": 5e5}
    if family == "qwen3_moe":
        more |= {"mlp_only_layers": [0], "decoder_sparse_step": 2, "norm_topk_prob": False}
    spec = spec_from_hf(make_checkpoint(tmp_path, family, tied=tied, dtype="bfloat16", **more))
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert checkpoint_tensors(spec) == {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert (spec.family, spec.tied, spec.rotary_base, spec.dtype) == (family, tied, 5e5, "bfloat16")
    assert (spec.norm_epsilon, spec.eos_token_ids, spec.heads_per_group) == (1e-6, (2,), 2)
    assert spec.moe_layers == ((False, True, False, True) if family == "qwen3_moe" else (False,) * 4)
    if family == "qwen3_moe":
        assert (spec.num_experts, spec.moe_router_topk, spec.norm_topk_prob) == (4, 2, False)


@pytest.mark.parametrize("config", [QWEN3_0_6B, QWEN25_7B, QWEN3_30B_A3B, LLAMA2], ids=lambda c: c["model_type"])
def test_what_transformers_4_wrote(tmp_path: Path, config: dict[str, Any]) -> None:
    """Published configs give what transformers reads from them."""
    from transformers import AutoConfig

    spec = spec_from_hf(write(tmp_path, config))
    theirs: Any = AutoConfig.from_pretrained(tmp_path)
    assert spec.num_layers == theirs.num_hidden_layers
    assert spec.num_query_groups == theirs.num_key_value_heads
    heads = theirs.num_attention_heads
    assert spec.kv_channels == (getattr(theirs, "head_dim", None) or theirs.hidden_size // heads)
    assert spec.rotary_base == theirs.rope_parameters["rope_theta"]
    assert (spec.norm_epsilon, spec.tied) == (theirs.rms_norm_eps, theirs.tie_word_embeddings)
    assert "torch." + spec.dtype == str(theirs.dtype)
    if config["model_type"] == "qwen3_moe":
        assert (spec.num_experts, spec.norm_topk_prob) == (theirs.num_experts, theirs.norm_topk_prob)


def test_padding_and_end_tokens(tmp_path: Path) -> None:
    spec = spec_from_hf(write(tmp_path, QWEN3_0_6B, {"eos_token_id": [151645, 151643]}))
    assert spec.eos_token_ids == (151645, 151643)
    assert (spec.padded_vocab_size(1), spec.padded_vocab_size(8, 128)) == (151936, 152576)
    assert spec.padded_vocab_size(7) == 151942


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (QWEN3_0_6B, {"model_type": "mamba"}, "model_type 'mamba' is not implemented .*llama, qwen2, qwen3, qwen3_moe"),
        (QWEN3_0_6B, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling of type 'yarn'"),
        (LLAMA2, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope scaling of type 'linear'"),
        (LLAMA2, {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}, "rope scaling of type 'llama3'"),
        (LLAMA2, {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "differ between kinds of layers"),
        (LLAMA2, {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        (QWEN25_7B, {"use_sliding_window": True}, "sliding-window attention"),
        (QWEN25_7B, {"layer_types": ["full_attention"] * 27 + ["sliding_attention"]}, "'sliding_attention'"),
        (QWEN3_0_6B, {"attention_bias": True}, "attention_bias = True"),
        (LLAMA2, {"mlp_bias": True}, "mlp_bias = True"),
        (LLAMA2, {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        (LLAMA2, {"torch_dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn'"),
        (LLAMA2, {"quantization_config": {"quant_method": "fp8"}}, "a quantised checkpoint"),
        (LLAMA2, {"num_key_value_heads": 5}, "32 attention heads over 5 key/value heads"),
        (LLAMA2, {"num_attention_heads": 30}, "hidden_size 4096 over 30 attention heads without head_dim"),
        (QWEN3_30B_A3B, {"num_experts_per_tok": 129}, "num_experts_per_tok = 129 of 128 experts"),
        (QWEN3_30B_A3B, {"num_experts_per_tok": 1}, "num_experts_per_tok = 1 with norm_topk_prob"),
        (QWEN3_30B_A3B, {"decoder_sparse_step": 49}, "none of whose layers has experts"),
        (LLAMA2, {"hidden_size": None}, "has no 'hidden_size'"),
        (LLAMA2, {"num_hidden_layers": "32"}, "'num_hidden_layers' is '32', not a positive whole number"),
        (LLAMA2, {"vocab_size": 0}, "'vocab_size' is 0"),
        (LLAMA2, {"rms_norm_eps": "small"}, "'rms_norm_eps' is 'small', not a positive number"),
        (LLAMA2, {"rms_norm_eps": -1e-6}, "'rms_norm_eps' is -1e-06, not a positive number"),
        (LLAMA2, {"rope_theta": "x"}, "'rope_theta' is 'x', not a positive number"),
        (LLAMA2, {"rope_parameters": [1]}, r"'rope_parameters' is \[1\], not an object"),
        (LLAMA2, {"rope_parameters": {"rope_theta": "x"}}, "'rope_theta' is 'x', not a positive number"),
        (LLAMA2, {"rope_scaling": "yarn"}, "'rope_scaling' is 'yarn', not an object"),
        (LLAMA2, {"layer_types": 5}, "'layer_types' is 5, not a list of names"),
        (LLAMA2, {"layer_types": [[1]]}, r"'layer_types' is \[\[1\]\], not a list of names"),
        (LLAMA2, {"tie_word_embeddings": "yes"}, "'tie_word_embeddings' is 'yes', not true or false"),
        (LLAMA2, {"eos_token_id": "</s>"}, "'eos_token_id' is '</s>', not ids of the 32000 tokens"),
        (LLAMA2, {"eos_token_id": [[2]]}, r"'eos_token_id' is \[\[2\]\], not ids"),
        (LLAMA2, {"eos_token_id": 32000}, "'eos_token_id' is 32000, not ids of the 32000 tokens"),
        (QWEN3_30B_A3B, {"mlp_only_layers": "0"}, "'mlp_only_layers' is '0', not a list of whole numbers"),
        (QWEN3_30B_A3B, {"norm_topk_prob": "true"}, "'norm_topk_prob' is 'true', not true or false"),
    ],
)
def test_refused_by_name(tmp_path: Path, base: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        spec_from_hf(write(tmp_path, base | change))


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, '{"a": "\xe9"}'.encode("latin-1")])
def test_what_is_no_json_object(tmp_path: Path, text: str | bytes) -> None:
    (tmp_path / "config.json").write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(DataError, match=r"config.json (is not valid JSON|holds a list)"):
        spec_from_hf(tmp_path)


def test_all_refusals_at_once(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"mlp_bias.*rope scaling.*quantised.*hidden_act"):
        spec_from_hf(
            write(
                tmp_path,
                LLAMA2
                | {"mlp_bias": True, "hidden_act": "gelu", "rope_scaling": {"type": "linear"}}
                | {"quantization_config": {"bits": 4}},
            )
        )


def test_directories_that_are_not_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing is not a directory"):
        spec_from_hf(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"cannot read .*config\.json"):
        spec_from_hf(tmp_path)
    for text, message in (("{", "not valid JSON"), ("[1]", "holds a list")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(DataError, match=message):
            spec_from_hf(tmp_path)


def test_flags_that_agree_or_say_nothing(tmp_path: Path) -> None:
    spec = spec_from_hf(write(tmp_path, QWEN3_30B_A3B))
    assert disagreements(spec, ModelOptions()) == []
    given = ModelOptions(
        num_layers=48,
        hidden_size=2048,
        ffn_hidden_size=6144,
        num_attention_heads=32,
        group_query_attention=True,
        num_query_groups=4,
        kv_channels=128,
        qk_layernorm=True,
        swiglu=True,
        normalization="RMSNorm",
        norm_epsilon=1e-6,
        rotary_base=1000000,
        disable_bias_linear=True,
        vocab_size=151936,
        untie_embeddings_and_output_weights=True,
        num_experts=128,
        moe_router_topk=8,
        moe_ffn_hidden_size=768,
    )
    assert disagreements(spec, given) == []


def test_flags_that_disagree_name_both_values(tmp_path: Path) -> None:
    moe = spec_from_hf(write(tmp_path / "moe", QWEN3_30B_A3B))
    assert disagreements(moe, ModelOptions(num_layers=24, rotary_base=1e4, moe_router_pre_softmax=True)) == [
        "--num-layers 24, but the checkpoint has 48",
        "--rotary-base 10000.0, but the checkpoint has 1000000.0",
        "--moe-router-pre-softmax, but the checkpoint has weights normalised over the chosen experts (norm_topk_prob)",
    ]
    llama = spec_from_hf(write(tmp_path / "llama", LLAMA2 | {"tie_word_embeddings": True}))
    given = ModelOptions(
        num_experts=8,
        qk_layernorm=True,
        add_qkv_bias=True,
        untie_embeddings_and_output_weights=True,
        group_query_attention=True,
    )
    assert disagreements(llama, given) == [
        "--num-experts 8, but the checkpoint has none (it is a dense model)",
        "--qk-layernorm, but the checkpoint has no norm on queries and keys",
        "--add-qkv-bias, but the checkpoint has no bias in the QKV projection",
        "--untie-embeddings-and-output-weights, but the checkpoint has tied embeddings (tie_word_embeddings)",
        "--group-query-attention, but the checkpoint has one key/value head per query head",
    ]


def test_switches_given_as_off(tmp_path: Path) -> None:
    untied = spec_from_hf(write(tmp_path, QWEN3_30B_A3B))
    off = ("untie_embeddings_and_output_weights", "add_qkv_bias", "moe_router_pre_softmax")
    assert disagreements(untied, ModelOptions(), off) == [
        "--untie-embeddings-and-output-weights false, but the checkpoint has an output layer of its own "
        "(tie_word_embeddings)"
    ]
    unlike = untied.replace(norm_topk_prob=False, qkv_bias=True, tied=True)
    assert disagreements(unlike, ModelOptions(), off) == [
        "--add-qkv-bias false, but the checkpoint has a bias in the QKV projection",
        "--moe-router-pre-softmax false, but the checkpoint has weights that are not normalised over the chosen "
        "experts (norm_topk_prob)",
    ]


def test_reading_needs_neither_torch_nor_transformers(tmp_path: Path) -> None:
    write(tmp_path, QWEN3_0_6B)
    code = (
        "import sys; from vime.models.spec import spec_from_hf; from vime.models import layout; "
        f"spec = spec_from_hf({str(tmp_path)!r}); layout.pieces(spec, layout.ParallelLayout(1), 0); "
        "print([m for m in ('torch', 'transformers', 'megatron', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
