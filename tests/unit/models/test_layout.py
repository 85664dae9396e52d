"""Where tensors lie: against tensors put together by hand, and against Megatron's own groups and modules."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.distributed import run_ranks
from tests.unit.models import megatron_by_hand as by_hand
from vime.config import CheckpointOptions, ClusterOptions, Config, ModelOptions, ParallelOptions, RolloutOptions
from vime.errors import ConfigError
from vime.models.layout import ParallelLayout, checkpoint_tensors, parameter_shapes, pieces
from vime.models.spec import ModelSpec


def make_spec(**over: Any) -> ModelSpec:
    shape: dict[str, Any] = {
        "family": "qwen3",
        "num_layers": 4,
        "hidden_size": 8,
        "ffn_hidden_size": 24,
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "kv_channels": 2,
        "vocab_size": 13,
        "tied": False,
        "qk_layernorm": True,
        "qkv_bias": False,
        "norm_epsilon": 1e-6,
        "rotary_base": 1e4,
        "max_position_embeddings": 64,
        "dtype": "float32",
    }
    return ModelSpec(**(shape | over))


MOE = {"family": "qwen3_moe", "num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 8}
MIXED = MOE | {"moe_layers": (False, True, True, False)}
ALL_MOE = MOE | {"moe_layers": (True,) * 4}


@st.composite
def cases(draw: st.DrawFn) -> tuple[ModelSpec, ParallelLayout]:
    """Any model with any layout that validate() lets through."""
    family = draw(st.sampled_from(["qwen3", "qwen2", "llama", "qwen3_moe"]))
    tp, pp, cp, dp = (draw(st.sampled_from([1, 2, 4])) for _ in range(4))
    vpp = draw(st.sampled_from([1, 2, 3])) if pp > 1 else 1
    groups = tp * draw(st.sampled_from([1, 2]))
    layers = pp * vpp * draw(st.sampled_from([1, 2]))
    over: dict[str, Any] = {
        "family": family,
        "num_layers": layers,
        "hidden_size": draw(st.integers(1, 5)),
        "ffn_hidden_size": tp * draw(st.integers(1, 3)),
        "num_query_groups": groups,
        "num_attention_heads": groups * draw(st.integers(1, 3)),
        "kv_channels": draw(st.integers(1, 3)),
        "vocab_size": draw(st.integers(1, 40)),
        "tied": draw(st.booleans()),
        "qk_layernorm": family.startswith("qwen3"),
        "qkv_bias": family == "qwen2",
    }
    ep = etp = 1
    if family == "qwen3_moe":
        per_stage = tp * cp * dp
        etp = draw(st.sampled_from([n for n in (1, 2, 4) if per_stage % n == 0]))
        ep = draw(st.sampled_from([n for n in (1, 2, 4, 8) if per_stage % (n * etp) == 0]))
        over |= {
            "num_experts": ep * draw(st.integers(1, 2)),
            "moe_router_topk": 1,
            "moe_ffn_hidden_size": etp * draw(st.integers(1, 2)),
            "moe_layers": tuple(draw(st.booleans()) for _ in range(layers)),
        }
    layout = ParallelLayout(tp * pp * cp * dp, tp, pp, vpp, cp, ep, etp, draw(st.sampled_from([1, 2, 8])))
    spec = make_spec(**over)
    assert layout.validate(spec) == []
    return spec, layout


@settings(max_examples=150, deadline=None, derandomize=True)
@given(cases())
def test_pieces_are_where_megatron_puts_them(case: tuple[ModelSpec, ParallelLayout]) -> None:
    """Every element of every parameter is in one piece, which says where it is in the checkpoint; padding is in none;
    and every element of the checkpoint has as many holders as there are replicas."""
    spec, layout = case
    hf = by_hand.checkpoint(spec)
    assert {name: tensor.shape for name, tensor in hf.items()} == checkpoint_tensors(spec)
    held = {name: np.zeros(tensor.shape, dtype=int) for name, tensor in hf.items()}
    for rank, at in enumerate(by_hand.coordinates(layout)):
        assert layout.coordinates(rank) == at
        expected = by_hand.parameters(spec, layout, at, hf)
        assert parameter_shapes(spec, layout, rank) == {key: value.shape for key, value in expected.items()}
        built = {key: torch.full(value.shape, by_hand.PAD, dtype=torch.float64) for key, value in expected.items()}
        for piece in pieces(spec, layout, rank):
            view = piece.view(built[piece.chunk, piece.param])
            assert bool((view == by_hand.PAD).all()), f"{piece} overlaps another one"
            view.copy_(torch.from_numpy(hf[piece.tensor][piece.slices]))
            assert (piece.numel, piece.shape) == (view.numel(), tuple(view.shape))
            held[piece.tensor][piece.slices] += 1
        for key, value in expected.items():
            assert np.array_equal(built[key].numpy(), value), (rank, key)
    for name, count in held.items():
        assert np.array_equal(count, np.full(count.shape, replicas(name, spec, layout))), name


def replicas(name: str, spec: ModelSpec, layout: ParallelLayout) -> int:
    if ".experts." in name:
        return layout.edp
    whole_on_every_tp_rank = "norm" in name or name.endswith("mlp.gate.weight")
    count = layout.cp * layout.dp * (layout.tp if whole_on_every_tp_rank else 1)
    return count * (2 if name == "model.embed_tokens.weight" and spec.tied and layout.pp > 1 else 1)


def test_an_expert_larger_than_a_stage_is_seen() -> None:
    """Topologies of the past: TP4 CP2 DP1 EP8 on 8 ranks; each rank has one eighth of the experts, whole."""
    spec, layout = make_spec(**ALL_MOE), ParallelLayout(8, tp=4, cp=2, ep=8, etp=1)
    assert layout.validate(spec) == []
    for rank in range(8):
        experts = {piece.tensor.split(".")[5] for piece in pieces(spec, layout, rank) if ".experts." in piece.tensor}
        assert experts == {str(rank)}


WORLDS = [
    ParallelLayout(8, tp=4, cp=2, ep=8, etp=1),
    ParallelLayout(8, tp=2, pp=2, ep=2, etp=2),
    ParallelLayout(8, tp=2, pp=2, vpp=2, ep=4, etp=1),
    ParallelLayout(8, tp=1, pp=2, cp=2, ep=2, etp=1),
    ParallelLayout(8, tp=2, cp=2, ep=2, etp=1),
    ParallelLayout(16, tp=2, pp=2, cp=2, ep=4, etp=2),
    ParallelLayout(4, tp=2, pp=2, vpp=2, etp=2, vocab_divisible_by=8),
    ParallelLayout(4, pp=4),
    ParallelLayout(1),
    ParallelLayout(2, ep=1, etp=2),
]


def as_megatron_sees_it(_: int, specs: list[ModelSpec]) -> list[Any]:
    """For each layout and rank: Megatron's own coordinates, and names and shapes of the model it builds."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from vime.backends.megatron_utils import cpu_compat

    cpu_compat.install()
    from megatron.core import parallel_state as mpu
    from megatron.core import tensor_parallel

    from vime.backends.megatron_utils import megatron_fixes
    from vime.backends.megatron_utils.model_provider import build_chunks, transformer_config

    megatron_fixes.apply()
    dist.destroy_process_group()
    found = []
    for layout in WORLDS:
        for rank in range(layout.world_size):
            dist.init_process_group("fake", rank=rank, world_size=layout.world_size, store=FakeStore())
            mpu.initialize_model_parallel(
                layout.tp,
                layout.pp,
                layout.vpp if layout.vpp > 1 else None,
                context_parallel_size=layout.cp,
                expert_model_parallel_size=layout.ep,
                expert_tensor_parallel_size=layout.etp,
                create_gloo_process_groups=False,
            )
            coordinates = {
                "tp": mpu.get_tensor_model_parallel_rank(),
                "pp": mpu.get_pipeline_model_parallel_rank(),
                "cp": mpu.get_context_parallel_rank(),
                "dp": mpu.get_data_parallel_rank(),
                "ep": mpu.get_expert_model_parallel_rank(),
                "etp": mpu.get_expert_tensor_parallel_rank(),
                "edp": mpu.get_expert_data_parallel_rank(),
            }
            built = []
            for spec in specs if rank in (0, layout.world_size // 2, layout.world_size - 1) else ():
                if layout.validate(spec):
                    built.append(None)
                    continue
                config = Config(
                    checkpoint=CheckpointOptions(hf_checkpoint="none"),
                    rollout=RolloutOptions(rollout_batch_size=1),
                    model=ModelOptions(make_vocab_size_divisible_by=layout.vocab_divisible_by),
                )
                with cpu_compat.cpu_for_cuda():
                    tensor_parallel.model_parallel_cuda_manual_seed(1)
                    cpu = torch.device("cpu")
                    chunks = build_chunks(config, spec, layout, transformer_config(config, spec, layout, cpu))
                shapes = {(i, n): tuple(p.shape) for i, chunk in enumerate(chunks) for n, p in chunk.named_parameters()}
                built.append(shapes)
            found.append((coordinates, built))
            mpu.destroy_model_parallel()
            dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())  # the caller destroys it
    return found


def test_megatron_agrees_on_coordinates_names_and_shapes() -> None:
    specs = [
        make_spec(tied=True),
        make_spec(family="qwen2", qkv_bias=True, qk_layernorm=False, vocab_size=16),
        make_spec(**MIXED),
        make_spec(**ALL_MOE, tied=True),
    ]
    answers = iter(run_ranks(1, as_megatron_sees_it, specs)[0])
    compared = 0
    for layout in WORLDS:
        for rank in range(layout.world_size):
            theirs, built = next(answers)
            ours = layout.coordinates(rank)
            assert theirs == {name: getattr(ours, name) for name in theirs}, (layout, rank)
            for spec, shapes in zip(specs, built, strict=False):
                if shapes is not None:
                    assert parameter_shapes(spec, layout, rank) == shapes, (layout, rank, spec.family)
                    compared += 1
    assert compared > 40


@pytest.mark.parametrize(
    ("layout", "over", "messages"),
    [
        (ParallelLayout(6, tp=4), {}, [r"number of trainer ranks \(6\) is not divisible by --tensor.* \(4\)"]),
        (ParallelLayout(8, tp=8, etp=8), {}, [r"key/value heads \(4\) .*--tensor-model-parallel-size \(8\)"]),
        (ParallelLayout(3, tp=3, etp=3), {}, [r"attention heads \(8\)", r"key/value heads \(4\)"]),
        (ParallelLayout(4, tp=4, etp=4), {"ffn_hidden_size": 6}, [r"width of the dense MLP \(6\)"]),
        (ParallelLayout(3, pp=3), {}, [r"number of layers \(4\) is not divisible by --pipeline.* \(3\)"]),
        (ParallelLayout(2, pp=2, vpp=3), {}, [r"number of layers \(4\) .* chunks per stage \(6\)"]),
        (ParallelLayout(1, vpp=2), {}, ["interleaved stages .* need --pipeline-model-parallel-size above 1"]),
        (ParallelLayout(2, ep=2), {}, ["--expert-model-parallel-size 2 means nothing: the model has no experts"]),
        (ParallelLayout(4, etp=4), {}, ["--expert-tensor-parallel-size 4 means nothing"]),
        (ParallelLayout(3, ep=3), ALL_MOE, [r"number of experts \(8\)"]),
        (ParallelLayout(2, ep=4), ALL_MOE, [r"trainer ranks \(2\) .* \(4\)"]),
        (ParallelLayout(2, etp=2), MIXED | {"moe_ffn_hidden_size": 3}, [r"width of one expert \(3\)"]),
        # A layout may be fine for a model without dense layers whatever the width of a dense MLP.
        (ParallelLayout(4, tp=4, etp=1), ALL_MOE | {"ffn_hidden_size": 6}, []),
        (ParallelLayout(2, tp=2, etp=1), {}, []),  # etp 1 is what a dense run may write out
    ],
)
def test_validate_names_what_does_not_divide(layout: ParallelLayout, over: dict[str, Any], messages: list[str]) -> None:
    import re

    problems = layout.validate(make_spec(**over))
    assert len(problems) == len(messages), problems
    for problem, pattern in zip(problems, messages, strict=True):
        assert re.search(pattern, problem), problem


def config(**parallel: Any) -> Config:
    return Config(
        checkpoint=CheckpointOptions(hf_checkpoint="none"),
        rollout=RolloutOptions(rollout_batch_size=1),
        cluster=ClusterOptions(actor_num_nodes=2, actor_num_gpus_per_node=4),
        model=ModelOptions(make_vocab_size_divisible_by=16),
        parallel=ParallelOptions(**parallel),
    )


def test_layout_from_options() -> None:
    given = config(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=1
    )
    layout = ParallelLayout.from_config(given, make_spec())
    assert layout == ParallelLayout(8, tp=2, pp=2, vpp=2, cp=1, ep=1, etp=2, vocab_divisible_by=16)
    assert [list(layout.layers(make_spec(), 1, chunk)) for chunk in range(2)] == [[1], [3]]
    whole = config(pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=2)
    assert ParallelLayout.from_config(whole, make_spec()).vpp == 1
    for wrong in (3, 8):
        with pytest.raises(ConfigError, match=f"4 layers do not divide .* chunks of {wrong} layers"):
            ParallelLayout.from_config(
                config(pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=wrong), make_spec()
            )


def test_pieces_travel_and_refuse_what_they_do_not_fit() -> None:
    piece = pieces(make_spec(), ParallelLayout(2, tp=2, etp=2), 1)[0]
    assert pickle.loads(pickle.dumps(piece)) == piece
    with pytest.raises(ValueError, match=r"embedding\.word_embeddings\.weight is not contiguous"):
        piece.view(torch.zeros(8, 7).t())
    with pytest.raises(ValueError, match="rank 2 of 2"):
        ParallelLayout(2, tp=2).coordinates(2)
