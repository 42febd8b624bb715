"""Prompts from files that this test writes, in every format, and their order after a restart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_replay.train.rollout.prompts import (
    Chat,
    DataError,
    HubDataError,
    Prompt,
    PromptStream,
    Rows,
    is_hub_name,
    load_prompts,
    read_rows,
)
from moe_replay.train.rollout.rewards import Reward
from moe_replay.train.setup.inputs import check_reward_columns

ROWS = [{"prompt": f"{i} + 1 =", "solution": str(i + 1)} for i in range(5)]


class Characters:
    """A tokenizer of single characters."""

    def __call__(self, text, *, add_special_tokens):
        return {"input_ids": [0] * add_special_tokens + [ord(c) for c in text]}

    def apply_chat_template(self, conversation, *, add_generation_prompt, tokenize):
        return "".join(f"<{m['role']}>{m['content']}" for m in conversation) + "<assistant>" * add_generation_prompt


def write_jsonl(path):
    path.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n")


def write_parquet(path):
    pa = pytest.importorskip("pyarrow", reason="needs pyarrow")
    from pyarrow import parquet

    parquet.write_table(pa.Table.from_pylist(ROWS), path)


def write_folder(path):
    datasets = pytest.importorskip("datasets", reason="needs datasets")
    datasets.Dataset.from_list(ROWS).save_to_disk(str(path))


def write_splits(path):
    datasets = pytest.importorskip("datasets", reason="needs datasets")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(str(path))


@pytest.mark.parametrize(
    ("name", "write"),
    [("a.jsonl", write_jsonl), ("a.parquet", write_parquet), ("folder", write_folder), ("splits", write_splits)],
)
def test_every_format_gives_the_same_rows(tmp_path, name, write):
    write(tmp_path / name)
    assert read_rows(tmp_path / name) == ROWS


def test_text_and_messages_are_tokenised():
    rows = [
        {"prompt": "ab", "level": 1},
        {"messages": [{"role": "user", "content": "c"}]},
        {"prompt": [{"role": "user", "content": "d"}]},
    ]
    prompts = load_prompts(rows, Characters(), max_prompt_length=100)
    assert prompts[0].token_ids == (0, ord("a"), ord("b"))
    assert prompts[0].columns == {"level": 1}
    assert [bytes(p.token_ids).decode() for p in prompts[1:]] == ["<user>c<assistant>", "<user>d<assistant>"]


def test_messages_that_end_with_the_answer_are_refused():
    rows = [{"messages": [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]}]
    with pytest.raises(DataError, match=r"end with the answer.*row 0.*separate column"):
        load_prompts(rows, Characters(), max_prompt_length=100)


def test_a_chat_template_without_an_end_is_an_error(monkeypatch):
    class Endless(Characters):
        def apply_chat_template(self, conversation, **_):
            while True:
                pass

    monkeypatch.setattr("moe_replay.train.rollout.prompts.TEMPLATE_LIMIT_S", 0.2)
    with pytest.raises(DataError, match=r"the chat template did not end within 0.2 s.*row 0"):
        load_prompts([{"messages": [{"role": "user", "content": "a"}]}], Endless(), 10)


@pytest.mark.parametrize("column", ["prompt", "messages"])
def test_a_prompt_that_would_take_minutes_to_tokenize_is_an_error(column):
    class Slow(Characters):
        def __call__(self, text, **_):
            raise AssertionError("tokenized")

    text = "x" * 60_000_000
    row = {column: text if column == "prompt" else [{"role": "user", "content": text}]}
    with pytest.raises(DataError, match=r"a prompt is far too long.*row 0"):
        load_prompts([row], Slow(), 10)


def test_long_prompts_are_left_out():
    prompts = load_prompts([{"prompt": "a" * n} for n in (1, 50, 3)], Characters(), max_prompt_length=10)
    assert [prompt.row for prompt in prompts] == [0, 2]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ('{"prompt": "a"}\n{"prompt": \n', "line 2 is not valid JSON"),
        ("[1]\n", "line 1 is not a JSON object"),
        ("\n", "has no rows"),
    ],
)
def test_a_bad_file_is_named_with_its_line(tmp_path, content, text):
    (tmp_path / "bad.jsonl").write_text(content)
    with pytest.raises(DataError, match=text):
        read_rows(tmp_path / "bad.jsonl")


def test_other_bad_data(tmp_path):
    with pytest.raises(DataError, match="no data at"):
        read_rows(tmp_path / "missing.jsonl")
    (tmp_path / "a.csv").write_text("prompt\n")
    with pytest.raises(DataError, match="unsupported data format"):
        read_rows(tmp_path / "a.csv")
    with pytest.raises(DataError, match=r"no prompt \[sample row 0\].*columns \['question'\]"):
        load_prompts([{"question": "?"}], Characters(), 10)
    with pytest.raises(DataError, match="neither text nor messages"):
        load_prompts([{"prompt": 5}], Characters(), 10)
    with pytest.raises(DataError, match="max_prompt_length"):
        load_prompts([{"prompt": "a" * 50}], Characters(), 10)


class Chats(Characters):
    """A tokenizer of a chat model."""

    chat_template = "{{ messages }}"


def test_text_is_a_user_turn_of_a_chat_model():
    rows = [{"prompt": "ab"}, {"prompt": [{"role": "user", "content": "ab"}]}]
    text, messages = load_prompts(rows, Chats(), 100)
    assert text.token_ids == messages.token_ids
    assert (text.content, messages.content) == ("ab", rows[1]["prompt"])
    plain = load_prompts(rows[:1], Characters(), 100)
    assert load_prompts(rows[:1], Chats(), 100, chat=Chat("none"))[0].token_ids == plain[0].token_ids
    assert plain[0].token_ids != text.token_ids


def test_the_system_prompt_is_that_of_conversations_without_one():
    own = [{"role": "system", "content": "s"}, {"role": "user", "content": "ab"}]
    rows = [{"prompt": "ab"}, {"prompt": own[1:]}, {"prompt": own}]
    expected = load_prompts(rows[2:], Chats(), 100)[0].token_ids
    found = load_prompts(rows, Chats(), 100, chat=Chat(system="s"))
    assert [prompt.token_ids for prompt in found] == [expected] * 3
    assert load_prompts(rows[2:], Chats(), 100, chat=Chat(system="t"))[0].token_ids == expected


@pytest.mark.parametrize(("tokenizer", "template"), [(Characters(), "auto"), (Chats(), "none")])
def test_a_system_prompt_that_text_cannot_have_is_refused(tokenizer, template):
    with pytest.raises(DataError, match=r"data.system is for conversations, and a prompt is text.*remove data.system"):
        load_prompts([{"prompt": "ab"}], tokenizer, 100, chat=Chat(template, "s"))


def test_columns_are_renamed(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"problem": "1+1", "answer": 2, "more": 3}\n')
    columns = {"problem": "prompt", "answer": "solution"}
    assert read_rows(path, columns=columns) == [{"prompt": "1+1", "solution": 2, "more": 3}]
    with pytest.raises(DataError, match=r"lacks a column to rename.*line 1.*'question'.*found columns"):
        read_rows(path, columns={"question": "prompt"})
    with pytest.raises(DataError, match="two columns of a row would be named more"):
        read_rows(path, columns={"problem": "more"})


@given(drawn=st.lists(st.integers(1, 7), min_size=1, max_size=6), seed=st.integers(0, 5), shuffle=st.booleans())
def test_a_resumed_stream_goes_on_where_it_stopped(drawn, seed, shuffle):
    prompts = [Prompt(i, "", (i,), {}) for i in range(5)]
    whole = PromptStream(prompts, seed, shuffle)
    expected = [p.row for count in drawn for p in whole.draw(count)]
    for epoch in range(len(expected) // 5):
        assert sorted(expected[epoch * 5 : epoch * 5 + 5]) == [0, 1, 2, 3, 4]
    found, state = [], {"epoch": 0, "position": 0}
    for count in drawn:
        stream = PromptStream(prompts, seed, shuffle)
        stream.restore(state)
        found += [p.row for p in stream.draw(count)]
        state = stream.state
    assert found == expected


# ---- the hub ---------------------------------------------------------------------------------------------------------


def test_a_name_on_the_hub_is_loaded_by_its_split(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(name: str, subset: str | None, *, split: str) -> Any:
        asked.append((name, subset, split))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read_rows("some-one/math.v2", "main", "test") == ROWS
    assert asked == [("some-one/math.v2", "main", "test")]


@pytest.mark.parametrize("error", [ConnectionError("Couldn't reach the Hub"), ValueError("Unknown split 'test'")])
def test_a_data_set_that_cannot_be_downloaded_is_named(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    datasets = pytest.importorskip("datasets")

    def load_dataset(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(HubDataError, match=rf"'some/data', split 'train' cannot be read: .*{error}.*save_to_disk"):
        read_rows("some/data")


def test_files_and_folders_are_no_names_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data/math").mkdir(parents=True)
    assert not is_hub_name("data/math")
    assert not is_hub_name("data/missing.jsonl")
    assert not is_hub_name("/data/missing")
    assert not is_hub_name("../data")
    assert is_hub_name("trl-lib/DeepMath-103K")


def test_a_split_of_a_folder_is_chosen(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    splits = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:1])}
    )
    splits.save_to_disk(str(tmp_path / "data"))
    assert read_rows(tmp_path / "data", split="test") == ROWS[:1]
    with pytest.raises(DataError, match=r"no split 'dev'.*test, train.*data\.split"):
        read_rows(tmp_path / "data", split="dev")


def scores(prompts: list, completions: list, prompt: list, **_: object) -> list[float]:
    return [0.0] * len(completions)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "p"}, "reward 'own' needs a column that a row does not have .*: expected a column 'prompt'"),
        ({"messages": [], "prompt": "p", "completions": "c"}, "a column has the name .*: 'completions'"),
        ({"prompt": "p", "completion_ids": [1]}, "a column has the name .*: 'completion_ids'"),
        ({"text": "p"}, "a row has no prompt"),
    ],
)
def test_columns_that_a_reward_cannot_be_called_with_are_found_before_a_step(row: dict, problem: str) -> None:
    rows = Rows([row], Path("data.jsonl"), [3])
    with pytest.raises(DataError, match=f"{problem}.*") as error:
        check_reward_columns([Reward("own", scores)], rows)
    assert "data.jsonl, line 3" in str(error.value)
