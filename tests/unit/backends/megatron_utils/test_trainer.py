"""MegatronTrainer on one rank, against transformers and a plain loop over tokens."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import run_ranks
from tests.tiny import make_checkpoint
from tests.unit.backends.megatron_utils.trainer_helpers import (
    grad_norm,
    hf_log_probs,
    hf_model,
    make_batch,
    processes,
    trainer,
)
from vime.config.check_memory import estimate
from vime.errors import DataError, TrainerError

FAMILIES = [("qwen3", False), ("qwen3", True), ("qwen2", False), ("llama", False), ("qwen3_moe", False)]


def grpo_advantages(batch: Any) -> list[float]:
    out = []
    for reward, group in zip(batch.rewards, batch.group_ids, strict=True):
        rewards = [r for r, g in zip(batch.rewards, batch.group_ids, strict=True) if g == group]
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
        out.append((reward - mean) / (std + 1e-6))
    return out


def reference_loss(model: Any, batch: Any, *, entropy_coef: float, per_token: bool, temperature: float) -> Any:
    """The first step's policy loss (ratios are one), as a loop over answers and tokens."""
    log_probs, entropies = hf_log_probs(model, batch, temperature)
    advantages = grpo_advantages(batch)
    total = sum(sum(mask) for mask in batch.loss_masks)
    loss = torch.zeros(())
    for i, mask in enumerate(batch.loss_masks):
        for t, learned in enumerate(mask):
            weight = learned / total if per_token else learned / sum(mask) / len(batch.tokens)
            ratio = (log_probs[i][t] - log_probs[i][t].detach()).exp()
            loss = loss + weight * (-ratio * advantages[i] - entropy_coef * entropies[i][t])
    return loss


def against_transformers(rank: int, paths: list[str]) -> list[Any]:
    results = []
    for number, path in enumerate(paths):
        per_token, temperature = number % 2 == 1, 0.7 if number == 1 else 1.0
        batch, model = make_batch(), hf_model(path)
        with torch.no_grad():
            ours, _ = hf_log_probs(model, batch, temperature)
        batch.rollout_log_probs = [values.tolist() for values in ours]
        loss = reference_loss(model, batch, entropy_coef=0.01, per_token=per_token, temperature=temperature)
        loss.backward()
        options = {
            "algorithm.entropy_coef": 0.01,
            "train.calculate_per_token_loss": per_token,
            "rollout.rollout_temperature": temperature,
        }
        with trainer(rank, path, options) as built:
            metrics = built.train(0, batch)
        results.append((metrics, loss.item(), grad_norm(model)))
    return results


def test_log_probs_loss_and_gradients_are_those_of_transformers(tmp_path: Path) -> None:
    paths = [make_checkpoint(tmp_path / f"{family}{tied}", family, tied=tied) for family, tied in FAMILIES]
    for (family, _), (metrics, loss, norm) in zip(
        FAMILIES, run_ranks(1, against_transformers, paths, context=processes())[0], strict=True
    ):
        assert metrics["train/logprob_abs_diff_max"] < 1e-5, family  # fp32: sums in another order
        assert metrics["train/loss"] == pytest.approx(loss, abs=1e-5), family
        assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-5), family


def learning(rank: int, path: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    options = {"algorithm.use_kl_loss": True, "algorithm.kl_loss_coef": 0.1, "algorithm.kl_loss_type": "low_var_kl"}
    for name, more in {
        "plain": {},
        "again": {},
        "recomputed": {
            "train.recompute_granularity": "full",
            "train.recompute_method": "uniform",
            "train.recompute_num_layers": 1,
        },
        "two steps": {"train.global_batch_size": 4},
        "other rows": {
            "train.global_batch_size": 4,
            "train.use_dynamic_batch_size": True,
            "train.max_tokens_per_gpu": 64,
            "train.log_probs_max_tokens_per_gpu": 200,
        },
    }.items():
        with trainer(rank, path, {**options, **more}) as built:
            results[name] = [built.train(rollout, make_batch(rollout)) for rollout in range(3)]
    return results


def test_learning_is_deterministic_and_does_not_depend_on_how_rows_are_cut(tmp_path: Path) -> None:
    results = run_ranks(1, learning, make_checkpoint(tmp_path, "qwen3"), context=processes())[0]
    assert results["again"] == results["plain"]
    assert results["recomputed"] == results["plain"]
    first, second, _ = results["plain"]
    assert first["train/kl"] == 0.0  # policy and reference are the same weights
    assert second["train/kl"] > 1e-3
    for ours, theirs in zip(results["two steps"], results["other rows"], strict=True):
        assert ours == pytest.approx(theirs, abs=2e-5)
    assert results["two steps"][0]["train/ppo_kl"] != 0.0  # the second step starts from changed weights


def weights_of(built: Any) -> list[torch.Tensor]:
    return [arena.buffer.clone() for arena in built.arenas]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def guarding(rank: int, path: str, reference: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    options = {"algorithm.use_kl_loss": True, "checkpoint.ref_load": reference, "optimizer.lr": 0.0}
    with trainer(rank, path, options) as built:
        before = weights_of(built)
        results["kl"] = built.train(0, make_batch())["train/kl"]  # a learning rate of 0 changes nothing
        results["restored"] = same(before, weights_of(built))
        copies = sum(host.nbytes for kept in (built._reference, built._policy) for host in kept._host)
        results["on the host"] = copies / estimate(built.config, built.spec, "cpu").reference
        results["in arenas"] = all(
            built.named_params[key].data_ptr() == arena.buffer.data_ptr() + offset
            for arena in built.arenas
            for key, offset in arena.offsets.items()
        ) and sum(len(arena.offsets) for arena in built.arenas) == len(built.named_params)
        built.named_params[0, "decoder.layers.1.mlp.linear_fc2.weight"].data[3, 5] = math.inf
        poisoned = weights_of(built)
        with pytest.raises(TrainerError) as error:
            built.train(7, make_batch())
        results["error"] = str(error.value)
        results["untouched"] = same(poisoned, weights_of(built))
        for field, value in (
            ("loss_masks", [[1]] * 8),
            ("rewards", [1.0]),
            ("rewards", [math.nan] * 8),
            ("response_lengths", [*[1] * 7, 14]),
        ):
            wrong = copy.copy(make_batch())
            setattr(wrong, field, value)
            with pytest.raises(DataError):
                built.train(0, wrong)
    with trainer(rank, path, {"parallel.use_distributed_optimizer": True}) as built:
        before, places = weights_of(built), [arena.buffer.data_ptr() for arena in built.arenas]
        built.train(0, make_batch())
        results["learned in place"] = not same(before, weights_of(built)) and all(
            parameter.data_ptr() == dict(_addresses(built))[key] for key, parameter in built.named_params.items()
        )
        results["arenas stayed"] = places == [arena.buffer.data_ptr() for arena in built.arenas]
    return results


def _addresses(built: Any) -> list[tuple[Any, int]]:
    return [(key, arena.buffer.data_ptr() + offset) for arena in built.arenas for key, offset in arena.offsets.items()]


def test_reference_weights_come_and_go_and_nothing_that_is_not_finite_is_learned(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "policy", "qwen3")
    results = run_ranks(
        1, guarding, path, make_checkpoint(tmp_path / "reference", "qwen3", seed=9), context=processes()
    )[0]
    assert abs(results["kl"]) > 0.01
    assert results["restored"]
    assert 1 <= results["on the host"] < 1.01  # `vime check` counts what there is; arenas are padded a little
    assert results["in arenas"]
    assert "rollout 7, optimizer step 1 of 1" in results["error"]
    assert "rank(s) [0]" in results["error"]
    assert results["untouched"]
    assert results["learned in place"]
    assert results["arenas stayed"]


def continuing(rank: int, path: str, folder: str) -> Any:
    options = {"optimizer.lr_decay_style": "cosine", "optimizer.lr_warmup_iters": 1, "model.hidden_dropout": 0.1}
    options |= {"model.attention_dropout": 0.1}
    with trainer(rank, path, options) as built:
        for rollout in range(2):
            built.train(rollout, make_batch(rollout))
        Path(folder).mkdir()
        built.save(folder)
        through = built.train(2, make_batch(2))
    with trainer(rank, path, options) as built:
        built.load(folder)
        resumed = built.train(2, make_batch(2))
        built.save_hf(folder + "-hf")
        metrics = built.train(3, _with_hf_log_probs(make_batch(3), folder + "-hf"))
    return through, resumed, metrics


def with_a_fresh_optimizer(rank: int, path: str, folder: str) -> list[Any]:
    options = {"optimizer.lr_decay_style": "cosine", "optimizer.lr_warmup_iters": 2}
    with trainer(rank, path, options) as built:
        rates = [built.train(rollout, make_batch(rollout))["train/lr"] for rollout in range(2)]
        Path(folder).mkdir()
        built.save(folder)
        weights = {key: value.clone() for key, value in built._data().items()}
    with trainer(rank, path, {**options, "checkpoint.no_load_optim": True}) as built:
        built.load(folder)
        loaded = all(torch.equal(value, weights[key]) for key, value in built._data().items())
        state = sum(len(part.optimizer.state) for part in built.optimizer.chained_optimizers)
        again = [built.train(rollout, make_batch(rollout))["train/lr"] for rollout in (2, 3)]
    return [loaded, state, rates, again]


def test_a_fresh_optimizer_warms_up_again(tmp_path: Path) -> None:
    """As in Megatron-LM, where --no-load-optim leaves out the schedule's state too."""
    path = make_checkpoint(tmp_path / "model", "qwen3")
    loaded, state, rates, again = run_ranks(
        1, with_a_fresh_optimizer, path, str(tmp_path / "saved"), context=processes()
    )[0]
    assert (loaded, state) == (True, 0)
    assert again == rates
    assert rates[0] < rates[1]


def _with_hf_log_probs(batch: Any, path: str) -> Any:
    with torch.no_grad():
        values, _ = hf_log_probs(hf_model(path), batch)
    batch.rollout_log_probs = [v.tolist() for v in values]
    return batch


def test_continues_from_a_checkpoint_bit_for_bit(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "hf", "qwen3")
    through, resumed, metrics = run_ranks(1, continuing, path, str(tmp_path / "saved"), context=processes())[0]
    assert resumed == through
    assert metrics["train/logprob_abs_diff_max"] < 1e-5  # what save_hf wrote is what the trainer has


def other_losses(rank: int, path: str) -> dict[str, Any]:
    batch = make_batch()
    results: dict[str, Any] = {}
    with trainer(rank, path, {"train.loss_type": "sft_loss"}) as built:
        sft = copy.copy(batch)
        sft.rollout_log_probs = None
        results["sft"] = built.train(0, sft)
    model = hf_model(path)
    log_probs, _ = hf_log_probs(model, batch)
    parts = [
        (values * torch.tensor(mask)).sum() / sum(mask)
        for values, mask in zip(log_probs, batch.loss_masks, strict=True)
    ]
    loss = -torch.stack(parts).mean()
    loss.backward()
    results["sft expected"] = (loss.item(), grad_norm(model))
    for name, more in {
        "gspo": {"algorithm.advantage_estimator": "gspo"},
        "rollout log-probs": {"algorithm.use_rollout_logprobs": True},
        "tis": {"algorithm.use_tis": True},
        "kl in reward": {"algorithm.kl_coef": 0.1, "algorithm.advantage_estimator": "reinforce_plus_plus"},
    }.items():
        with trainer(rank, path, more) as built:
            results[name] = [built.train(0, batch), built.train(1, batch)]
    values = torch.cat(log_probs).detach()
    given, mask = (
        torch.cat([torch.tensor(x) for x in lists]) for lists in (batch.rollout_log_probs or [], batch.loss_masks)
    )
    results["difference"] = (((values - given).abs() * mask).sum() / mask.sum()).item()
    return results


def test_other_losses(tmp_path: Path) -> None:
    results = run_ranks(1, other_losses, make_checkpoint(tmp_path, "qwen3"), context=processes())[0]
    loss, norm = results["sft expected"]
    assert results["sft"]["train/loss"] == pytest.approx(loss, abs=1e-5)
    assert results["sft"]["train/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert "train/logprob_abs_diff" not in results["sft"]
    for name in ("gspo", "rollout log-probs", "tis", "kl in reward"):
        assert results[name][0]["train/logprob_abs_diff"] == pytest.approx(results["difference"], abs=1e-5), name
        assert all(math.isfinite(value) for metrics in results[name] for value in metrics.values()), name
    assert results["rollout log-probs"][0]["train/clip_fraction"] > 0
    assert results["tis"][0]["train/tis_clip_fraction"] > 0


def precisions(rank: int, path: str, moe: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for distributed in (False, True):
        options = {
            "train.dtype": "bf16",
            "parallel.use_distributed_optimizer": distributed,
            "parallel.accumulate_allreduce_grads_in_fp32": True,
            "optimizer.lr": 1e-4,
        }
        with trainer(rank, path, options) as built:
            dtypes = {parameter.dtype for parameter in built.named_params.values()}
            for rollout in range(2):
                metrics = built.train(rollout, make_batch(rollout))
            masters = [group["params"] for part in built.optimizer.chained_optimizers for group in part.param_groups]
            flat = [master for group in masters for master in group]
            results[f"bf16 {distributed}"] = (
                dtypes == {torch.bfloat16}
                and {master.dtype for master in flat} == {torch.float32}
                and any((master != master.bfloat16().float()).any() for master in flat)
                and all(math.isfinite(value) for value in metrics.values())
            )
            results[f"same {distributed}"] = sorted(
                value.double().sum().item() for parameter in built.named_params.values() for value in [parameter.data]
            ) == pytest.approx(sorted(master.bfloat16().double().sum().item() for master in flat))
            built.offload()
            report = built.memory_report()
            results[f"report {distributed}"] = (
                report["gradients"] >= 2 * sum(parameter.nbytes for parameter in built.named_params.values())
                and report["weights"] > 0
            )
            built.onload()
    for distributed in (False, True):
        options = {
            "model.moe_grouped_gemm": True,
            "model.moe_router_load_balancing_type": "aux_loss",
            "model.moe_aux_loss_coeff": 0.01,
            "parallel.use_distributed_optimizer": distributed,
        }
        with trainer(rank, moe, options) as built:
            from vime.backends.megatron_utils.experts import stacked

            names = [f"decoder.layers.0.mlp.experts.local_experts.{e}.linear_fc1.weight" for e in range(4)]
            weights = [built.named_params[0, name].data for name in names]
            results[f"not copied {distributed}"] = stacked(weights).data_ptr() == weights[0].data_ptr()
            results[f"auxiliary {distributed}"] = all(map(math.isfinite, built.train(0, make_batch()).values()))
    return results


def test_bf16_has_fp32_masters_and_experts_lie_side_by_side(tmp_path: Path) -> None:
    moe = make_checkpoint(tmp_path / "moe", "qwen3_moe")
    results = run_ranks(1, precisions, make_checkpoint(tmp_path / "dense", "qwen3"), moe, context=processes())[0]
    assert results == dict.fromkeys(results, True)
