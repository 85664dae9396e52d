"""vLLM finds vime by itself, however often it loads its plug-ins."""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys
import types
from typing import Any

import pytest

from vime.backends.vllm_utils import plugin
from vime.backends.vllm_utils.weight_guard import MIDDLEWARE


def test_the_entry_point_names_register() -> None:
    (entry,) = [e for e in importlib.metadata.entry_points(group="vllm.general_plugins") if e.name == "vime"]
    assert entry.load() is plugin.register


def test_registering_twice_is_harmless_and_creates_our_engine() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    plugin.register()
    plugin.register()
    engine = WeightTransferEngineFactory._registry[plugin.BACKEND]()
    from vime.backends.vllm_utils.weight_transfer import VimeWeightTransferEngine

    assert engine is VimeWeightTransferEngine
    assert not engine.__abstractmethods__


def test_the_names_on_the_command_line_are_importable_classes() -> None:
    for name in (plugin.WORKER_EXTENSION, MIDDLEWARE):
        module, attribute = name.rsplit(".", 1)
        assert isinstance(getattr(importlib.import_module(module), attribute), type)


def test_the_extension_does_not_clash_with_vllms_worker() -> None:
    from vllm.v1.worker.gpu_worker import Worker

    ours = {name for name in dir(plugin.WorkerExtension) if not name.startswith("__")}
    assert not ours & set(dir(Worker))
    assert all(name.startswith("vime_") for name in ours)


@pytest.mark.parametrize("moved", [None, [], [3, 4]])
def test_links_are_woken_once_an_update_by_plan_has_started(
    monkeypatch: pytest.MonkeyPatch, moved: list[int] | None
) -> None:
    done: list[Any] = []
    session = types.SimpleNamespace(attempt=lambda *step: done.append(step), failure=None, number=0)

    class Worker(plugin.WorkerExtension):
        weight_transfer_engine = types.SimpleNamespace(session=session)
        start_weight_update = staticmethod(lambda: done.append("start"))

    monkeypatch.setattr(plugin, "_abort", lambda worker, leave: done.append("abort"))
    assert Worker().vime_start_weight_update("token", moved) == {"token": "token", "failure": None}
    assert done == ["abort", "start"] + ([] if moved is None else [("make_ready", moved)])


def test_plugin_and_guard_import_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, vime.backends.vllm_utils.plugin, vime.backends.vllm_utils.weight_guard\n"
        "sys.exit(bool({'torch', 'vllm'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
