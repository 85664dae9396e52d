"""Every script says what it should: the shapes are those of the published checkpoints, the run is the required one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.config.runs import required_run, write_checkpoint, write_prompts
from vime.config.check_memory import count_parameters
from vime.config.check_model import layer_pattern
from vime.config.parse import parse
from vime.models.layout import ParallelLayout
from vime.models.spec import ModelSpec, spec_from_hf

SCRIPTS = Path(__file__).parents[2] / "scripts"
# Billions of parameters as the model's card counts them: an independent source of every size in the script together.
PUBLISHED = {
    "qwen3-0.6B": 0.596,
    "qwen3-1.7B": 1.721,
    "qwen3-4B": 4.022,
    "qwen3-8B": 8.191,
    "qwen3-14B": 14.768,
    "qwen3-32B": 32.762,
    "qwen3-30B-A3B": 30.532,
    "qwen3-235B-A22B": 235.094,
    "qwen2.5-0.5B": 0.494,
    "qwen2.5-1.5B": 1.544,
    "qwen2.5-3B": 3.086,
    "qwen2.5-7B": 7.616,
    "llama3-8B": 8.030,
}


def model_args(script: Path) -> list[str]:
    command = f'source "{script}" && printf "%s\\n" "${{MODEL_ARGS[@]}}"'
    return subprocess.run(["bash", "-euc", command], capture_output=True, text=True, check=True).stdout.split()


def test_every_model_script_is_known() -> None:
    assert {file.stem for file in (SCRIPTS / "models").glob("*.sh")} == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_shape(name: str) -> None:
    words = model_args(SCRIPTS / "models" / f"{name}.sh")
    options = parse(["--hf-checkpoint", "m", "--rollout-batch-size", "1", *words]).model
    sizes = (options.num_layers, options.hidden_size, options.ffn_hidden_size, options.num_attention_heads)
    assert None not in (*sizes, options.num_query_groups, options.kv_channels, options.vocab_size)
    family = name.split("-")[0].replace("qwen2.5", "qwen2").replace("llama3", "llama")
    spec = ModelSpec(
        family="qwen3_moe" if options.num_experts else family,
        num_layers=options.num_layers or 0,
        hidden_size=options.hidden_size or 0,
        ffn_hidden_size=options.ffn_hidden_size or 0,
        num_attention_heads=options.num_attention_heads or 0,
        num_query_groups=options.num_query_groups or 0,
        kv_channels=options.kv_channels or 0,
        vocab_size=options.vocab_size or 0,
        tied=not options.untie_embeddings_and_output_weights,
        qk_layernorm=options.qk_layernorm,
        qkv_bias=options.add_qkv_bias,
        norm_epsilon=options.norm_epsilon or 0,
        rotary_base=options.rotary_base or 0,
        max_position_embeddings=32768,
        dtype="bfloat16",
        num_experts=options.num_experts,
        moe_router_topk=options.moe_router_topk,
        moe_ffn_hidden_size=options.moe_ffn_hidden_size,
        moe_layers=layer_pattern("1", options.num_layers or 0) or () if options.num_experts else (),
    )
    count = sum(count_parameters(spec, ParallelLayout(world_size=1))) / 1e9
    # count_parameters takes the embedding once where it is tied, as the cards do
    assert round(count, 3) == PUBLISHED[name]


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.sh")), ids=lambda file: file.stem)
def test_scripts_are_bash(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert os.access(script, os.X_OK)


def test_the_required_run(tmp_path: Path) -> None:
    """`check` through the script itself, with a checkpoint of the true shape but no weights to speak of."""
    model = write_checkpoint(
        tmp_path / "model",
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        rope_theta=1000000,
        max_position_embeddings=40960,
        torch_dtype="bfloat16",
    )
    assert spec_from_hf(model).num_layers == 28
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    stub = tmp_path / "python"  # shows the command line instead of starting it
    stub.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    stub.chmod(0o755)
    environment = {**os.environ, "MODEL": model, "DATA": prompts, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = SCRIPTS / "run-qwen3-0.6B-colocate.sh"
    words = subprocess.run(
        [str(script)], env=environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert words[0] == "train.py"
    given = [word for word in words if word.startswith("--")]
    expected = [*required_run(model, prompts), "--position-embedding-type"]
    assert sorted(given) == sorted(expected)
    check = [sys.executable, "-m", "vime.cli", "check", *words[1:], "--device", "cpu", "--dtype", "bf16"]
    run = subprocess.run(check, capture_output=True, text=True, check=False, timeout=60)
    # The sizes are those of four large GPUs: on a small machine memory is all that may be wrong.
    complaints = [line for line in run.stderr.splitlines() if line.startswith("  - ")]
    assert all("but this machine has" in line for line in complaints), run.stderr
