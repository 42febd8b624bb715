"""Prompts: read from JSONL, parquet or a `datasets` folder, tokenized once, drawn in a resumable order."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from moe_replay.errors import MissingExtraError, MoeReplayError

Messages = list[dict[str, Any]]


class DataError(MoeReplayError):
    """A data set that cannot be read, or a row that lacks what training needs."""


class Tokenizer(Protocol):
    """The part of a Transformers tokenizer that is used here."""

    def __call__(self, text: str, *, add_special_tokens: bool) -> Mapping[str, Sequence[int]]: ...

    def apply_chat_template(
        self, conversation: Messages, *, add_generation_prompt: bool, tokenize: bool
    ) -> str | Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of the data set.

    row         row number in the data set, from 0
    content     text or messages, as in the data set
    token_ids   token ids of the rendered prompt
    columns     all other columns of the row, for rewards and environments
    """

    row: int
    content: str | Messages
    token_ids: tuple[int, ...]
    columns: dict[str, Any]


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Return all rows of a .jsonl, .json or .parquet file, or of a folder written by `datasets.save_to_disk`."""
    source = Path(path)
    if not source.exists():
        raise DataError(f"no data at {source}", expected="a .jsonl or .parquet file, or a datasets folder")
    if source.suffix in (".jsonl", ".json"):
        rows = list(_json_rows(source))
    elif source.suffix == ".parquet":
        rows = _parquet_rows(source)
    elif source.is_dir():
        rows = _dataset_rows(source)
    else:
        raise DataError("unsupported data format", expected=".jsonl, .parquet or a datasets folder", found=source)
    if not rows:
        raise DataError(f"{source} has no rows")
    return rows


def load_prompts(rows: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, max_prompt_tokens: int) -> list[Prompt]:
    """Return the tokenized prompts of rows that fit; each has `prompt` (text or messages) or `messages`."""
    prompts = []
    for number, row in enumerate(rows):
        key = "prompt" if "prompt" in row else "messages"
        if key not in row:
            raise DataError(
                "a row has no prompt",
                sample=f"row {number}",
                expected="a column 'prompt' or 'messages'",
                found=f"columns {sorted(row)}",
            )
        content = row[key]
        ids = _tokenize(content, tokenizer, number)
        if 0 < len(ids) <= max_prompt_tokens:
            prompts.append(Prompt(number, content, ids, {k: v for k, v in row.items() if k != key}))
    if not prompts:
        raise DataError(
            "every prompt is empty or too long",
            expected=f"at most {max_prompt_tokens} tokens",
            found=f"{len(rows)} rows, none of which fits",
            remedy="Raise data.max_prompt_tokens",
        )
    return prompts


@dataclass(slots=True)
class PromptStream:
    """An endless stream of prompts, reshuffled every epoch; `state` is all that a resumed run needs."""

    prompts: Sequence[Prompt]
    seed: int = 0
    shuffle: bool = True
    epoch: int = 0
    position: int = 0
    _order: np.ndarray | None = field(default=None, repr=False)

    def draw(self, count: int) -> list[Prompt]:
        """Return the next `count` prompts."""
        return [self._next() for _ in range(count)]

    @property
    def state(self) -> dict[str, int]:
        """Epoch, and position within it."""
        return {"epoch": self.epoch, "position": self.position}

    def restore(self, state: Mapping[str, int]) -> None:
        """Continue from a saved `state`."""
        self.epoch, self.position, self._order = int(state["epoch"]), int(state["position"]), None

    def _next(self) -> Prompt:
        if self.position == len(self.prompts):
            self.epoch, self.position, self._order = self.epoch + 1, 0, None
        if self._order is None:
            numbers = np.arange(len(self.prompts))
            shuffled = np.random.default_rng((self.seed, self.epoch)).permutation(numbers)
            self._order = shuffled if self.shuffle else numbers
        prompt = self.prompts[int(self._order[self.position])]
        self.position += 1
        return prompt


def _json_rows(source: Path) -> Iterator[dict[str, Any]]:
    with source.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{source}, line {number} is not valid JSON: {error}") from error
            if not isinstance(row, dict):
                raise DataError(
                    f"{source}, line {number} is not a JSON object", expected="{...}", found=type(row).__name__
                )
            yield row


def _parquet_rows(source: Path) -> list[dict[str, Any]]:
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError as error:
        raise MissingExtraError("reading parquet needs pyarrow", remedy="pip install 'moe-replay[train]'") from error
    try:
        return parquet.read_table(source).to_pylist()
    except ArrowInvalid as error:
        raise DataError(f"{source} is not a parquet file: {error}") from error


def _dataset_rows(source: Path) -> list[dict[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError(
            "reading a datasets folder needs datasets", remedy="pip install 'moe-replay[train]'"
        ) from error
    try:
        loaded = datasets.load_from_disk(str(source))
    except FileNotFoundError as error:
        raise DataError(f"{source} is not a datasets folder: {error}", remedy="Write it with save_to_disk") from error
    if isinstance(loaded, datasets.DatasetDict):
        if "train" not in loaded:
            raise DataError(
                f"{source} has several splits, none of them for training",
                expected="a split named train",
                found=sorted(loaded),
            )
        loaded = loaded["train"]
    return [dict(row) for row in loaded]


def _tokenize(content: str | Messages, tokenizer: Tokenizer, row: int) -> tuple[int, ...]:
    if isinstance(content, str):
        return tuple(tokenizer(content, add_special_tokens=True)["input_ids"])
    if isinstance(content, list) and all(isinstance(message, dict) and "role" in message for message in content):
        if content and content[-1]["role"] == "assistant":
            raise DataError(
                "the messages end with the answer, which the model would see",
                sample=f"row {row}",
                expected="messages that end with a user turn",
                found="an assistant message at the end",
                remedy="Move the answer from the messages into a column of its own",
            )
        text = tokenizer.apply_chat_template(content, add_generation_prompt=True, tokenize=False)
        return tuple(tokenizer(str(text), add_special_tokens=False)["input_ids"])
    raise DataError(
        "a prompt is neither text nor messages",
        sample=f"row {row}",
        expected='a string or [{"role": ..., "content": ...}, ...]',
        found=type(content).__name__,
    )
