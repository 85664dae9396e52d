"""The global map: what ranks say of themselves, put together; against Megatron's layouts piece by piece."""

from __future__ import annotations

import json

import pytest
import torch

from vime.errors import WeightSyncError
from vime.models.layout import ParallelLayout, checkpoint_tensors, parameter_shapes, pieces
from vime.models.spec import ModelSpec
from vime.types import Slot
from vime.weight_sync.arena import ArenaError, Stamp, allocate
from vime.weight_sync.columns import pack, unpack
from vime.weight_sync.shard_map import ShardMap, describe_rank, merge, place

SPEC = ModelSpec(
    family="qwen3_moe",
    num_layers=2,
    hidden_size=8,
    ffn_hidden_size=16,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=4,
    vocab_size=50,
    tied=False,
    qk_layernorm=True,
    qkv_bias=False,
    norm_epsilon=1e-6,
    rotary_base=1e4,
    max_position_embeddings=64,
    dtype="float32",
    num_experts=4,
    moe_router_topk=2,
    moe_ffn_hidden_size=8,
    norm_topk_prob=True,
    moe_layers=(True, True),
    eos_token_ids=(2,),
)
LAYOUT = ParallelLayout(world_size=8, tp=2, cp=2, ep=4, etp=1, vocab_divisible_by=8)


def parts(**changes):
    """Every rank's part; ``changes``: rank -> function that changes its shapes or parameters."""
    out = []
    for rank in range(LAYOUT.world_size):
        shapes, params = checkpoint_tensors(SPEC), {}
        sizes = parameter_shapes(SPEC, LAYOUT, rank)
        flat, end = allocate(4 * sum(torch.Size(shape).numel() for shape in sizes.values())), 0
        for key, shape in sizes.items():
            count = 4 * torch.Size(shape).numel()
            params[key] = flat[end : end + count].view(torch.float32).view(shape)
            end += count
        if f"rank{rank}" in changes:
            shapes, params = changes[f"rank{rank}"](shapes, params)
        info, places = place(rank, f"node{rank // 4}", f"gpu{rank}", params, Stamp())
        part = describe_rank(info, places, shapes, pieces(SPEC, LAYOUT, rank), params)
        out.append(json.loads(json.dumps(part)))
    return out


@pytest.fixture(scope="module")
def shards() -> ShardMap:
    return merge(parts(), checkpoint_tensors(SPEC))


def test_every_piece_of_every_rank_is_in_the_map_where_it_lies(shards: ShardMap) -> None:
    expected = set()
    for rank in range(8):
        expected |= {(piece.tensor, rank, piece.box, piece.strides) for piece in pieces(SPEC, LAYOUT, rank)}
    found = {
        (name, entry.rank, entry.region.box, entry.region.strides)
        for name, entries in shards.by_tensor().items()
        for entry in entries
    }
    assert found == expected


def test_it_survives_json(shards: ShardMap) -> None:
    again = ShardMap.from_json(json.loads(json.dumps(shards.to_json())))
    assert again.tensors == shards.tensors
    assert again.ranks == shards.ranks
    assert (again.entries == shards.entries).all()


def test_nearest_keeps_what_is_in_the_slot_else_on_the_node_and_loses_nothing(shards: ShardMap) -> None:
    for slot in (Slot(0, 2), Slot(2, 3), Slot(4, 8), Slot(0, 8), None):
        node = f"node{slot.start // 4}" if slot else "node1"
        near = shards.nearest(slot, node)
        everywhere, kept = shards.by_tensor(), near.by_tensor()
        for name, entries in everywhere.items():
            for box in {entry.region.box for entry in entries}:
                holders = [entry.rank for entry in entries if entry.region.box == box]
                distance = {
                    rank: 0 if slot and rank in slot else 1 if f"node{rank // 4}" == node else 2 for rank in holders
                }
                closest = min(distance.values())
                expected = sorted(rank for rank in holders if distance[rank] == closest)
                assert sorted(entry.rank for entry in kept[name] if entry.region.box == box) == expected
        assert set(near.ranks) == {entry.rank for entries in kept.values() for entry in entries}


def test_each_box_has_one_first_holder(shards: ShardMap) -> None:
    count: dict[tuple[str, object], int] = {}
    for rank in range(8):
        mine = pieces(SPEC, LAYOUT, rank)
        for piece, first in zip(mine, shards.first_holders(rank), strict=True):
            count[piece.tensor, piece.box] = count.get((piece.tensor, piece.box), 0) + first
    assert set(count.values()) == {1}


def test_names_in_another_order_on_one_rank_are_refused() -> None:
    def permuted(shapes, params):
        names = list(shapes)
        names[3], names[5] = names[5], names[3]
        return {name: shapes[name] for name in names}, params

    with pytest.raises(WeightSyncError, match=r"at trainer rank 5: its checkpoint tensors \(names, order or shapes\)"):
        merge(parts(rank5=permuted), checkpoint_tensors(SPEC))


def test_another_shape_on_one_rank_is_refused() -> None:
    def larger(shapes, params):
        return shapes | {"lm_head.weight": (52, 8)}, params

    with pytest.raises(WeightSyncError, match="at trainer rank 2"):
        merge(parts(rank2=larger), checkpoint_tensors(SPEC))


def test_another_dtype_on_one_rank_is_refused_by_name() -> None:
    def doubled(shapes, params):
        key = (0, "decoder.final_layernorm.weight")
        shape = params[key].shape
        return shapes, params | {key: allocate(8 * shape.numel()).view(torch.float64)[: shape.numel()].view(shape)}

    with pytest.raises(WeightSyncError, match=r"rank 3: model\.norm\.weight is float64 here and float32 on rank 0"):
        merge(parts(rank3=doubled), checkpoint_tensors(SPEC))


def test_a_tensor_that_nobody_holds_is_refused_by_name() -> None:
    shapes = checkpoint_tensors(SPEC) | {"extra.bias": (3,)}

    def more(_, params):
        return shapes, params

    with pytest.raises(WeightSyncError, match=r"no rank holds extra\.bias"):
        merge(parts(**{f"rank{rank}": more for rank in range(8)}), shapes)


def test_parameters_in_private_memory_are_refused() -> None:
    def private(shapes, params):
        return shapes, {key: param.clone() for key, param in params.items()}

    with pytest.raises(ArenaError, match="private memory"):
        parts(rank0=private)


def test_pieces_that_leave_their_parameter_are_refused() -> None:
    def short(shapes, params):
        return shapes, {key: param[:1] for key, param in params.items()}

    with pytest.raises(ValueError, match="does not lie in parameter"):
        parts(rank0=short)


def test_columns_pack_integers() -> None:
    import numpy as np

    array = np.array([[0, 5, -3], [2**62, -(2**62), 7]])
    assert (unpack(pack(array), 2, 3) == array).all()
    assert unpack(pack(np.zeros((0, 4))), 0, 4).shape == (0, 4)
