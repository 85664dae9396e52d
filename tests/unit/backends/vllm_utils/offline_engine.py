"""vLLM in this process (and its workers), synced from here: ``python -m ... FAMILY TIED TP FOLDER`` prints JSON.

Run by test_weight_transfer.py in a process of its own: vLLM configures a process for good.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

if __name__ == "__main__":  # workers are spawned, and import this module again with what they inherit
    os.environ |= {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_HOST_IP": "127.0.0.1",
    }
    if sys.argv[3] == "1":
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

PROMPTS = [[1, 50, 60, 70, 80, 90], [5, 6, 7, 8], [400, 300, 200, 100, 9, 8, 7, 6]]
TOKENS = 20


def main(family: str, tied: bool, tp: int, folder: str) -> dict[str, Any]:
    from safetensors.torch import load_file
    from vllm import LLM, SamplingParams

    from tests.tiny import make_checkpoint
    from tests.unit.weight_sync.toy import in_arena, whole_map
    from vime.backends.vllm_utils.plugin import BACKEND, WORKER_EXTENSION
    from vime.weight_sync.arena import Stamp, arena_of
    from vime.weight_sync.arrivals import checksums

    # 500 tokens: vLLM pads the vocabulary to 512. Two heads of 32: vLLM's CPU attention has no heads of 16.
    over: dict[str, Any] = {"vocab_size": 500}
    if family == "qwen2":
        over |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    a, b = (make_checkpoint(f"{folder}/{seed}", family, tied=tied, seed=seed, **over) for seed in (0, 1))
    llm = LLM(
        a,
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        kv_cache_memory_bytes=32 << 20,
        tensor_parallel_size=tp,
        weight_transfer_config={"backend": BACKEND},  # pyright: ignore[reportArgumentType]
        worker_extension_cls=WORKER_EXTENSION,
    )

    def weights(checkpoint: str) -> dict[str, Any]:
        return load_file(f"{checkpoint}/model.safetensors")

    def answers() -> list[list[int]]:
        llm.reset_prefix_cache()
        sampling = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
        prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        return [list(found.outputs[0].token_ids) for found in llm.generate(prompts, sampling, use_tqdm=False)]

    def digests() -> list[dict[str, str]]:
        return [answer["digests"] for answer in llm.collective_rpc("vime_weight_digests", args=("",))]

    def update(version: int, **message: Any) -> float:
        started = time.perf_counter()
        llm.collective_rpc("start_weight_update")
        llm.collective_rpc("update_weights", args=({"version": version, **message},))
        llm.collective_rpc("finish_weight_update")
        return time.perf_counter() - started

    stamp, named = Stamp(), in_arena(weights(b))
    shards = whole_map(named, stamp)
    info = {
        "connection": "c",
        "engine": 0,
        "neighbours": [],
        "devices": ["cpu-0"] * tp,
        "check": "full",
    }
    out: dict[str, Any] = {"accepted without": [], "other failures": []}
    for left_out in named:
        part = whole_map({name: tensor for name, tensor in named.items() if name != left_out}, stamp)
        llm.collective_rpc("init_weight_transfer_engine", args=({**info, "shards": part.to_json()},))
        failures = [state["failure"] for state in llm.collective_rpc("vime_weight_state", args=("",))]
        if None in failures:
            out["accepted without"].append(left_out)
        elif not all("elements of its parameter" in failure["cause"] for failure in failures):
            out["other failures"] += failures
    llm.collective_rpc("init_weight_transfer_engine", args=({**info, "shards": shards.to_json()},))
    out["state"] = llm.collective_rpc("vime_weight_state", args=("",))
    out["greedy a"] = answers() == by_transformers(a)
    loaded_a = digests()

    stamp.set(1)
    llm.collective_rpc("vime_poison_weights", args=("",))
    out["seconds"] = update(1)
    out["greedy b by plan"] = answers() == by_transformers(b)
    planned_b = digests()
    out["changed"] = len([name for name in planned_b[0] if planned_b[0][name] != loaded_a[0][name]])

    flat = in_arena(weights(b))
    buffer = arena_of(next(iter(flat.values())))[0]
    listed = [[name, "float32", list(t.shape), arena_of(t)[1]] for name, t in flat.items()]
    llm.collective_rpc("vime_poison_weights", args=("",))
    sums = dict(zip(flat, checksums(list(flat.values())), strict=True))
    update(2, bucket={"handles": {"cpu-0": buffer.describe()}, "tensors": listed, "sums": sums, "last": True})
    out["greedy b by buckets"] = answers() == by_transformers(b)
    out["planned equals bucketed"] = planned_b == digests()

    # Updates that fail: a tensor has changed in a bucket, and one has not come. One that nobody finishes: then a whole
    # one.
    mixed = sums | {"model.norm.weight": "7"}
    update(3, bucket={"handles": {"cpu-0": buffer.describe()}, "tensors": listed, "sums": mixed, "last": True})
    out["changed failures"] = [state["failure"] for state in llm.collective_rpc("vime_weight_state", args=("",))]
    update(3, bucket={"handles": {"cpu-0": buffer.describe()}, "tensors": listed[1:], "sums": sums, "last": True})
    out["failures"] = [state["failure"] for state in llm.collective_rpc("vime_weight_state", args=("",))]
    answer = llm.collective_rpc("vime_weight_state", args=("now",))
    out["in step"] = all(state["token"] == "now" for state in answer)
    llm.collective_rpc("vime_abort_weight_update", args=("",))
    llm.collective_rpc("start_weight_update")
    half = {"handles": {"cpu-0": buffer.describe()}, "tensors": listed[:4], "sums": sums, "last": False}
    llm.collective_rpc("update_weights", args=({"version": 3, "bucket": half},))
    llm.collective_rpc("vime_abort_weight_update", args=("",))
    for name, tensor in weights(a).items():
        named[name].copy_(tensor)
    stamp.set(4)
    llm.collective_rpc("vime_poison_weights", args=("",))
    update(4)
    out["greedy a again"] = answers() == by_transformers(a)
    out["as vLLM loaded it"] = digests() == loaded_a
    out["versions"] = [state["version"] for state in llm.collective_rpc("vime_weight_state", args=("",))]
    llm.collective_rpc("vime_disconnect", args=("",))
    out["left"] = [state["connection"] for state in llm.collective_rpc("vime_weight_state", args=("",))]
    out["greedy a alone"] = answers() == by_transformers(a)
    return out


def by_transformers(checkpoint: str) -> list[list[int]]:
    """Greedy answers of the reference implementation."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        answer = model.generate(ids, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
        found.append(answer[0, len(prompt) :].tolist())
    return found


if __name__ == "__main__":
    print("RESULT " + json.dumps(main(sys.argv[1], sys.argv[2] == "tied", int(sys.argv[3]), sys.argv[4])))
