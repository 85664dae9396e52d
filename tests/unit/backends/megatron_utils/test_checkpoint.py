"""Saving and loading the trainer: continuing is bit for bit the same, and another layout continues from it too.

A "step" here is a real optimizer step on gradients that are a function of the weights, so that every layout sees the
same ones: g = sin(3 w) cos(step), which leaves padded rows (zero) as they are.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist

from tests.distributed import run_ranks
from tests.tiny import make_checkpoint
from tests.unit.backends.megatron_utils.trainer_helpers import processes
from vime.config import CheckpointOptions, ClusterOptions, Config, ModelOptions, ParallelOptions, RolloutOptions
from vime.config.train import OptimizerOptions, TrainOptions
from vime.errors import DataError
from vime.models.layout import checkpoint_tensors, pieces
from vime.models.spec import spec_from_hf

Weights = dict[str, torch.Tensor]


class Trained:
    """Model, optimizer and schedule of one rank, put together from the trainer's own parts."""

    def __init__(self, path: str, sizes: dict[str, Any], seed: int = 1) -> None:
        from vime.backends.megatron_utils import cpu_compat, megatron_fixes, memory, parallel
        from vime.backends.megatron_utils.hf_weights import load_hf_weights
        from vime.backends.megatron_utils.lr_schedule import build_schedule
        from vime.backends.megatron_utils.model_provider import build_chunks, transformer_config
        from vime.backends.megatron_utils.optimizer import build_optimizer, wrap_chunks
        from vime.models.layout import ParallelLayout

        sizes = dict(sizes)
        dtype, distributed = sizes.pop("dtype", "fp32"), sizes.pop("distributed", False)
        self.config = Config(
            checkpoint=CheckpointOptions(hf_checkpoint=path),
            rollout=RolloutOptions(rollout_batch_size=1, num_rollout=10),
            cluster=ClusterOptions(actor_num_gpus_per_node=dist.get_world_size(), device="cpu"),
            model=ModelOptions(make_vocab_size_divisible_by=8),
            train=TrainOptions(dtype=dtype, seed=seed),
            optimizer=OptimizerOptions(lr=1e-2, weight_decay=0.1, lr_decay_style="linear", lr_decay_iters=20),
            parallel=ParallelOptions(
                **sizes, use_distributed_optimizer=distributed, accumulate_allreduce_grads_in_fp32=True
            ),
        )
        self.spec = spec_from_hf(path)
        self.layout = ParallelLayout.from_config(self.config, self.spec)
        assert self.layout.validate(self.spec) == []
        self.rank = dist.get_rank()
        self.mode = cpu_compat.cpu_for_cuda
        with self.mode():
            megatron_fixes.apply()
            cpu = torch.device("cpu")
            parallel.initialize(
                self.config, self.layout, rank=self.rank, world_size=dist.get_world_size(), store=None, device=cpu
            )
            megatron = transformer_config(self.config, self.spec, self.layout, cpu)
            bare = build_chunks(self.config, self.spec, self.layout, megatron)
            self.chunks = wrap_chunks(self.config, megatron, bare)
            self.params = {(i, n): p for i, chunk in enumerate(bare) for n, p in chunk.named_parameters()}
            memory.flatten_parameters(self.params, self.chunks, lambda n: torch.zeros(n, dtype=torch.uint8))
            self.pieces = pieces(self.spec, self.layout, self.rank)
            load_hf_weights(path, self.data(), self.pieces)
            self.optimizer = build_optimizer(self.config, megatron.params_dtype, cpu, self.chunks)
            self.schedule = build_schedule(self.config, self.optimizer)

    def data(self) -> dict[tuple[int, str], torch.Tensor]:
        return {key: parameter.data for key, parameter in self.params.items()}

    def steps(self, *numbers: int) -> list[float]:
        from vime.backends.megatron_utils.optimizer import guarded_step

        norms = []
        with self.mode():
            for number in numbers:
                for chunk in self.chunks:
                    chunk.zero_grad_buffer()
                self.optimizer.zero_grad()
                for parameter in self.params.values():
                    grad = torch.sin(3 * parameter.data.float()) * torch.cos(torch.tensor(float(number)))
                    parameter.main_grad.copy_(grad)  # pyright: ignore[reportAttributeAccessIssue]
                norms.append(guarded_step(self.optimizer, f"step {number}"))
                self.schedule.step(1)
        return norms

    def save(self, folder: Path, optimizer: bool = True) -> None:
        from vime.backends.megatron_utils.checkpoint import save_checkpoint

        if self.rank == 0:
            folder.mkdir()
        dist.barrier()
        given = self.optimizer if optimizer else None
        save_checkpoint(folder, self.chunks, given, self.schedule, spec=self.spec, layout=self.layout)

    def load(self, folder: Path, optimizer: bool = True) -> None:
        from vime.backends.megatron_utils.checkpoint import load_checkpoint

        given = self.optimizer if optimizer else None
        load_checkpoint(folder, self.chunks, given, self.schedule, spec=self.spec, layout=self.layout)

    def weights(self) -> Weights:
        """The checkpoint tensors, whole, from all ranks; replicas must agree."""
        whole = {name: torch.full(shape, float("nan")) for name, shape in checkpoint_tensors(self.spec).items()}
        mine = [(p.tensor, p.slices, p.view(self.params[p.chunk, p.param].data).clone()) for p in self.pieces]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        for name, slices, values in (piece for rank in everyone for piece in rank):
            there = whole[name][slices]
            assert bool(there.isnan().all()) or torch.equal(there, values.float()), f"replicas of {name} differ"
            whole[name][slices] = values.float()
        return whole

    def close(self) -> None:
        from megatron.core import parallel_state as mpu

        mpu.destroy_model_parallel()


def draws() -> tuple[float, float, float, float]:
    """One number from every generator."""
    from megatron.core import tensor_parallel

    tracker: Any = tensor_parallel.get_cuda_rng_tracker()
    with tracker.fork():
        inside = torch.rand(1).item()
    return random.random(), float(numpy.random.rand()), torch.rand(1).item(), inside


def same(a: Weights, b: Weights) -> None:
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different, different


def close(a: Weights, b: Weights, tolerance: float) -> None:
    worst = max((float((a[name] - b[name]).abs().max()), name) for name in a)
    assert worst[0] <= tolerance, worst


def resume(rank: int, path: str, folder: str, first: dict[str, Any], others: list[dict[str, Any]]) -> None:
    """Train 2 + 2 steps; save after 2; continue in the same layout and in the others."""
    torch.set_num_threads(1)
    folder_path = Path(folder)
    trained = Trained(path, first)
    trained.save(folder_path / "start")  # before Adam has any state
    before = trained.weights()
    norms = trained.steps(0, 1)
    trained.save(folder_path / "two")
    two = trained.weights()
    numbers = draws()
    norms += trained.steps(2, 3)
    four = trained.weights()
    assert max(float((four[name] - two[name]).abs().max()) for name in four) > 1e-3
    trained.close()

    again = Trained(path, first, seed=99)
    again.load(folder_path / "start")
    same(again.weights(), before)
    assert again.steps(0) == norms[:1]
    again.load(folder_path / "two")  # over a state that is not fresh
    same(again.weights(), two)
    assert draws() == numbers
    assert again.steps(2, 3) == norms[2:]
    same(again.weights(), four)
    again.load(folder_path / "start")
    assert again.steps(0, 1, 2, 3) == norms
    same(again.weights(), four)
    again.close()

    bf16 = first.get("dtype") == "bf16"
    for sizes in others:
        other = Trained(path, sizes, seed=7)
        other.load(folder_path / "two")
        same(other.weights(), two)
        torch.testing.assert_close(other.steps(2, 3), norms[2:], rtol=1e-5, atol=0)
        # Gradient norms are summed in another order, so the clipped gradients differ in their last bits.
        close(other.weights(), four, 2e-2 if bf16 else 2e-6)
        other.close()


PP2 = {"pipeline_model_parallel_size": 2}
TP2 = {"tensor_model_parallel_size": 2}
VPP2 = PP2 | {"num_layers_per_virtual_pipeline_stage": 1}
EP2 = {"expert_model_parallel_size": 2}
ETP1 = {"expert_tensor_parallel_size": 1}
CP2 = {"context_parallel_size": 2}
DIST = {"distributed": True}


@pytest.mark.parametrize(
    ("family", "tied", "first", "others"),
    [
        ("qwen3", True, TP2 | PP2 | DIST, [DIST, VPP2 | CP2 | DIST]),
        ("qwen2", False, VPP2, [TP2]),
        ("qwen3_moe", False, TP2 | EP2 | ETP1 | DIST, [DIST, PP2 | EP2 | DIST]),
        ("qwen3", True, TP2 | DIST | {"dtype": "bf16"}, [PP2 | DIST | {"dtype": "bf16"}]),
    ],
    ids=["tied", "plain-optimizer", "moe", "bf16"],
)
def test_continuing_is_exact_and_other_layouts_follow(
    tmp_path: Path, family: str, tied: bool, first: dict[str, Any], others: list[dict[str, Any]]
) -> None:
    path = make_checkpoint(tmp_path / "hf", family, tied=tied, num_hidden_layers=4, vocab_size=509)
    run_ranks(4, resume, path, str(tmp_path), first, others, timeout=250, context=processes())


def failing_write(rank: int, path: str, folder: str) -> str:
    from vime.backends.megatron_utils import torch_dist_writer

    trained = Trained(path, DIST)

    class FullDisk(torch_dist_writer.FileSystemWriter):
        def write_data(self, *args: Any) -> Any:
            raise OSError(28, "No space left on device")

    real = torch_dist_writer.FileSystemWriter
    if rank == 1:
        torch_dist_writer.FileSystemWriter = FullDisk
    with pytest.raises(DataError) as caught:
        trained.save(Path(folder) / "full")
    torch_dist_writer.FileSystemWriter = real
    trained.save(Path(folder) / "retry")
    return str(caught.value)


def test_a_failure_to_write_on_one_rank_is_everybodys_error(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "hf")
    for message in run_ranks(2, failing_write, path, str(tmp_path), context=processes()):
        assert re.search(r"cannot write a checkpoint to .*full.*No space left on device", message, re.DOTALL), message
        assert "Traceback" not in message
    assert not (tmp_path / "full" / "metadata.json").exists()
    assert (tmp_path / "retry" / "metadata.json").exists()


def refusals(rank: int, path: str, other_path: str, folder: str) -> list[str]:
    from vime.backends.megatron_utils.checkpoint import follow_weights, load_model_weights

    trained = Trained(path, {"dtype": "bf16"} | DIST)
    trained.steps(0, 1)
    trained.save(Path(folder) / "iter_0000002", optimizer=False)
    two = trained.weights()
    trained.close()
    found = []

    fresh = Trained(path, {"dtype": "bf16"} | DIST)
    before = fresh.weights()
    for wrong in (Path(folder) / "iter_0000002", Path(folder)):
        with pytest.raises(DataError) as caught:
            fresh.load(wrong)
        found.append(str(caught.value))
    same(fresh.weights(), before)
    fresh.load(Path(folder) / "iter_0000002", optimizer=False)
    same(fresh.weights(), two)
    follow_weights(fresh.optimizer)
    fresh.steps(2)  # would go back to the old master weights without follow_weights
    close(fresh.weights(), two, 0.03)
    load_model_weights(folder, fresh.chunks, fresh.spec)  # a folder of checkpoints
    same(fresh.weights(), two)
    fresh.close()

    stranger = Trained(other_path, {"dtype": "bf16"} | DIST)
    for load in (stranger.load, lambda folder: load_model_weights(folder, stranger.chunks, stranger.spec)):
        with pytest.raises(DataError) as caught:
            load(Path(folder) / "iter_0000002")
        found.append(str(caught.value))
    with pytest.raises(DataError) as caught:
        load_model_weights(Path(folder) / "iter_0000002", stranger.chunks)
    found.append(str(caught.value))
    with pytest.raises(DataError) as caught:
        load_model_weights(path, stranger.chunks)
    found.append(str(caught.value))
    stranger.close()
    return found


def test_what_cannot_be_loaded_is_refused_by_name(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "hf")
    other = make_checkpoint(tmp_path / "other", num_hidden_layers=3, vocab_size=500)
    for messages in run_ranks(2, refusals, path, other, str(tmp_path), context=processes()):
        patterns = (
            "without the optimizer .*--no-load-optim",
            "is not a torch_dist checkpoint",
            "num_layers: 2 there, 3 here; vocab_size: 512 there, 500 here",
            "num_layers: 2 there, 3 here; vocab_size: 512 there, 500 here",
            "cannot load the weights in",
            "neither a Hugging Face directory nor a Megatron torch_dist checkpoint",
        )
        for message, pattern in zip(messages, patterns, strict=True):
            assert re.search(pattern, message), message
