"""Each correction of Megatron-Core is still needed, and corrects.

When one of the "still needed" assertions fails, Megatron has changed: the correction can go, or must move with it.
"""

from __future__ import annotations

import importlib.metadata
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import run_ranks
from tests.tiny import make_checkpoint
from tests.unit.backends.megatron_utils.trainer_helpers import make_batch, processes, trainer

EXPERTS = {
    "parallel.tensor_model_parallel_size": 2,
    "parallel.expert_tensor_parallel_size": 1,
}


def modules(rank: int) -> dict[str, bool]:
    from vime.backends.megatron_utils import cpu_compat

    cpu_compat.install()
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    sizes = torch.tensor([1, 2])
    found = {
        "te_general_gemm unbound": not hasattr(moe_utils, "te_general_gemm"),
        "sizes stay tensors": torch.is_tensor(moe_utils.maybe_move_tensor_to_cpu(sizes, as_numpy=True)),
        "states loops over all keys": "for key in dst_tensors"
        in inspect.getsource(DistributedOptimizer._set_main_param_and_optimizer_states),
    }
    from vime.backends.megatron_utils import megatron_fixes

    megatron_fixes.apply()
    megatron_fixes.apply()
    found["bound"] = moe_utils.te_general_gemm is None  # pyright: ignore[reportAttributeAccessIssue]
    found["numpy"] = token_dispatcher.maybe_move_tensor_to_cpu(sizes, as_numpy=True).tolist() == [1, 2]
    return found


def test_module_level_corrections() -> None:
    found = run_ranks(1, modules)[0]
    assert found == dict.fromkeys(found, True)


def unlike_sizes(rank: int) -> dict[str, Any]:
    from vime.backends.megatron_utils import cpu_compat

    cpu_compat.install()
    from megatron.core.tensor_parallel import mappings

    group, sizes = torch.distributed.group.WORLD, [1, 3]
    mine = torch.full((sizes[rank], 2), rank + 1.0, requires_grad=True)
    found: dict[str, Any] = {}
    try:
        mappings._gather_along_first_dim(mine, group, sizes)
        found["gloo refuses"] = False
    except RuntimeError as error:
        found["gloo refuses"] = "invalid tensor size" in str(error)
    from vime.backends.megatron_utils import megatron_fixes

    megatron_fixes.apply()
    whole = mappings.gather_from_sequence_parallel_region(mine, group=group, output_split_sizes=sizes)
    found["gathered"] = whole[:, 0].tolist()
    (whole * torch.arange(1.0, 5.0)[:, None] * (rank + 1)).sum().backward()
    assert mine.grad is not None
    found["gradient"] = mine.grad[:, 0].tolist()
    parts = mappings.reduce_scatter_to_sequence_parallel_region(whole.detach(), group=group, input_split_sizes=sizes)
    found["scattered"] = parts[:, 0].tolist()
    return found


def test_ranks_with_unlike_numbers_of_tokens_can_be_gathered_over_gloo() -> None:
    assert run_ranks(2, unlike_sizes, context=processes()) == [
        {"gloo refuses": True, "gathered": [1, 2, 2, 2], "gradient": [3], "scattered": [2]},
        {"gloo refuses": True, "gathered": [1, 2, 2, 2], "gradient": [6, 9, 12], "scattered": [4, 4, 4]},
    ]


def test_the_version_they_were_made_for() -> None:
    source = Path(__file__).parents[4] / "vime/backends/megatron_utils/megatron_fixes.py"
    assert f'SUPPORTED_VERSION = "{importlib.metadata.version("megatron-core")}"' in source.read_text()


def experts(rank: int, path: str, corrected: bool) -> dict[str, float]:
    from vime.backends.megatron_utils import cpu_compat

    cpu_compat.install()
    from vime.backends.megatron_utils import optimizer

    if not corrected:
        optimizer.reduce_expert_gradients = lambda model: None
    with trainer(rank, path, EXPERTS) as built:
        return built.train(0, make_batch())


def test_expert_gradients_are_reduced_over_tensor_parallel_ranks(tmp_path: Path) -> None:
    """Corrected: tests of layouts. Here: without the correction the norm is wrong, so that those tests can fail."""
    path = make_checkpoint(tmp_path, "qwen3_moe")
    right, wrong = (run_ranks(2, experts, path, corrected)[0]["train/grad_norm"] for corrected in (True, False))
    assert right != pytest.approx(wrong, rel=1e-4)


def steps(rank: int) -> list[Any]:
    from vime.backends.megatron_utils import cpu_compat

    cpu_compat.install()
    from vime.backends.megatron_utils.megatron_fixes import unshare_adam_steps

    class Part:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = torch.optim.AdamW(parameters)
    shared = torch.tensor(4.0)
    for parameter in parameters:
        parameter.grad = torch.ones(2)
        optimizer.state[parameter] = {
            "step": shared,
            "exp_avg": torch.zeros(2),
            "exp_avg_sq": torch.zeros(2),
        }
    unshare_adam_steps(Part(optimizer))
    optimizer.step()
    return [optimizer.state[parameter]["step"].item() for parameter in parameters]


def test_adam_steps_are_counted_once_per_parameter() -> None:
    assert run_ranks(1, steps) == [[5.0, 5.0, 5.0]]
