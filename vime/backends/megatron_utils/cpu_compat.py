"""Megatron-Core on CPU tensors and gloo, unedited: the CUDA entry points it uses, answered by the CPU.

Two pieces, both no-ops where CUDA is available:

* :func:`install` replaces a closed list of ``torch.cuda`` functions. It must run before ``megatron.core`` is imported,
  which binds some of them at import time, and it is process-wide: a trainer rank has its own process.
* :func:`cpu_for_cuda` is a TorchFunctionMode for what names CUDA in other ways: ``device="cuda"`` in factory calls,
  ``Tensor.cuda()`` and Megatron's comparison of ``Tensor.type()`` with ``"torch.cuda.FloatTensor"``. Modes belong to a
  thread, so every public method of the trainer enters it. In backward it is off: torch hands ``autograd.backward`` to
  the mode as one call, and a mode is off while it handles a call. Megatron names CUDA in none of these ways in its
  backward functions, hooks and recomputed layers; where it did, torch without CUDA would raise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_TYPE_NAMES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.float16: "torch.cuda.HalfTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
}


def needed() -> bool:
    """True where there is no CUDA device, as seen before :func:`install` changed anything."""
    return not torch.cuda.is_available()


def _is_cuda(device: object) -> bool:
    if isinstance(device, str):
        return device.split(":")[0] == "cuda"
    return isinstance(device, torch.device) and device.type == "cuda"


class CpuForCuda(TorchFunctionMode):
    """Inside it, CUDA devices asked for by name are the CPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return _TYPE_NAMES.get(args[0].dtype) or func(*args)
        if func is torch.Tensor.record_stream:
            return None
        if kwargs:
            changed = dict(kwargs)
            if _is_cuda(changed.get("device")):
                changed["device"] = _CPU
            if changed.get("pin_memory"):
                changed["pin_memory"] = False
            return func(*args, **changed)
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        return func(*args)


def cpu_for_cuda() -> contextlib.AbstractContextManager[Any]:
    """The mode to enter around any call into Megatron; does nothing where CUDA is available."""
    return CpuForCuda() if needed() else contextlib.nullcontext()


class _Stream:
    """There is one order of execution on a CPU, so nothing ever has to be waited for."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def record_event(self, event: object = None) -> _Event:
        return _Event()

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class _Event:
    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def record(self, stream: object = None) -> None: ...

    def wait(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


_installed = False


def install() -> bool:
    """Replace the ``torch.cuda`` functions that Megatron calls; True if it did so now or earlier.

    The whole list is here. Each replacement is a function object of its own: torch._dynamo's rule table refuses one
    object under two names.
    """
    global _installed
    if _installed or not needed():
        return _installed
    _installed = True
    stream = _Stream()

    def constant(value: object) -> Callable[..., Any]:
        return lambda *args, **kwargs: value

    constants: dict[str, object] = {
        "current_device": _CPU,
        "device_count": 1,
        "set_device": None,
        "synchronize": None,
        "empty_cache": None,
        "_lazy_init": None,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "reset_peak_memory_stats": None,
        "current_stream": stream,
        "default_stream": stream,
    }
    generator = torch.default_generator
    replacements: dict[str, object] = {name: constant(value) for name, value in constants.items()}
    replacements |= {
        "Stream": _Stream,
        "Event": _Event,
        "stream": lambda stream: contextlib.nullcontext(),
        "manual_seed": lambda seed: generator.manual_seed(int(seed)),
        "get_rng_state": lambda device=None: generator.get_state(),
        "set_rng_state": lambda state, device=None: generator.set_state(state),
        "default_generators": {_CPU: generator},
        "_lazy_call": lambda callback, **kwargs: callback(),
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
    torch.cuda.random.get_rng_state = lambda device="cuda": generator.get_state()
    return True
