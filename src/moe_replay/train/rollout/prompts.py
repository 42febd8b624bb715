"""Prompts: read from JSONL, parquet, a `datasets` folder or the hub, tokenized once, drawn in a resumable order."""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from moe_replay.errors import MoeReplayError, needs_extra
from moe_replay.utils.misc import one_line
from moe_replay.utils.signals import time_limit

Messages = list[dict[str, Any]]
TEMPLATE_LIMIT_S = 30.0
CHARACTERS_PER_TOKEN = 100
MIN_CHARACTERS = 2**20


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


@dataclass(frozen=True, slots=True)
class Chat:
    """Conversion of prompts to conversations.

    template   of prompts that are text. auto: a user turn where the tokenizer has a chat template; none: as they are
    system     system prompt of conversations without one; empty: none
    """

    template: Literal["auto", "none"] = "auto"
    system: str = ""

    def renders_text(self, tokenizer: Any) -> bool:
        """Whether prompts that are text become a user turn."""
        return self.template == "auto" and getattr(tokenizer, "chat_template", None) is not None

    def turns(self, content: Any, *, is_chat: bool) -> Any:
        """Return the prompt as it is tokenized: text, or messages."""
        if isinstance(content, str) and is_chat:
            content = [{"role": "user", "content": content}]
        first = content[0] if isinstance(content, list) and content else None
        if not self.system or not isinstance(first, dict) or first.get("role") == "system":
            return content
        return [{"role": "system", "content": self.system}, *content]


class Rows(list[dict[str, Any]]):
    """The rows of a data set, and where each stands, for errors.

    source   the file or folder
    lines    line of each row, from 1, where rows are lines of a file
    """

    def __init__(self, rows: Iterable[dict[str, Any]], source: Path, lines: Sequence[int] | None = None) -> None:
        super().__init__(rows)
        self.source = source
        self.lines = lines

    def location(self, row: int) -> str:
        """Return the file and the line or row number of a row."""
        return f"{self.source}, {f'row {row}' if self.lines is None else f'line {self.lines[row]}'}"

    @property
    def identity(self) -> str:
        """Number and digest of the rows: equal for data that a position in it means the same in."""
        digest = hashlib.blake2b(digest_size=8)
        for row in self:
            line = json.dumps(row, sort_keys=True, default=_stable_text)
            digest.update(line.encode("utf-8", "surrogatepass") + b"\n")
        return f"{len(self)} rows with digest {digest.hexdigest()}"


def read_rows(
    path: str | Path, subset: str | None = None, split: str = "train", columns: Mapping[str, str] | None = None
) -> Rows:
    """Return all rows of a .jsonl, .json or .parquet file, of a folder of `datasets.save_to_disk`, or of the hub.

    subset    of a data set on the hub that has several
    split     of a data set that has several: on the hub, or in a folder
    columns   name in the data set -> name in the rows, of columns to rename
    """
    source = Path(path)
    try:
        rows = Rows(hub_rows(str(path), subset, split), source) if is_hub_name(path) else _read_rows(source, split)
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{source} cannot be read: {reason}", remedy="Set data.path") from error
    if not rows:
        raise DataError(f"{source} has no rows")
    for number, row in enumerate(rows if columns else ()):
        rows[number] = _renamed(row, columns or {}, rows.location(number))
    return rows


def _renamed(row: dict[str, Any], columns: Mapping[str, str], location: str) -> dict[str, Any]:
    names = [columns.get(name, name) for name in row]
    if missing := sorted(columns.keys() - row.keys()):
        raise DataError(
            "a row lacks a column to rename",
            sample=location,
            expected=f"a column {', '.join(map(repr, missing))}",
            found=f"columns {sorted(row)}",
            remedy="Set data.columns",
        )
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise DataError(
            f"two columns of a row would be named {', '.join(twice)}",
            sample=location,
            found=f"columns {sorted(row)}",
            remedy="Rename the other one too, in data.columns",
        )
    return dict(zip(names, row.values(), strict=True))


def _read_rows(source: Path, split: str) -> Rows:
    if not source.exists():
        raise DataError(
            f"no data at {source}", expected="a .jsonl or .parquet file, a datasets folder, or a name on the hub"
        )
    if source.is_dir():
        return Rows(_dataset_rows(source, split), source)
    if not source.is_file():  # reading a pipe or a device may never end
        raise DataError(f"{source} is not a file", expected="a .jsonl or .parquet file, or a datasets folder")
    if source.suffix in (".jsonl", ".json"):
        numbered = list(_json_rows(source))
        return Rows((row for _, row in numbered), source, [number for number, _ in numbered])
    if source.suffix == ".parquet":
        return Rows(_parquet_rows(source), source)
    raise DataError("unsupported data format", expected=".jsonl, .parquet or a datasets folder", found=source)


def _stable_text(value: Any) -> str:
    """Return a stand-in for a value that JSON does not have: its text, or its type where that may be an address."""
    return str(value) if isinstance(value, (bytes, date, time, timedelta, Decimal)) else type(value).__qualname__


def load_prompts(
    rows: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    max_prompt_length: int,
    vocab_size: int | None = None,
    tools: list[dict[str, Any]] | None = None,
    chat: Chat | None = None,
) -> list[Prompt]:
    """Return the tokenized prompts of rows that fit; each has `prompt` (text or messages) or `messages`.

    vocab_size   of the model; None: token ids are not compared with it
    tools        JSON schemas of tools, which the chat template describes in messages
    """
    chat = chat or Chat()
    has_turns = chat.renders_text(tokenizer)
    prompts = []
    for number, row in enumerate(rows):
        location = rows.location(number) if isinstance(rows, Rows) else f"row {number}"
        key = prompt_column(row, location)
        content = row[key]
        _check_size(content, max_prompt_length, location)
        if isinstance(content, str) and chat.system and not has_turns:
            raise DataError(
                "data.system is for conversations, and a prompt is text",
                sample=location,
                remedy="Use a model with a chat template and data.chat_template = auto, or remove data.system",
            )
        ids = _tokenize(chat.turns(content, is_chat=has_turns), tokenizer, location, tools)
        if vocab_size is not None and ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            raise DataError(
                "a prompt has a token that the model does not have",
                sample=location,
                expected=f"token ids below {vocab_size}, the model's vocabulary",
                found=max(ids) if min(ids) >= 0 else min(ids),
                remedy="The tokenizer in the model's folder is that of another model",
            )
        if 0 < len(ids) <= max_prompt_length:
            prompts.append(Prompt(number, content, ids, {k: v for k, v in row.items() if k != key}))
    if not prompts:
        raise DataError(
            "every prompt is empty or too long",
            expected=f"at most {max_prompt_length} tokens",
            found=f"{len(rows)} rows, none of which fits",
            remedy="Raise data.max_prompt_length",
        )
    return prompts


def prompt_column(row: Mapping[str, Any], location: str) -> str:
    """Return the name of the column that has the prompt of a row; raise if there is none."""
    for name in ("prompt", "messages"):
        if name in row:
            return name
    raise DataError(
        "a row has no prompt",
        sample=location,
        expected="a column 'prompt' or 'messages'",
        found=f"columns {sorted(row)}",
        remedy='Rename the column of the prompts, e.g. data.columns = {problem = "prompt"}',
    )


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
        return [self._next() for _ in range(count)]

    @property
    def state(self) -> dict[str, int]:
        """Epoch, and position within it."""
        return {"epoch": self.epoch, "position": self.position}

    def restore(self, state: Mapping[str, int]) -> None:
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


def _json_rows(source: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, row)."""
    with source.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if content.strip():
                yield number, _json_row(content, f"{source}, line {number}")


def _json_row(content: bytes, location: str) -> dict[str, Any]:
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError(f"{location} is UTF-16", expected="UTF-8", remedy="Convert the file, e.g. with iconv -t UTF-8")
    try:
        row = json.loads(content.decode())
        if b"\\ud" in content.lower():  # an escaped surrogate, which may lack the other half
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise DataError(f"{location} is not UTF-8: {error}", remedy="Convert the file to UTF-8") from error
    except UnicodeEncodeError as error:
        raise DataError(f"{location} has half of a surrogate pair, which is no character: {error}") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{location} is not valid JSON: {error}", remedy="Write one JSON object per line") from error
    except RecursionError as error:
        raise DataError(f"{location} is nested too deeply to be read") from error
    except ValueError as error:  # an integer of thousands of digits
        raise DataError(f"{location} cannot be read: {error}", remedy="Write such numbers as text") from error
    if not isinstance(row, dict):
        raise DataError(f"{location} is not a JSON object", expected="{...}", found=type(row).__name__)
    return row


def _parquet_rows(source: Path) -> list[dict[str, Any]]:
    with needs_extra("reading parquet needs pyarrow", "train"):
        from pyarrow import ArrowException, parquet
    try:
        return parquet.read_table(source, page_checksum_verification=True).to_pylist()
    except (ArrowException, OSError, ValueError) as error:
        raise DataError(f"{source} is not a parquet file, or damaged: {one_line(error)}") from error


def _dataset_rows(source: Path, split: str) -> list[dict[str, Any]]:
    with needs_extra("reading a datasets folder needs datasets", "train"):
        import datasets
        from pyarrow import ArrowException
    broken = (ArrowException, OSError, ValueError, KeyError, TypeError, AttributeError, IndexError)
    try:
        loaded = datasets.load_from_disk(str(source))
    except broken as error:
        raise DataError(
            f"{source} is not a datasets folder, or damaged: {one_line(error)}", remedy="Write it with save_to_disk"
        ) from error
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise DataError(
                f"{source} has no split {split!r}",
                expected="one of its splits",
                found=", ".join(sorted(map(str, loaded))),
                remedy="Set data.split, or data.eval_split for data.eval_path",
            )
        loaded = loaded[split]
    try:
        return [dict(row) for row in loaded]
    except broken as error:
        raise DataError(
            f"{source} has rows that cannot be read: {one_line(error)}", remedy="Write it again with save_to_disk"
        ) from error


def _check_size(content: Any, max_prompt_length: int, location: str) -> None:
    """Raise for a prompt far beyond the longest one: tokenizing it would take minutes, or all memory."""
    texts = list(map(str, content)) if isinstance(content, list) else [str(content)]
    limit = max(MIN_CHARACTERS, CHARACTERS_PER_TOKEN * max_prompt_length)
    if (size := sum(map(len, texts))) > limit:
        raise DataError(
            "a prompt is far too long",
            sample=location,
            expected=f"at most {limit} characters for data.max_prompt_length = {max_prompt_length}",
            found=size,
            remedy="Remove the row",
        )


def _tokenize(
    content: str | Messages, tokenizer: Tokenizer, location: str, tools: list[dict[str, Any]] | None
) -> tuple[int, ...]:
    if isinstance(content, str):
        with _prompt_errors("the prompt cannot be tokenized", location):
            return tuple(tokenizer(content, add_special_tokens=True)["input_ids"])
    _check_messages(content, location)
    endless = DataError(f"the chat template did not end within {TEMPLATE_LIMIT_S:g} s", sample=location)
    refused = _prompt_errors("the chat template does not take these messages", location)
    with refused, time_limit(TEMPLATE_LIMIT_S, endless):
        text = _render(content, tokenizer, tools)
        describes_tools = not tools or text != _render(content, tokenizer, None)
        ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    if not describes_tools:
        raise DataError(
            "the chat template does not describe tools to the model",
            sample=location,
            remedy="Use a model whose template does, or describe them in the prompts and write an environment",
        )
    return ids


def _render(content: Messages, tokenizer: Tokenizer, tools: list[dict[str, Any]] | None) -> str:
    options: dict[str, Any] = {"tools": tools} if tools else {}
    return str(tokenizer.apply_chat_template(content, add_generation_prompt=True, tokenize=False, **options))


_PROMPT_ERRORS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


@contextmanager
def _prompt_errors(problem: str, location: str) -> Iterator[None]:
    """Name the row in what a tokenizer or the template of a chat raises."""
    try:
        yield
    except DataError:
        raise
    except (*_PROMPT_ERRORS, *template_errors()) as error:
        raise DataError(f"{problem}: {type(error).__name__}: {one_line(error)}", sample=location) from error


def template_errors() -> tuple[type[Exception], ...]:
    """Return what templates raise; they come with Transformers, and not every tokenizer has one."""
    try:
        from jinja2 import TemplateError
    except ImportError:
        return ()
    return (TemplateError,)


def _check_messages(content: Any, location: str) -> None:
    is_list = isinstance(content, list)
    if not is_list or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in content):
        raise DataError(
            "a prompt is neither text nor messages",
            sample=location,
            expected='a string or [{"role": ..., "content": ...}, ...]',
            found=type(content).__name__ if not is_list else "a message without a role",
        )
    if not content:
        raise DataError("a prompt has no messages", sample=location, expected="at least one", found="an empty list")
    for number, message in enumerate(content):
        text = message.get("content")
        if not isinstance(text, str) and not (text is None and message.get("tool_calls")):
            raise DataError(
                f"message {number} of a prompt has no text as its content",
                sample=location,
                expected="a string",
                found=type(text).__name__ if "content" in message else "no content",
                remedy="Join the text of its parts; images and other parts are not supported"
                if isinstance(text, list)
                else None,
            )
    if content[-1]["role"] == "assistant":
        raise DataError(
            "the messages end with the answer, which the model would see",
            sample=location,
            expected="messages that end with a user turn",
            found="an assistant message at the end",
            remedy="Move the answer from the messages into a separate column",
        )


# ---- data sets on the hub --------------------------------------------------------------------------------------------


_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILES = (".jsonl", ".json", ".parquet")


class HubDataError(MoeReplayError):
    """A data set of the hub that is neither cached nor downloadable, or lacks the requested subset or split."""


def is_hub_name(path: str | Path) -> bool:
    """Return whether a path that does not exist here may be the name of a data set on the hub."""
    text = str(path)
    return bool(_NAME.fullmatch(text)) and not text.endswith(_FILES) and not Path(path).exists()


def hub_rows(name: str, subset: str | None, split: str) -> list[dict[str, Any]]:
    """Return the rows of one split. Files of the data set are read; code that comes with it never runs."""
    with needs_extra("data sets of the hub need datasets", "train"):
        import datasets
        from pyarrow import ArrowException
    try:
        loaded = datasets.load_dataset(name, subset, split=split)
        return [dict(row) for row in loaded]  # type: ignore[arg-type]  a split is a Dataset
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, ArrowException) as error:
        chosen = f"{name!r}{f', subset {subset!r}' if subset else ''}, split {split!r}"
        raise HubDataError(
            f"the data set {chosen} cannot be read: {type(error).__name__}: {one_line(error)}",
            expected="a file or folder here, or a data set of the hub that is cached or can be downloaded",
            remedy="Without a network, write it to a folder elsewhere (datasets.load_dataset(...).save_to_disk) and "
            "set data.path to that; data.subset and data.split choose what is read",
        ) from error
