"""Parameters in flat buffers, copies of weights, and memory that is given back and taken again."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from tests.distributed import run_ranks
from vime.backends.megatron_utils import memory


def allocate(num_bytes: int) -> torch.Tensor:
    return torch.zeros(num_bytes + 100, dtype=torch.uint8)  # an allocator may give more than was asked for


def parameters() -> dict[memory.Key, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    names = ["norm.weight", *(f"mlp.experts.local_experts.{e}.{fc}.weight" for e in range(3) for fc in ("fc1", "fc2"))]
    shapes = {"norm": (7,), "fc1": (6, 5), "fc2": (5, 3)}
    return {
        (0, name): torch.nn.Parameter(torch.randn(shapes[name.split(".")[-2]], generator=generator)) for name in names
    }


def test_parameters_keep_identity_and_value() -> None:
    named = parameters()
    before = {key: (id(p), p.detach().clone()) for key, p in named.items()}
    (arena,) = memory.flatten_parameters(named, [], allocate)
    assert set(arena.offsets) == set(named)
    for key, parameter in named.items():
        assert id(parameter) == before[key][0]
        assert torch.equal(parameter, before[key][1])
        assert parameter.data_ptr() == arena.buffer.data_ptr() + arena.offsets[key]
        assert arena.offsets[key] % memory.ALIGNMENT == 0
    first = [arena.offsets[0, f"mlp.experts.local_experts.{e}.fc1.weight"] for e in range(3)]
    assert first[2] - first[1] == first[1] - first[0] > 0  # ascending at equal distances


def test_megatrons_own_buffers_get_other_memory() -> None:
    named = parameters()
    held = list(named.items())[:2]
    data, index, start = torch.zeros(64), {}, 0
    for _, parameter in held:
        index[parameter] = (start, start + parameter.numel(), 0)
        data[start : start + parameter.numel()] = parameter.data.flatten()
        parameter.data = data[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
    values = [parameter.detach().clone() for _, parameter in held]
    bucket = SimpleNamespace(param_data=data[:64], offset=0)
    buffer = SimpleNamespace(param_data=data, param_index_map=index, buckets=[bucket])
    ddp = SimpleNamespace(buffers=[buffer], expert_parallel_buffers=[SimpleNamespace(param_data=None)])
    arenas = memory.flatten_parameters(named, [ddp], allocate)
    assert [len(arena.offsets) for arena in arenas] == [2, len(named) - 2]
    assert buffer.param_data.data_ptr() == bucket.param_data.data_ptr() == arenas[0].buffer.data_ptr()
    for (key, parameter), value in zip(held, values, strict=True):
        assert torch.equal(parameter, value)
        assert parameter.data_ptr() == arenas[0].buffer.data_ptr() + arenas[0].offsets[key]
    buffer.param_data.fill_(3.0)  # what a gather of parameters writes
    assert all((parameter == 3.0).all() for _, parameter in held)


def test_a_copy_comes_back_byte_for_byte() -> None:
    named = parameters()
    arenas = memory.flatten_parameters(named, [], allocate)
    copy, before = memory.WeightCopy(arenas), arenas[0].buffer.clone()
    copy.take()
    for parameter in named.values():
        parameter.data.fill_(float("nan"))
    copy.put()
    assert torch.equal(arenas[0].buffer, before)


def moving(rank: int) -> list[bool]:
    from vime.backends.megatron_utils import cpu_compat

    cpu_compat.install()  # resize_ and views are the same on a CPU; only the synchronisation is CUDA's
    kept, dropped = torch.nn.Parameter(torch.arange(1000.0)), torch.ones(500)
    view, other_view = kept[10:20], dropped[:3]
    movable = memory.Movable()
    answers = []
    for _ in range(2):
        freed = movable.move_out([kept, kept.view(10, 100)], [dropped])
        answers += [freed == 6000, kept.untyped_storage().nbytes() == 0, movable.is_away]
        taken = movable.move_in()
        answers += [taken == 6000, not movable.is_away]
        answers += [torch.equal(view, torch.arange(10.0, 20.0)), not other_view.any()]
        dropped.fill_(1)
    hosts = list(movable._host.values())
    answers.append(len(hosts) == 1)  # the second time used the first one's
    try:
        movable.move_out([kept[:5]])
    except AssertionError:
        answers.append(True)
    return answers


def test_memory_is_given_back_and_taken_again() -> None:
    answers = run_ranks(1, moving)[0]
    assert all(answers)
    assert len(answers) == 16


def test_optimizer_tensors_leave_out_the_parameters_themselves() -> None:
    named = parameters()
    arenas = memory.flatten_parameters(named, [], allocate)
    optimizer = SimpleNamespace(optimizer=SimpleNamespace(param_groups=[{"params": list(named.values())}], state={}))
    assert memory.optimizer_tensors(optimizer, arenas) == []  # and only what is on a GPU is moved
