"""Prompt files: what is read, and the one sentence for what cannot be."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from vime.config.rollout import DataOptions
from vime.errors import DataError
from vime.rollout.prompt_file import read_prompts, split_slice, validate_prompt_file

ROWS = [{"q": f"question {i}", "a": str(i), "metadata": {"level": i}} for i in range(10)]


def options(**over):
    return DataOptions(**{"input_key": "q", "label_key": "a", **over})


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def parquet(path, rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=3)
    return str(path)


@pytest.fixture(params=["jsonl", "parquet"])
def file(request, tmp_path):
    return {"jsonl": jsonl, "parquet": parquet}[request.param](tmp_path / f"rows.{request.param}", ROWS)


@pytest.mark.parametrize(
    "part",
    ["", "@[:]", "@[2:5]", "@[7:]", "@[:3]", "@[-4:-1]", "@[-3:]", "@[2:-2]", "@[8:99]", "@[2:" + "9" * 50 + "]"],
)
def test_slices_are_pythons(file, part):
    expected = eval(f"ROWS{part[1:] or '[:]'}")
    rows = list(read_prompts(file + part, options()))
    assert [(row.prompt, row.label, row.metadata) for row in rows] == [
        (row["q"], row["a"], row["metadata"]) for row in expected
    ]


def test_a_slice_is_counted_in_rows_and_named_by_line(tmp_path):
    path = tmp_path / "gaps.jsonl"
    path.write_text('{"q": "one", "a": 1}\n\n\n{"q": "two", "a": 2}\n')
    rows = list(read_prompts(f"{path}@[1:2]", options()))
    assert [row.prompt for row in rows] == ["two"]
    assert rows[0].where == f"{path}:4"


@pytest.mark.parametrize("path", ["x@[1]", "x@[a:b]", "x@[1:2:3]", "x@[-:]", "x@[:-]"])
def test_a_slice_that_is_none_is_refused(path):
    with pytest.raises(DataError, match=r"path@\[a:b\]"):
        split_slice(path)


@pytest.mark.parametrize("part", ["@[20:]", "@[5:5]", "@[5:2]"])
def test_an_empty_slice_is_refused(file, part):
    assert "no rows in this slice" in validate_prompt_file(file + part, options())[0]


BAD = [
    ('{"q": "x"', "not a JSON object"),
    ('["x"]', r"a row is a JSON object, this is a list"),
    ('{"q": "x"}', "no 'a' (--label-key); the row has q"),
    ('{"p": "x", "a": 1}', "no 'q' (--input-key); the row has p, a"),
    ('{"q": "", "a": 1}', "'q' is empty"),
    ('{"q": 5, "a": 1}', "must be a string or a list of chat messages, this is a number (5)"),
    ('{"q": [], "a": 1}', "must be a string or a list of chat messages"),
    ('{"q": [{"role": "user", "content": "x"}], "a": 1}', "needs --apply-chat-template"),
    ('{"q": "x", "a": 1, "metadata": 3}', "'metadata' must be an object, this is a number"),
    ('{"q": "x", "a": 1, "metadata": "nope"}', "'metadata' is a string but not JSON"),
    ('{"q": "x", "a": 1, "metadata": {"rm_type": "maths"}}', "asks for rm_type 'maths', not deepscaler, math"),
    ('{"q": "x", "a": 1, "metadata": {"rm_type": [1]}}', "asks for rm_type [1], not deepscaler"),
    ('{"q": "x\\ud800", "a": 1}', "'q' holds half a surrogate pair"),
    ('{"q": "x", "a": ["\\udfff"]}', "'a' holds half a surrogate pair"),
    ("[" * 100_000, "not a JSON object"),
]


@pytest.mark.parametrize(("line", "message"), BAD)
def test_the_first_bad_row_is_named_by_its_line(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"q": "fine", "a": 0}\n' * 2 + line + "\n" + "also bad\n")
    (problem,) = validate_prompt_file(str(path), options())
    assert problem.startswith(f"{path}:3: ")
    assert message in problem


def test_a_file_that_the_system_cannot_read(tmp_path):
    whole = Path(parquet(tmp_path / "rows.parquet", ROWS)).read_bytes()
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1" + b"\xff" * 40 + whole[44:])
    for name in ("damaged.parquet", "x" * 300):
        (said,) = validate_prompt_file(str(tmp_path / name), options())
        assert "cannot be read" in said or "no such file" in said
        assert "\n" not in said
    assert validate_prompt_file(str(tmp_path), options()) == [f"{tmp_path}: not a file"]


def test_bytes_that_are_no_text_are_named(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b'{"q": "x", "a": 1}\n{"q": "\xff", "a": 1}\n')
    assert "x.jsonl:2: not a JSON object" in validate_prompt_file(str(tmp_path / "x.jsonl"), options())[0]


def test_messages(tmp_path):
    chat = options(apply_chat_template=True, tool_key="tools")
    good = {"q": [{"role": "user", "content": "x"}], "a": 1, "tools": '[{"type": "function"}]', "metadata": '{"k": 2}'}
    (row,) = read_prompts(jsonl(tmp_path / "good.jsonl", [good]), chat)
    assert row.tools == [{"type": "function"}]
    assert row.metadata == {"k": 2}
    for message, said in [({"content": "x"}, "with a 'role'"), ({"role": "user"}, "(role user) has no 'content'")]:
        bad = jsonl(tmp_path / "bad.jsonl", [{"q": [message], "a": 1}])
        assert said in validate_prompt_file(bad, chat)[0]


def test_parquet_messages_lose_the_keys_that_only_other_rows_have(tmp_path):
    rows = [
        {"q": [{"role": "user", "content": "x", "tool_calls": None}], "a": "1"},
        {"q": [{"role": "user", "content": None, "tool_calls": ["f"]}], "a": "2"},
    ]
    first, second = read_prompts(parquet(tmp_path / "m.parquet", rows), options(apply_chat_template=True))
    assert first.prompt == [{"role": "user", "content": "x"}]
    assert second.prompt == [{"role": "user", "tool_calls": ["f"]}]


def test_files_and_columns_that_are_missing(tmp_path):
    assert "no such file" in validate_prompt_file(str(tmp_path / "none.jsonl"), options())[0]
    assert (
        "no column 'z'; it has q, a, metadata"
        in validate_prompt_file(parquet(tmp_path / "r.parquet", ROWS), options(label_key="z"))[0]
    )
    (tmp_path / "no.parquet").write_text("hello")
    assert "not a Parquet file" in validate_prompt_file(str(tmp_path / "no.parquet"), options())[0]
    (tmp_path / "empty.jsonl").write_text("\n")
    assert validate_prompt_file(str(tmp_path / "empty.jsonl"), options()) == [f"{tmp_path}/empty.jsonl: no rows"]


def test_rows_to_learn_from_must_hold_an_answer(tmp_path):
    path = jsonl(tmp_path / "sft.jsonl", [{"q": [{"role": "user", "content": "x"}]}])
    chat = options(label_key=None, apply_chat_template=True)
    assert validate_prompt_file(path, chat) == []
    assert "nothing to learn" in validate_prompt_file(path, chat, sft=True)[0]


def test_checking_needs_neither_torch_nor_transformers():
    """``vime check`` imports it and must answer at once."""
    code = (
        "import sys, vime.rollout.prompt_file, vime.rollout.data;"
        "print([name for name in ('torch', 'transformers', 'vllm', 'ray', 'pyarrow') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
