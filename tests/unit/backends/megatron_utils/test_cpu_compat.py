"""Megatron's CUDA calls answered by the CPU."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from tests.distributed import run_ranks
from vime.backends.megatron_utils import cpu_compat

# The module stands in for CUDA where there is none, and is not used beside it.
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: nothing is replaced")


def test_the_mode_rewrites_what_names_cuda() -> None:
    with cpu_compat.cpu_for_cuda():
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.empty(2, device=torch.device("cuda", 0), pin_memory=True).device.type == "cpu"
        ones = torch.ones(2)
        assert ones.cuda() is ones
        assert ones.to("cuda").device.type == "cpu"
        assert ones.to(device="cuda", dtype=torch.bfloat16).dtype is torch.bfloat16
        assert ones.type() == "torch.cuda.FloatTensor"
        assert ones.bfloat16().type() == "torch.cuda.BFloat16Tensor"
        assert ones.long().type() == "torch.LongTensor"
        assert ones.type(torch.float64).dtype is torch.float64
    assert torch.ones(1).type() == "torch.FloatTensor"


def test_a_mode_belongs_to_its_thread() -> None:
    """Why every trainer method enters it, and what to know about backward: same thread, but without the mode."""
    seen: dict[str, Any] = {}

    def ask(where: str) -> None:
        seen[where] = threading.current_thread()
        try:
            torch.zeros(1, device="cuda")
        except (AssertionError, RuntimeError):
            seen[f"{where} fails"] = True

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            ask("backward")
            return grads[0]

    with cpu_compat.cpu_for_cuda():
        ask("here")
        torch.autograd.backward(Probe.apply(torch.ones(2, requires_grad=True)).sum())
        thread = threading.Thread(target=ask, args=("elsewhere",))
        thread.start()
        thread.join()
    assert seen["backward"] is seen["here"]
    assert "here fails" not in seen
    assert "elsewhere fails" in seen


def installed(rank: int) -> dict[str, Any]:
    assert cpu_compat.install()
    assert cpu_compat.install()  # again: nothing changes
    functions = [value for value in vars(torch.cuda).values() if callable(value)]
    torch.cuda.manual_seed(5)
    one = torch.rand(1)
    torch.cuda.manual_seed(5)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
    return {
        "same": torch.equal(one, torch.rand(1)),
        "device": str(torch.cuda.current_device()),
        "available": torch.cuda.is_available(),
        "one object per name": len({id(f) for f in functions if getattr(f, "__module__", "").startswith("vime")})
        == sum(getattr(f, "__module__", "").startswith("vime") for f in functions),
    }


def test_install() -> None:
    assert run_ranks(1, installed) == [{"same": True, "device": "cpu", "available": False, "one object per name": True}]
