"""The contract with vLLM: every private name that adapter.py reaches into, and what it takes for granted about it."""

from __future__ import annotations

import importlib.metadata
import inspect

import pytest

from vime.backends.vllm_utils import adapter
from vime.backends.vllm_utils.protocol import WORKER_DIED
from vime.errors import EngineError


def test_other_releases_are_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    assert adapter.check_version() == "0.32.0"
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.33.1")
    with pytest.raises(EngineError, match=r"vLLM 0\.33\.1: .* use 0\.32\.0 \(cpu\), 0\.26\.0 \(cuda\)"):
        adapter.check_version()


def test_layerwise_reload_has_the_steps_that_we_take_apart() -> None:
    from vllm.model_executor.model_loader.reload import layerwise, meta, types, utils

    for function, parameters in (
        (layerwise.initialize_layerwise_reload, ["model"]),
        (layerwise.get_layerwise_info, ["layer"]),
        (layerwise._get_weight_loader, ["tensor"]),
        (layerwise._get_original_loader, ["tensor"]),
        (layerwise._place_kernel_tensors, ["layer", "info"]),
        (layerwise._copy_and_restore_kernel_tensors, ["layer", "info"]),
        (meta.restore_layer_on_meta, ["layer", "info"]),
        (meta.materialize_layer, ["layer", "info"]),
        (utils.get_layer_tensors, ["layer"]),
        (utils.get_layer_params_buffers, ["layer"]),
    ):
        assert list(inspect.signature(function).parameters) == parameters, function.__name__
    assert "bias" in meta.SKIP_TENSORS  # never parked: written in place
    assert {"can_load", "reset"} <= set(dir(types.LayerReloadingInfo))
    fields = set(types.LayerReloadingInfo.__dataclass_fields__)
    assert {"kernel_tensors", "kernel_non_persistent_buffers", "load_numel_total"} <= fields
    assert hasattr(layerwise, "LOADING_LAYERS")
    assert "online_process_loader" in inspect.getsource(layerwise.make_online_process_loader)


def test_the_steps_of_processing_a_layer_are_those_we_repeat() -> None:
    """StagedModule.close follows _layerwise_process; a step added there must be added here."""
    from vllm.model_executor.model_loader.reload import layerwise

    source = inspect.getsource(layerwise._layerwise_process)
    body = source.split('"""')[2]
    for step in (
        "materialize_layer(layer, info)",
        '"_already_called_process_weights_after_loading"',
        "_get_original_loader(param)",
        "quant_method.process_weights_after_loading(layer)",
        "layer.update_param_tp_status()",
        "_copy_and_restore_kernel_tensors(layer, info)",
        "info.reset()",
    ):
        assert step in body, step
    assert len([line for line in body.splitlines() if line.strip() and "#" not in line]) < 50


def test_on_a_cpu_vllm_still_needs_the_two_repairs() -> None:
    """When one of these fails, vLLM has repaired it: see whether ours can go."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    from vllm.model_executor.model_loader.reload import layerwise

    setup = inspect.getsource(UnquantizedFusedMoEMethod._setup_kernel)
    assert "if not is_weight_update:" in setup.split("fused_experts.process_weights_after_loading")[0]
    packing = inspect.getsource(UnquantizedEmbeddingMethod.process_weights_after_loading)
    assert "dispatch_cpu_unquantized_gemm(layer, remove_weight=False)" in packing
    assert "lm_head" not in inspect.getsource(layerwise)


def test_packed_layers_answer_through_cpu_linear() -> None:
    from vllm.model_executor.layers import utils

    source = inspect.getsource(utils.dispatch_cpu_unquantized_gemm)
    assert "layer.cpu_linear = lambda x, weight, bias" in source
    assert "return layer.cpu_linear(x, weight, bias)" in inspect.getsource(utils.cpu_unquantized_gemm)


def test_a_worker_keeps_its_open_update_where_we_clear_it() -> None:
    from vllm.v1.worker.gpu_worker import Worker

    source = inspect.getsource(Worker)
    assert "if self._weight_update_active:" in source
    assert "self._weight_update_active = True" in source

    class Stuck:
        _weight_update_active = True

    stuck = Stuck()
    adapter.clear_active_update(stuck)
    assert stuck._weight_update_active is False


def test_a_worker_knows_its_number() -> None:
    from vllm.config import ParallelConfig

    fields = ParallelConfig.__dataclass_fields__
    assert {"rank", "data_parallel_index", "world_size"} <= fields.keys()


def test_vllm_says_of_a_dead_worker_what_we_look_for() -> None:
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    assert f'"{WORKER_DIED}"' in inspect.getsource(MultiprocExecutor.collective_rpc)
