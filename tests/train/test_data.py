"""Prompts from files that this test writes, in every format, and their order after a restart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_replay.train.data import DataError, Prompt, PromptStream, load_prompts, read_rows
from moe_replay.train.hub_data import HubDataError, is_hub_name

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
    prompts = load_prompts(rows, Characters(), max_prompt_tokens=100)
    assert prompts[0].token_ids == (0, ord("a"), ord("b"))
    assert prompts[0].columns == {"level": 1}
    assert [bytes(p.token_ids).decode() for p in prompts[1:]] == ["<user>c<assistant>", "<user>d<assistant>"]


def test_messages_that_end_with_the_answer_are_refused():
    rows = [{"messages": [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]}]
    with pytest.raises(DataError, match=r"end with the answer.*row 0.*column of its own"):
        load_prompts(rows, Characters(), max_prompt_tokens=100)


def test_long_prompts_are_left_out():
    prompts = load_prompts([{"prompt": "a" * n} for n in (1, 50, 3)], Characters(), max_prompt_tokens=10)
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
    with pytest.raises(DataError, match="max_prompt_tokens"):
        load_prompts([{"prompt": "a" * 50}], Characters(), 10)


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
