"""The GPU's copy and check kernels, against torch's own copies. Without a GPU, Triton's interpreter runs them."""

from __future__ import annotations

import importlib
import os
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
pytest.importorskip("triton", reason="comes with CUDA builds of torch only")

from tests.unit.weight_sync.test_copy_table import DTYPES, SPAN, copies
from vime.weight_sync.copy_triton import TritonCopier
from vime.weight_sync.load_plan import LoadFill
from vime.weight_sync.program import Copy, CopyProgram

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXAMPLES = 300 if DEVICE == "cuda" else 25


def numbers(dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-99, 99, (count,), generator=generator).to(dtype).to(DEVICE)


@settings(max_examples=EXAMPLES, deadline=None)
@given(copies(), st.sampled_from((None, *DTYPES)), st.integers(0, 2**31))
def test_the_kernel_does_what_the_copy_says(copy: Copy, dst_dtype, seed: int) -> None:
    dst_dtype = dst_dtype or copy.src_dtype
    arena = numbers(copy.src_dtype, SPAN // copy.src_dtype.itemsize, seed).view(torch.uint8)
    param = numbers(dst_dtype, SPAN // dst_dtype.itemsize, seed + 1)
    expected = param.clone()
    source = arena.view(copy.src_dtype).as_strided(
        copy.shape, copy.src_strides, copy.src_offset // copy.src_dtype.itemsize
    )
    expected.as_strided(copy.shape, copy.dst_strides, copy.dst_offset).copy_(source)
    copier = TritonCopier(CopyProgram([copy], []))
    copier.bind({(0, 0): arena}, {"p": param})
    copier.run()
    assert copier.check("full", 0)() == []
    assert torch.equal(param.view(torch.uint8), expected.view(torch.uint8))


def weights() -> tuple[CopyProgram, dict, dict]:
    """Three copies: contiguous, strided, converted; and a fill."""
    arenas = {(0, 0): numbers(torch.bfloat16, 1 << 18, 0).view(torch.uint8)}
    arenas[1, 0] = numbers(torch.float32, 1 << 14, 1).view(torch.uint8)
    params = {
        "a": torch.zeros(1 << 17, dtype=torch.bfloat16, device=DEVICE),
        "b": torch.zeros(256, 96, dtype=torch.bfloat16, device=DEVICE),
        "c": torch.zeros(1 << 14, dtype=torch.bfloat16, device=DEVICE),
    }
    program = CopyProgram(
        [
            Copy((0, 0), 0, torch.bfloat16, (1,), "a", 0, (1,), (1 << 17,), "A"),
            Copy((0, 0), 64, torch.bfloat16, (192, 1), "b", 0, (96, 1), (256, 64), "B"),
            Copy((1, 0), 0, torch.float32, (1,), "c", 0, (1,), (1 << 14,), "C"),
        ],
        [LoadFill("b", (256, 32), (96, 1), 64, 7.0)],
    )
    return program, arenas, params


def test_a_flipped_bit_is_found_and_its_copy_named() -> None:
    program, arenas, params = weights()
    copier = TritonCopier(program)
    copier.bind(arenas, params)
    copier.run()
    assert copier.check("full", 0)() == []
    assert (params["b"][:, 64:] == 7).all()
    for number, (name, place) in enumerate({"a": 70000, "b": 96 * 200 + 63, "c": 9999}.items()):
        params[name].view(torch.int16).view(-1)[place] ^= 1 << 3
        assert copier.check("full", 0)() == [number]
        assert copier.check("off", 0)() == []
        found = [copier.check("sampled", version)() for version in range(61)]
        assert sorted(found)[-1] == [number]
        assert [] in found
        params[name].view(torch.int16).view(-1)[place] ^= 1 << 3
    assert copier.check("full", 0)() == []


# What is counted here are compilations. Without a GPU, test_copy_triton_host.py holds the kernel to what prevents them.
@pytest.mark.skipif(DEVICE != "cuda", reason="the interpreter compiles nothing")
def test_every_version_is_checked_by_what_the_first_one_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    program, arenas, params = weights()
    copier = TritonCopier(program)
    copier.bind(arenas, params)
    copier.run()
    assert copier.check("sampled", 5)() == []
    compiled: list[str] = []
    triton = importlib.import_module("triton")
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **_: compiled.append("again"))
    for version in (0, 1, 16, 48):
        assert copier.check("sampled", version)() == []
    assert copier.check("full", 0)() == []
    assert not compiled


def test_bound_again_where_an_arena_has_moved() -> None:
    program, arenas, params = weights()
    copier = TritonCopier(program)
    copier.bind(arenas, params)
    copier.run()
    moved = {source: arena.clone() for source, arena in arenas.items()}
    moved[0, 0].view(torch.bfloat16).neg_()
    before = params["a"].clone()
    copier.bind(moved, params)
    copier.run()
    assert copier.check("full", 0)() == []
    assert torch.equal(params["a"], -before)


def test_a_replayed_run_copies_what_is_there_now() -> None:
    program, arenas, params = weights()
    copier = TritonCopier(program, replay=True)
    copier.bind(arenas, params)
    for _ in range(4):  # the first launches, the second captures, all later ones replay
        for dtype, source in ((torch.bfloat16, (0, 0)), (torch.float32, (1, 0))):
            arenas[source].view(dtype).neg_()
        for param in params.values():
            param.zero_()
        copier.run()
        assert copier.check("full", 0)() == []
        assert (params["b"][:, 64:] == 7).all()
        assert torch.equal(params["a"], arenas[0, 0].view(torch.bfloat16)[: 1 << 17])
    assert (copier._graph is not None) == (DEVICE == "cuda")


# Without a GPU, test_copy_triton_host.py holds the order of the clock's events against the copies.
@pytest.mark.skipif(DEVICE == "cpu", reason="the clock is made of CUDA events")
def test_the_clock_is_read_anew_at_every_replay() -> None:
    program, arenas, params = weights()
    copier = TritonCopier(program, replay=True)
    copier.bind(arenas, params)
    for _ in range(5):
        torch.cuda.synchronize()
        started = time.perf_counter()
        copier.run()
        assert copier.check("full", 0)() == []
        # Of a run before, the start of the check would be as far from the copies' end as that run is.
        assert copier.seconds > 0
        assert copier.check_seconds > 0
        assert copier.seconds + copier.check_seconds < time.perf_counter() - started
    assert copier._graph is not None


def test_a_replay_ends_where_memory_has_moved() -> None:
    program, arenas, params = weights()
    copier = TritonCopier(program, replay=True)
    copier.bind(arenas, params)
    for _ in range(3):
        copier.run()
    moved = {name: torch.zeros_like(param) for name, param in params.items()}
    copier.bind(arenas, moved)
    copier.run()
    assert copier.check("full", 0)() == []
    assert torch.equal(moved["a"], params["a"])
    copier.unbind()
    assert copier._graph is None


# Without a GPU, test_copy_engines.py holds what is left to them, and when, against a driver that moves bytes itself.
@pytest.mark.skipif(DEVICE == "cpu", reason="copy engines are a GPU's")
def test_copy_engines_and_the_kernel_copy_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """From this GPU, as if it were another: the engines do not mind."""
    monkeypatch.setattr("vime.weight_sync.copy_triton.WORTH", 0)
    count = 1 << 20
    arena = numbers(torch.bfloat16, 40 * count, 2)
    params = {f"p{number}": torch.zeros(count, dtype=torch.bfloat16, device=DEVICE) for number in range(40)}
    pieces = [
        Copy((0, 0), 2 * count * (number * 7 % 40), torch.bfloat16, (1,), f"p{number}", 0, (1,), (count,), f"t{number}")
        for number in range(40)
    ]
    pieces[5] = Copy((0, 0), 0, torch.bfloat16, (16, 1), "p5", 0, (8, 1), (count // 8, 8), "t5")
    copier = TritonCopier(CopyProgram(pieces, [LoadFill("p0", (count,), (1,), 0, 7.0)]), replay=True, far={(0, 0)})
    copier.bind({(0, 0): arena.view(torch.uint8)}, params)
    for _ in range(4):
        arena.neg_()
        for param in params.values():
            param.zero_()
        copier.run()
        assert copier.check("full", 0)() == []
        assert copier.seconds > 0
        assert torch.equal(params["p5"], arena.view(-1, 16)[: count // 8, :8].reshape(-1))
        assert torch.equal(params["p0"], arena[:count])
    assert copier._graph is not None
    params["p9"].view(torch.int16)[count - 1] ^= 1
    assert copier.check("full", 0)() == [9]


# Without a GPU, test_copy_engines.py holds that the current stream waits for them, after an error too.
@pytest.mark.skipif(DEVICE == "cpu", reason="copy engines are a GPU's")
def test_memory_that_is_given_back_at_once_is_not_written_to_by_copy_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of layers in load format: whoever has it next is on the current stream."""
    monkeypatch.setattr("vime.weight_sync.copy_triton.WORTH", 0)
    count = 256 << 20
    arena = torch.ones(count, dtype=torch.bfloat16, device=DEVICE)
    whole = Copy((0, 0), 0, torch.bfloat16, (1,), "p", 0, (1,), (count,), "t")
    copier = TritonCopier(CopyProgram([whole], []), far=[(0, 0)])
    for _ in range(3):
        param = torch.zeros(count, dtype=torch.bfloat16, device=DEVICE)
        place = param.data_ptr()
        copier.bind({(0, 0): arena.view(torch.uint8)}, {"p": param})
        copier.run()
        copier.forget_params()
        del param
        other = torch.full((count,), 7.0, dtype=torch.bfloat16, device=DEVICE)
        assert other.data_ptr() == place
        assert (other == 7).all()
        del other
