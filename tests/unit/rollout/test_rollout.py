"""Whole rollouts over HTTP: the same answers whatever fails, however they arrive, wherever the run was interrupted."""

from __future__ import annotations

import json
import logging
import sys
import threading
import types

import pytest

from tests.tiny import make_checkpoint
from tests.unit.rollout.faulty_engine import FaultyEngine, number
from vime.config import CheckpointOptions, Config, DataOptions, EvalOptions, RewardOptions, RolloutOptions, TrainOptions
from vime.errors import ConfigError, EngineError, VimeError
from vime.rollout.rollout import Rollout
from vime.rollout.seeds import request_seed
from vime.types import EngineAddress, Status


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("hf"), "qwen3")


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint)


@pytest.fixture
def speak(tokenizer):
    def speak(seed: int, prompt: list[int]) -> list[int]:
        return [*tokenizer.encode(rf"I say \boxed{{{number(seed, 3)}}}"), tokenizer.eos_token_id]

    return speak


class Served:
    """Engines with a way to replace them; what a run's cluster is to the rollout."""

    def __init__(self, *engines: FaultyEngine) -> None:
        self.engines = list(engines)
        self.recovered: list[int] = []
        self.before_recovery = lambda: None

    def ready(self) -> list[EngineAddress]:
        return [engine.address for engine in self.engines]

    def recover(self, index: int) -> EngineAddress:
        old = self.engines[index]
        if not old.killed:
            return old.address
        self.recovered.append(index)
        self.before_recovery()
        self.engines[index] = FaultyEngine(old.speak, index)
        return self.engines[index].address


@pytest.fixture
def serve(speak):
    started: list[Served] = []

    def serve(count: int = 1, **options) -> Served:
        served = Served(*(FaultyEngine(options.get("speak", speak), index, **delay(options)) for index in range(count)))
        started.append(served)
        return served

    def delay(options):
        return {"delay": options["delay"]} if "delay" in options else {}

    yield serve
    for served in started:
        for engine in served.engines:
            engine.stop()


@pytest.fixture
def make(checkpoint, tokenizer, tmp_path):
    def make(engines: Served | None, **over) -> Rollout:
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps({"input": f"question {i}", "label": str(i % 3)}) + "\n" for i in range(6)))
        reward = {"rm_type": "math", **{k: over.pop(k) for k in list(over) if k in RewardOptions.__dataclass_fields__}}
        data = {k: over.pop(k) for k in list(over) if k in DataOptions.__dataclass_fields__}
        evaluation = {k: over.pop(k) for k in list(over) if k in EvalOptions.__dataclass_fields__}
        loss_type = over.pop("loss_type", "policy_loss")
        sizes = {"rollout_batch_size": 4, "n_samples_per_prompt": 3, "rollout_max_response_len": 32}
        config = Config(
            checkpoint=CheckpointOptions(hf_checkpoint=checkpoint),
            rollout=RolloutOptions(**{**sizes, **over}),
            data=DataOptions(**{"prompt_data": str(path), "label_key": "label", "rollout_shuffle": True, **data}),
            reward=RewardOptions(**reward),
            eval=EvalOptions(**evaluation),
            train=TrainOptions(loss_type=loss_type),
        )
        return Rollout(config, tokenizer, engines)

    return make


@pytest.fixture
def functions(monkeypatch):
    module = types.ModuleType("my_rollout")
    monkeypatch.setitem(sys.modules, "my_rollout", module)
    return module


def test_a_rollout(make, serve, tokenizer):
    engines = serve()
    rollout = make(engines)
    samples = rollout.generate(0) + rollout.generate(1)
    assert [sample.index for sample in samples] == list(range(24))
    assert [sample.group_index for sample in samples] == [i // 3 for i in range(24)]
    for sample in samples:
        said = number(request_seed(42, "train", sample.index), 3)
        assert sample.response == rf"I say \boxed{{{said}}}"
        assert sample.response_tokens[-1] == tokenizer.eos_token_id
        assert sample.prompt_tokens == tokenizer.encode(sample.prompt)
        assert sample.reward == (str(said) == sample.label)
        assert sample.log_probs == [-1 / (1 + i) for i in range(len(sample.response_tokens))]
        assert sample.loss_mask == [1] * len(sample.response_tokens)
        assert (sample.status, sample.weight_versions) == (Status.COMPLETED, [3])
    assert len(engines.engines[0].requests) == 24  # one request per answer
    numbers = rollout.metrics(samples)
    assert numbers["rollout/reward_mean"] == sum(sample.reward for sample in samples) / 24
    assert len(rollout.to_train_batch(samples).tokens) == 24


def test_arrival_and_number_of_engines_change_nothing(make, serve):
    plain = make(serve()).generate(0)
    shuffled = make(serve(3, delay=lambda seed: 0.02 * number(seed, 7)), server_concurrency=2).generate(0)
    assert shuffled == plain


def test_a_continued_run_makes_the_same_answers(make, serve):
    engines = serve()
    whole = make(engines)
    expected = [whole.generate(rollout_id) for rollout_id in range(3)]
    first = make(engines)
    assert first.generate(0) == expected[0]
    second = make(engines)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [second.generate(1), second.generate(2)] == expected[1:]


@pytest.mark.parametrize("fault", ["503", "truncated", "close", "abort", "hang"])
def test_what_fails_is_asked_for_again_and_nothing_changes(make, serve, fault):
    plain = make(serve()).generate(0)
    engines = serve()
    engines.engines[0].faults = [fault] * 3
    # Every answer but a hanging one comes at once; 5 s is far from both.
    assert make(engines, request_timeout=5 if fault == "hang" else 600).generate(0) == plain
    assert len(engines.engines[0].requests) == 15
    ids = [request["request_id"] for request in engines.engines[0].requests]
    assert len(set(ids)) == len(ids)


def test_giving_up_says_what_failed(make, serve):
    engines = serve()
    engines.engines[0].faults = ["503"] * 100
    with pytest.raises(EngineError, match=r"failed 2 times \(--request-retries 1\): engine 0 .*503: made to say 503"):
        make(engines, request_retries=1).generate(0)


def test_a_refused_request_is_not_repeated(make, serve):
    engines = serve()
    engines.engines[0].faults = ["400"]
    with pytest.raises(EngineError, match="answered 400: made to say 400"):
        make(engines, rollout_batch_size=1, n_samples_per_prompt=1).generate(0)
    assert len(engines.engines[0].requests) == 1


def test_a_dead_engine_is_replaced_while_the_others_serve(make, serve):
    plain = make(serve()).generate(0)
    engines = serve(2)
    doomed, other = engines.engines
    doomed.hold = threading.Event()  # it never answers
    other.hold = threading.Event()

    def during() -> None:
        other.answered.clear()
        assert other.hold is not None
        other.hold.set()
        assert other.answered.wait(30)  # served while the recovery was under way

    engines.before_recovery = during
    killer = threading.Thread(target=lambda: (wait_until(lambda: doomed.active > 0 < other.active), doomed.stop()))
    killer.start()
    assert make(engines).generate(0) == plain
    killer.join()
    assert engines.recovered == [0]


def test_an_engine_that_was_replaced_before_it_was_missed_is_found(make, serve):
    """It died with another one, and seeing to that has brought both back, before anybody asked for this one."""
    plain = make(serve(2)).generate(0)
    engines = serve(2)

    class Replaced(Served):
        asked = 0

        def ready(self) -> list[EngineAddress]:
            self.asked += 1
            return [engine.address for engine in (old if self.asked == 1 else self.engines)]

    old = engines.engines
    for engine in old:
        engine.stop()
    engines.__class__ = Replaced
    engines.engines = [FaultyEngine(engine.speak, index) for index, engine in enumerate(old)]
    assert make(engines).generate(0) == plain
    assert engines.recovered == []


def wait_until(true, seconds: float = 30) -> None:
    done = threading.Event()
    for _ in range(int(seconds / 0.01)):
        if true():
            return
        done.wait(0.01)
    raise AssertionError("did not become true")


def test_the_only_engine_dies_and_all_wait_for_the_new_one(make, serve):
    plain = make(serve()).generate(0)
    engines = serve()
    engines.engines[0].stop()
    assert make(engines, request_retries=0).generate(0) == plain
    assert engines.recovered == [0]


def test_an_engine_that_cannot_be_replaced_ends_the_rollout(make, serve):
    engines = serve(2)
    engines.engines[0].stop()

    def used_up() -> None:
        raise EngineError("engine 0 died and --engine-restarts 0 have been used up")

    engines.before_recovery = used_up
    engines.engines[1].hold = threading.Event()  # so that the rollout cannot end before
    with pytest.raises(EngineError, match="engine 0 died and --engine-restarts 0"):
        make(engines).generate(0)


def test_the_rollouts_deadline_says_how_far_it_got_and_frees_the_engine(make, serve):
    engines = serve()
    engine = engines.engines[0]
    engine.faults = ["hang"] * 2
    with pytest.raises(VimeError, match=r"rollout 7: 10 of 12 answers within --rollout-timeout 3 s; .*127.0.0.1"):
        make(engines, rollout_timeout=3).generate(7)
    wait_until(lambda: engine.disconnected == 2)  # vLLM aborts a request whose connection is closed


def test_the_wait_for_an_engine_that_is_being_replaced_has_the_rollouts_deadline(make, serve):
    """It died in the round before, whose answers came from others: nobody waits for its replacement until now."""
    engines, replaced = serve(), threading.Event()
    ready = engines.ready
    engines.ready = lambda: (replaced.wait(60), ready())[1]
    try:
        with pytest.raises(VimeError, match=r"not ready within --rollout-timeout 0.2 s: .* being replaced"):
            make(engines, rollout_timeout=0.2).generate(0)
    finally:
        replaced.set()


def test_concurrency_is_bounded(make, serve):
    engines = serve(2, delay=lambda seed: 0.02)
    make(engines, server_concurrency=2).generate(0)
    assert [engine.most_active for engine in engines.engines] == [2, 2]


def test_requests_use_connections_again(make, serve):
    """To open one for each takes more of the controller's time than all else about a short answer."""
    engines = serve(1)
    make(engines, server_concurrency=2).generate(0)
    connections = engines.engines[0].connections
    assert len(connections) == 12
    assert len(set(map(id, connections))) == 2


def test_context_limits_the_answer(make, serve, tokenizer):
    engines = serve()
    length = len(tokenizer.encode("question 0"))
    samples = make(engines, rollout_max_context_len=length + 4).generate(0)
    assert {len(sample.response_tokens) for sample in samples} == {4}
    assert {sample.status for sample in samples} == {Status.TRUNCATED}


def test_filtered_rollouts_are_reproducible(make, serve, functions):
    functions.two = lambda config, group: sum(sample.reward for sample in group) in (1, 2)
    path = {"dynamic_sampling_filter_path": "my_rollout.two", "over_sampling_batch_size": 6}
    whole = make(serve(), **path)
    expected = [whole.generate(0), whole.generate(1)]
    for samples in expected:
        assert len(samples) == 12
        groups = [samples[i : i + 3] for i in range(0, 12, 3)]
        assert all(0 < sum(sample.reward for sample in group) < 3 for group in groups)
        assert [group[0].group_index for group in groups] == sorted(group[0].group_index for group in groups)
    assert [sample.index for sample in expected[1]] == list(range(12, 24))
    other = make(serve(2, delay=lambda seed: 0.01 * number(seed, 9)), **path)
    first = other.generate(0)
    assert first == expected[0]
    assert other.state_dict()["prompts"]["drawn"] == first[-1].group_index + 1
    assert other.metrics(first)["rollout/rejected_groups"] == first[-1].group_index + 1 - 4
    assert other.generate(1) == expected[1]


def test_a_filter_that_keeps_nothing_ends_at_the_deadline(make, serve, functions):
    functions.none = lambda config, group: False
    with pytest.raises(VimeError, match="--rollout-timeout 1 s"):
        make(serve(), dynamic_sampling_filter_path="my_rollout.none", rollout_timeout=1).generate(0)


def test_custom_generate_function(make, serve, functions, tokenizer):
    async def two_turns(config, sample, client):
        first = await client.generate(sample.prompt_tokens, max_tokens=30)
        result = client.tokenizer.encode(" tool says 5 ")
        second = await client.generate(sample.prompt_tokens + first.token_ids + result)
        sample.response_tokens = first.token_ids + result + second.token_ids
        sample.log_probs = first.log_probs + [0.0] * len(result) + second.log_probs
        sample.loss_mask = [1] * len(first.token_ids) + [0] * len(result) + [1] * len(second.token_ids)
        return sample

    functions.two_turns = two_turns
    engines = serve()
    samples = make(engines, custom_generate_function_path="my_rollout.two_turns").generate(0)
    seeds = {request["sampling_params"]["seed"] for request in engines.engines[0].requests}
    assert len(seeds) == 24  # every turn has its own
    assert all(0 in sample.loss_mask and sample.reward is not None for sample in samples)
    last = number(request_seed(42, "train", 5, 1), 3)
    assert samples[5].response.endswith(rf"tool says 5 I say \boxed{{{last}}}")


def test_custom_generate_functions_loop_does_not_get_what_the_rounds_engines_need(make, serve, functions):
    """It has a loop of its own; an engine's replacement, which outlasts the answers here, ends with the round's."""

    async def one_turn(config, sample, client):
        first = await client.generate(sample.prompt_tokens)
        sample.response_tokens, sample.log_probs = first.token_ids, first.log_probs
        return sample

    functions.one_turn = one_turn
    plain = [sample.response_tokens for sample in make(serve(2)).generate(0)]
    engines, begun, go_on = serve(2), threading.Event(), threading.Event()
    engines.engines[0].stop()

    def outlast() -> None:
        begun.set()
        assert go_on.wait(60)

    engines.before_recovery = outlast
    samples = make(engines, custom_generate_function_path="my_rollout.one_turn").generate(0)
    assert [sample.response_tokens for sample in samples] == plain
    assert begun.is_set()
    go_on.set()


def test_custom_generate_function_that_does_not_fit_together(make, serve, functions):
    async def short(config, sample, client):
        sample.response_tokens, sample.log_probs = [1, 2], [-1.0]
        return sample

    async def nothing(config, sample, client):
        return None

    functions.short, functions.nothing = short, nothing
    for name, message in [("short", "2 response tokens, 1 log-probs and 2 mask entries"), ("nothing", "NoneType")]:
        with pytest.raises(VimeError, match=message):
            make(serve(), custom_generate_function_path=f"my_rollout.{name}").generate(0)


def test_group_rewards(make, serve, functions):
    functions.rank = lambda config, group: list(range(len(group)))
    samples = make(serve(), custom_rm_path="my_rollout.rank", group_rm=True).generate(0)
    assert [sample.reward for sample in samples] == [0, 1, 2] * 4


def test_evaluation(make, serve, tmp_path):
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps({"input": f"e{i}", "label": 1}) + "\n" for i in range(5)))
    engines = serve()
    rollout = make(
        engines,
        eval_prompt_data=["hard", str(tmp_path / "eval.jsonl"), "few", str(tmp_path / "eval.jsonl") + "@[1:3]"],
        n_samples_per_eval_prompt=2,
        eval_temperature=0.25,
        eval_max_response_len=20,
    )
    numbers = rollout.evaluate(0)
    assert set(numbers) == {
        f"eval/{name}/{key}"
        for name in ("hard", "few")
        for key in ("reward_mean", "response_length_mean", "truncated_fraction")
    }
    hard = rollout.eval_samples["hard"]
    assert (len(hard), len(rollout.eval_samples["few"])) == (10, 4)
    assert numbers["eval/hard/reward_mean"] == sum(sample.reward for sample in hard) / 10
    params = engines.engines[0].requests[0]["sampling_params"]
    assert (params["temperature"], params["max_tokens"]) == (0.25, 20)
    drawn = rollout.state_dict()
    assert rollout.evaluate(9) == numbers  # same seeds at every evaluation
    assert rollout.state_dict() == drawn


def test_evaluation_needs_pairs(make, serve):
    with pytest.raises(ConfigError, match="NAME PATH pairs"):
        make(serve(), eval_prompt_data=["hard"])


def test_a_rollout_that_teaches_nothing_is_said_once(make, serve, caplog, tokenizer):
    rollout = make(serve(speak=lambda seed, prompt: tokenizer.encode("who knows")), rm_type="deepscaler")
    with caplog.at_level(logging.WARNING):
        for rollout_id in range(3):
            rollout.generate(rollout_id)
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2
    assert "rollout 0: none of 12 answers contains what reward 'deepscaler' looks for, </think>" in texts[0]
    assert "who knows" in texts[0]
    assert "rollout 0: all 12 rewards are 0" in texts[1]


def test_no_warning_where_there_is_something_to_learn(make, serve, caplog):
    with caplog.at_level(logging.WARNING):
        make(serve()).generate(0)
    assert not caplog.records


def test_supervised_batches(make, tokenizer):
    sizes = {"loss_type": "sft_loss", "n_samples_per_prompt": 1, "rollout_shuffle": False}
    rollout = make(None, **sizes)
    batches = [rollout.sft_batch(rollout_id) for rollout_id in range(3)]
    for batch, rows in zip(batches, ([0, 1, 2, 3], [4, 5, 0, 1], [2, 3, 4, 5]), strict=True):
        answers = [tokens[-n:] for tokens, n in zip(batch.tokens, batch.response_lengths, strict=True)]
        assert [tokenizer.decode(answer) for answer in answers] == [f"{row % 3}<|im_end|>" for row in rows]
        assert batch.rollout_log_probs is None
        assert [sum(mask) for mask in batch.loss_masks] == batch.response_lengths
    assert batches[1].group_ids == [4, 5, 6, 7]
    later = make(None, **sizes)
    later.load_state_dict({"prompts": {**rollout.state_dict()["prompts"], "drawn": 4}})
    assert later.sft_batch(1) == batches[1]
    with pytest.raises(ConfigError, match="--n-samples-per-prompt 2 must be 1"):
        make(None, loss_type="sft_loss", n_samples_per_prompt=2)
    with pytest.raises(VimeError, match="no engines"):
        rollout.generate(0)
