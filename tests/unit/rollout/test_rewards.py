"""Rewards: where the answer stands, when it is right, and what happens when nobody can say."""

from __future__ import annotations

import asyncio
import base64
import functools
import os
import queue
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
from aiohttp import web

from vime.config import CheckpointOptions, Config, DataOptions, RewardOptions, RolloutOptions
from vime.errors import ConfigError, DataError, VimeError
from vime.rollout import threads
from vime.rollout.rewards import Rewarder, mathematics, remote
from vime.rollout.rewards.extract import answer_line, boxed
from vime.rollout.rewards.f1 import f1
from vime.rollout.rewards.mathematics import MathGrader, plain, quick_equal
from vime.types import Sample


def config(label_key: str | None = "label", **reward) -> Config:
    return Config(
        checkpoint=CheckpointOptions(hf_checkpoint="none"),
        rollout=RolloutOptions(rollout_batch_size=1),
        data=DataOptions(label_key=label_key),
        reward=RewardOptions(**reward),
    )


def sample(response: str, label: object = "4", index: int = 0, **metadata) -> Sample:
    return Sample(index, 0, "prompt", [1], label=label, response=response, metadata=metadata)


async def scored(rewarder: Rewarder, *samples: Sample):
    async with rewarder:
        await asyncio.gather(*(rewarder.score(one) for one in samples))
    return [one.reward for one in samples]


def score(options: Config, *samples: Sample):
    rewarder = Rewarder(options)
    try:
        return asyncio.run(scored(rewarder, *samples))
    finally:
        rewarder.close()


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"so \boxed{4}.", "4"),
        (r"\boxed{1} no, \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed {7}", "7"),
        (r"\fbox{7}", "7"),
        (r"$\boxed 7$", "7"),
        (r"\boxed{cut off", None),
        ("7", None),
        (r"\boxed", None),
    ],
)
def test_boxed(text, inside):
    assert boxed(text) == inside


def test_answer_line():
    assert answer_line("Answer: 3\nthen **Answer:** 4**\nbye") == "4"
    assert answer_line("the answer is 4") is None


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        (r"<think>hm</think> \boxed{4}", 1),
        (r"</think> The answer is \boxed{4.0}", 1),
        ("</think>\nAnswer: 4", 1),
        (r"###Response \boxed{4}", 1),
        (r"\boxed{4}</think> \boxed{5}", 0),
        (r"\boxed{4}", 0),  # never stopped thinking
        (r"<think> \boxed{4}</think> four", 0),
        ("</think> 4", 0),
    ],
)
def test_deepscaler(response, reward):
    assert score(config(rm_type="deepscaler"), sample(response)) == [reward]


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("Answer: 4", 1),
        (r"Answer: \boxed{4}", 1),
        (r"Answer: $4$", 1),
        (r"so \boxed{4}", 1),
        ("Answer: 5", -1),
        ("nothing", -1),
        ("Answer: 4" + " " * 300, -1),
    ],
)
def test_dapo(response, reward):
    assert score(config(rm_type="dapo"), sample(response)) == [reward]


def test_math_reports_what_it_compared():
    one, two = sample(r"\boxed{\frac{8}{2}}"), sample("4")
    assert score(config(rm_type="math"), one, two) == [1, 0]
    assert one.reward_info == {"answer": r"\frac{8}{2}", "correct": True}
    assert two.reward_info == {"answer": None, "correct": False}


EQUAL = [
    ("0.5", r"\frac{1}{2}"),
    (r"\frac12", "1/2"),
    ("1000", "1,000"),
    ("1e3", "1e3"),
    (r"\boxed{12}", "12"),
    (r"2\sqrt{3}", r"\sqrt{12}"),
    ("(x+1)^2", "x^2+2x+1"),
    ("Evelyn", r"\text{evelyn}"),
    (4, "4"),
    (0.25, "1/4"),
    (["3", "4"], "4"),
    ("$5$", "5."),
    ("5", "x=5"),
]
UNEQUAL = [
    ("3", "4"),
    ("-3", "3"),
    ("listen", "silent"),  # products of letters to sympy
    ("(1,2)", "(2,1)"),
    ("", "1"),
    ("1", ""),
    (r"\pi", "3.14"),
    (["3", "4"], "5"),
    ("1", "}{"),
    ("1", "\\frac{1}{0}"),
]


@pytest.fixture(scope="module")
def grader():
    grader = MathGrader(seconds=20, workers=1)
    yield grader
    grader.close()


@pytest.mark.parametrize(("label", "answer", "right"), [(*p, True) for p in EQUAL] + [(*p, False) for p in UNEQUAL])
def test_mathematical_equality(grader, label, answer, right):
    assert asyncio.run(grader.equal(label, answer)) is right


def test_easy_cases_need_no_process():
    assert quick_equal("12", "12.0") is True
    assert quick_equal("1,200", "1200") is True
    assert quick_equal("12", "13") is False
    assert quick_equal("12", "x") is None
    assert plain(r" $\text{yes}$. ") == "yes"


def test_grading_works_in_a_thread_and_from_several_loops(grader):
    """math-verify's own time limit is a signal: it raises outside the main thread."""
    results = []

    def work():
        results.append(asyncio.run(grader.equal("0.5", r"\frac{1}{2}")))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 4


@pytest.mark.parametrize("bomb", ["9^{9^{9^{9^{9}}}}", "(10^{10})!", r"\sum_{k=1}^{10^{9}} \sin(k)^{k}"])
def test_an_answer_that_computes_for_ever_is_wrong_in_time(bomb, caplog):
    """Also where C code holds the interpreter lock, and the next answer is graded by a new process."""
    grader = MathGrader(seconds=2, workers=1)
    try:
        assert asyncio.run(grader.equal("0.5", r"\frac{1}{2}"))
        start = time.monotonic()
        assert not asyncio.run(grader.equal("17", bomb))
        assert time.monotonic() - start < 60  # for ever, otherwise
        assert asyncio.run(grader.equal("0.5", r"\frac{2}{4}"))
    finally:
        grader.close()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("raise ModuleNotFoundError('no math here')", "(exit code 1): ModuleNotFoundError: no math here; '"),
        (
            "def parse(*a, **k): raise ImportError('no antlr')\nverify = parse",
            "(exit code 1): ImportError: no antlr; '",
        ),
        ("import os\nos._exit(7)", "(exit code 7); '"),
    ],
)
def test_a_worker_that_cannot_start_says_why_at_once(tmp_path, monkeypatch, content, said):
    (tmp_path / "math_verify.py").write_text(content)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    grader = MathGrader(workers=1)
    with pytest.raises(VimeError) as caught:
        asyncio.run(grader.equal("0.5", r"\frac{1}{2}"))
    grader.close()
    assert "mathematical answers ended when it started " + said in str(caught.value)


def test_a_worker_that_is_not_ready_in_time(tmp_path, monkeypatch):
    (tmp_path / "math_verify.py").write_text("import time\ntime.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(mathematics, "_START_SECONDS", 0.1)
    monkeypatch.setattr(mathematics, "_GRACE_SECONDS", 0.1)
    grader = MathGrader(workers=1)
    with pytest.raises(VimeError, match=r"was not ready within 0.1 s; '"):
        asyncio.run(grader.equal("0.5", r"\frac{1}{2}"))
    assert all(worker._process.poll() is not None for worker in grader._workers)
    grader.close()


def test_closing_leaves_no_process():
    grader = MathGrader(workers=1)
    asyncio.run(grader.equal("0.5", r"\frac{1}{2}"))
    (pid,) = [worker._process.pid for worker in grader._workers]
    os.kill(pid, 0)
    grader.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_closing_does_not_wait_for_comparisons_that_have_not_begun(monkeypatch):
    """A run that ends in the middle of a rollout may have thousands of them."""
    begun, asked, stopped = queue.SimpleQueue(), threading.Event(), threading.Event()

    class Slow(mathematics._Worker):
        def compare(self, gold, answer, seconds):
            begun.put(answer)
            assert stopped.wait(60)

        def stop(self):
            stopped.set()
            super().stop()

    async def all_asked():
        asked.set()

    async def compare():
        comparisons = [grader.equal("x+1", f"x+{n}") for n in range(2, 6)]
        return await asyncio.gather(*comparisons, all_asked(), return_exceptions=True)

    monkeypatch.setattr(mathematics, "_Worker", Slow)
    grader, results = MathGrader(workers=1), []
    thread = threading.Thread(target=lambda: results.extend(asyncio.run(compare())))
    thread.start()
    assert begun.get(timeout=60) == "x+2"
    assert asked.wait(60)
    grader.close()
    thread.join(60)
    assert begun.empty()
    assert [type(result).__name__ for result in results] == ["bool", *["CancelledError"] * 3, "NoneType"]


def test_f1():
    assert f1("The cat sat.", "a cat sat") == 1
    assert f1("cat", "cat dog") == pytest.approx(2 / 3)
    assert f1("x", "y") == 0
    assert f1("yes it is", "yes") == 0
    assert f1("b", ["a b c", "b"]) == 1


def test_random_depends_on_the_answer_alone():
    many = [sample("", index=i) for i in range(64)]
    first = score(config(None, rm_type="random"), *many)
    assert score(config(None, rm_type="random"), *reversed(many))[::-1] == first
    assert set(first) == {0.0, 1.0}


def test_a_prompt_may_name_its_own_reward():
    assert score(config(rm_type="math"), sample("Answer: 4", rm_type="dapo"), sample("Answer: 4")) == [1, 0]


@pytest.fixture
def module(monkeypatch):
    module = types.ModuleType("my_rewards")
    monkeypatch.setitem(sys.modules, "my_rewards", module)
    return module


def test_custom_functions(module):
    async def slow(options, one):
        await asyncio.sleep(0)
        return {"score": len(one.response), "why": "length"}

    module.sync = lambda options, one: len(one.response)
    module.slow = slow
    module.groups = lambda options, group: [one.index for one in group]
    assert score(config(custom_rm_path="my_rewards.sync"), sample("abc")) == [3]
    one = sample("abcd")
    assert score(config(custom_rm_path="my_rewards.slow", reward_key="score"), one) == [4]
    assert one.reward_info == {"score": 4, "why": "length"}
    rewarder = Rewarder(config(custom_rm_path="my_rewards.groups", group_rm=True))
    group = [sample("", index=i) for i in range(3)]
    asyncio.run(rewarder.score_group(group))
    assert [one.reward for one in group] == [0, 1, 2]


def test_what_a_custom_function_does_wrong_is_said(module):
    def broken(options, one):
        raise KeyError("nothing here")

    module.broken = broken
    module.nan = lambda options, one: float("nan")
    module.text = lambda options, one: "good"
    module.table = lambda options, one: {"a": 1}
    place = f"{Path(__file__).name}:{broken.__code__.co_firstlineno + 1}"
    for name, more, message in [
        ("broken", {}, f"KeyError: 'nothing here' at {place}"),
        ("nan", {}, "must be a finite number"),
        ("text", {}, "is 'good'"),
        ("table", {}, "--reward-key says which entry counts"),
        ("table", {"reward_key": "b"}, "no 'b'"),
    ]:
        with pytest.raises(VimeError) as caught:
            score(config(custom_rm_path=f"my_rewards.{name}", **more), sample("x"))
        assert message in str(caught.value)
    module.huge = lambda options, one: 10**400
    module.exits = lambda options, one: sys.exit(3)
    module.stops = lambda options, one: next(iter(()))

    async def async_exits(options, one):
        sys.exit(3)

    async def cancels_itself():
        raise asyncio.CancelledError("by itself")

    module.async_exits = async_exits
    module.cancelled = lambda options, one: asyncio.run(cancels_itself())
    for name, message in [
        ("huge", "must be a finite number"),
        ("exits", "SystemExit(3)"),
        ("stops", "StopIteration()"),
        ("async_exits", "SystemExit(3)"),
        ("cancelled", "CancelledError(by itself)"),
    ]:
        with pytest.raises(VimeError) as caught:
            score(config(custom_rm_path=f"my_rewards.{name}", rm_timeout=20.0), sample("x"))
        assert message in str(caught.value)
    module.few = lambda options, group: [1]
    rewarder = Rewarder(config(custom_rm_path="my_rewards.few", group_rm=True))
    with pytest.raises(VimeError, match="a list of 2 rewards"):
        asyncio.run(rewarder.score_group([sample(""), sample("")]))


def test_a_custom_function_that_hangs_does_not_hold_up_the_error(module):
    release = threading.Event()
    module.hangs = lambda options, one: release.wait(60)
    start = time.monotonic()
    with pytest.raises(VimeError, match=r"took longer than 0.1 s"):
        score(config(custom_rm_path="my_rewards.hangs", rm_timeout=0.1), sample("x"))
    assert time.monotonic() - start < 30  # the thread waits for 60
    release.set()


def test_an_async_function_that_blocks_does_not_hold_up_the_error(module):
    release = threading.Event()

    async def blocks(options, one):
        release.wait(60)

    async def works(options, one):
        await asyncio.sleep(0)
        return 1

    module.blocks, module.works = blocks, works
    start = time.monotonic()
    with pytest.raises(VimeError, match=r"took longer than 0.1 s"):
        score(config(custom_rm_path="my_rewards.blocks", rm_timeout=0.1), sample("x"))
    assert time.monotonic() - start < 30
    release.set()
    assert score(config(custom_rm_path="my_rewards.works"), sample("x")) == [1]


@pytest.mark.parametrize("kind", ["sync", "async", "sync that returns an awaitable"])
def test_the_wait_for_others_is_not_time_that_a_reward_took(module, monkeypatch, kind):
    """Each call takes a good part of its deadline, and many deadlines pass until the last one's turn."""
    monkeypatch.setattr(threads, "_THREADS", threads.Slots(2))

    def sync(options, one):
        time.sleep(0.3)
        return 1

    async def blocking(options, one):
        return sync(options, one)

    module.f = {"sync": sync, "async": blocking}.get(kind, lambda options, one: blocking(options, one))
    many = [sample("x", index=index) for index in range(24 if kind == "sync" else 12)]
    assert score(config(custom_rm_path="my_rewards.f", rm_timeout=2), *many) == [1] * len(many)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_calls_that_hang_keep_their_slots_and_are_named_by_those_that_cannot_begin(module, monkeypatch, kind):
    monkeypatch.setattr(threads, "_THREADS", threads.Slots(2))
    monkeypatch.setattr(threads, "_user_loop", functools.cache(threads._UserLoop))
    release = threading.Event()
    module.sync = lambda options, one: release.wait(60)

    async def blocks(options, one):
        release.wait(60)

    setattr(module, "async", blocks)
    rewarder = Rewarder(config(custom_rm_path=f"my_rewards.{kind}", rm_timeout=0.2))

    async def all_of_them():
        many = [sample("x", index=index) for index in range(6)]
        return await asyncio.gather(*(rewarder.score(one) for one in many), return_exceptions=True)

    errors = list(map(str, asyncio.run(all_of_them())))
    began = 2 if kind == "sync" else 1
    assert all("took longer than 0.2 s" in error for error in errors[:began]), errors
    why = "all 2 threads are held by calls that do not end" if kind == "sync" else "has blocked the others"
    assert all("could not begin: for 0.2 s" in error and why in error for error in errors[began:]), errors
    assert all(error.startswith("--custom-rm-path ") for error in errors)
    release.set()
    # The slots come back with the threads' ends, and nothing of those given up is left in the queue.
    module.works = lambda options, one: 1
    assert score(config(custom_rm_path="my_rewards.works"), *(sample("x") for _ in range(6))) == [1] * 6


def test_a_cancelled_wait_leaves_the_slots_to_others():
    slots = threads.Slots(1)

    async def work():
        await slots.take(60)
        waiting = [asyncio.create_task(slots.take(60)) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.wait([waiting[0]])
        slots.give()  # and cancelled just when its turn came
        waiting[1].cancel()
        await asyncio.wait([waiting[1]])
        await waiting[2]
        slots.give()
        await slots.take(60)

    asyncio.run(work())


def test_a_quick_call_waits_for_those_that_may_take_longer():
    """A reward of a second comes after generate functions of an hour, which need not have ended within that second."""
    slots = threads.Slots(1)

    async def work():
        await slots.take(3600)
        quick = asyncio.create_task(slots.take(0.01))
        done, _ = await asyncio.wait([quick], timeout=0.5)
        assert not done, quick.exception()
        slots.give()
        await quick

    asyncio.run(work())


def test_recovering_an_engine_waits_for_no_function_of_the_users(module, monkeypatch):
    monkeypatch.setattr(threads, "_THREADS", threads.Slots(0))
    assert asyncio.run(threads.in_thread(lambda: 1)) == 1


def test_a_module_that_ends_the_process_when_imported(tmp_path, monkeypatch):
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(5)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="importing leaves failed: SystemExit: 5"):
        Rewarder(config(custom_rm_path="leaves.f"))


def test_options_that_do_not_fit_together(module):
    for options, message in [
        (config(None, rm_type="math"), "--label-key is missing"),
        (config(rm_type="remote_rm"), "needs --rm-url"),
        (config(rm_type="math", group_rm=True), "--group-rm needs --custom-rm-path"),
        (config(custom_rm_path="my_rewards.none"), "has no function 'none'"),
        (config(custom_rm_path="no_such_module.f"), "importing no_such_module failed"),
        (config(custom_rm_path="f"), "must be module.function"),
    ]:
        with pytest.raises(ConfigError, match=message):
            Rewarder(options)
    with pytest.raises(ConfigError, match="nothing says what an answer is worth"):
        score(config(), sample("x"))
    with pytest.raises(DataError, match="has no label"):
        score(config(rm_type="math"), sample("x", label=None))


def with_server(handler, options_for, *samples):
    """Run ``options_for(url)`` against a real HTTP server."""

    async def run():
        app = web.Application()
        app.router.add_post("/rm", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        try:
            rewarder = Rewarder(options_for(f"http://127.0.0.1:{port}/rm"))
            return await scored(rewarder, *samples or [sample("abc", source="here")])
        finally:
            await runner.cleanup()

    return asyncio.run(run())


def test_remote_reward_is_asked_again_until_it_answers():
    seen = []

    async def handler(request):
        seen.append(await request.json())
        if len(seen) == 1:
            return web.Response(status=503)
        if len(seen) == 2:
            return web.Response(text="{tru")
        if len(seen) == 3:
            request.transport.close()
            return web.Response()
        return web.json_response({"score": 0.5})

    reward = with_server(handler, lambda url: config(rm_type="remote_rm", rm_url=url, reward_key="score"))
    assert reward == [0.5]
    assert seen == [{"prompt": "prompt", "response": "abc", "label": "4", "metadata": {"source": "here"}}] * 4


def test_remote_reward_gives_up_with_the_cause():
    async def refuses(request):
        return web.Response(status=422, text="no label")

    async def busy(request):
        return web.Response(status=503, text="loading")

    async def hangs(request):
        await asyncio.sleep(30)
        return web.Response()

    for handler, message in [
        (refuses, "refuses answer 0: status 422: no label"),
        (busy, r"within --rm-timeout 0.5 s .*status 503: loading"),
        (hangs, r"within --rm-timeout 0.5 s \(1 attempts; last: no reply\)"),
    ]:
        with pytest.raises(VimeError, match=message):
            with_server(handler, lambda url: config(rm_type="remote_rm", rm_url=url, rm_timeout=0.5))


def test_remote_rewards_that_wait_for_others_are_not_late(monkeypatch):
    """Six rounds of 0.4 s each, with a deadline of 1.5 s."""
    monkeypatch.setattr(remote, "_AT_ONCE", 2)
    under_way, most = 0, 0

    async def takes_its_time(request):
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.4)
        under_way -= 1
        return web.json_response(1)

    many = [sample("x", index=index) for index in range(12)]
    assert with_server(takes_its_time, lambda url: config(rm_type="remote_rm", rm_url=url, rm_timeout=1.5), *many) == [
        1
    ] * len(many)
    assert most == 2


def test_no_limit_of_the_http_librarys_goes_before_the_deadline():
    async def limits():
        async with remote.RemoteReward("http://127.0.0.1:1", 1000) as reward:
            session = reward._session
            assert session is not None
            return session.timeout, getattr(session.connector, "limit", None)

    timeout, connections = asyncio.run(limits())
    assert (timeout.total, timeout.sock_read, timeout.connect, connections) == (None, None, None, 0)


def test_remote_reward_is_given_its_credentials_and_does_not_repeat_them():
    seen = []

    async def refuses(request):
        seen.append((request.headers["Authorization"], request.query["token"]))
        return web.Response(status=403)

    def url_with_all(url):
        return f"{url.replace('://', '://user:hunter2@')}?token=hunter2"

    with pytest.raises(VimeError, match=r"--rm-url http://\*\*\*@127\.0\.0\.1:\d+\S*\?token=\*\*\* refuses") as caught:
        with_server(refuses, lambda url: config(rm_type="remote_rm", rm_url=url_with_all(url)))
    assert "hunter2" not in str(caught.value)
    assert seen == [("Basic " + base64.b64encode(b"user:hunter2").decode(), "hunter2")]
    # What aiohttp cannot read it quotes.
    with pytest.raises(VimeError, match="last: InvalidUrl") as caught:
        with_server(refuses, lambda _: config(rm_type="remote_rm", rm_url="http://u:hunter2/x@h", rm_timeout=0.5))
    assert "hunter2" not in str(caught.value)


def test_a_worker_ends_when_its_run_was_killed_in_the_middle():
    code = (
        "import asyncio, threading\n"
        "from vime.rollout.rewards.mathematics import MathGrader\n"
        "grader = MathGrader(seconds=3, workers=1)\n"
        "asyncio.run(grader.equal('0.5', r'\\frac{1}{2}'))\n"
        "print(next(iter(grader._workers))._process.pid, flush=True)\n"
        "asyncio.run(grader.equal('17', '(10^{10})!'))\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        worker = int(run.stdout.readline())
        status = Path(f"/proc/{worker}/stat")
        begun = int(status.read_text().split()[13])  # its processor time so far, in ticks of 10 ms
        while int(status.read_text().split()[13]) < begun + 50:  # until it computes
            assert run.poll() is None
            time.sleep(0.02)
        run.kill()
    waited = time.monotonic()
    while Path(f"/proc/{worker}").exists() and status.read_text().split()[2] != "Z":
        assert time.monotonic() - waited < 40, "it computes for ever"
        time.sleep(0.02)
