"""Drawn input: settings, recipes, rows and answers. Each is used or refused with one error: no traceback, no hang.

The examples are the same in every run; `--hypothesis-profile=explore` draws others.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pydantic", reason="the trainer's own dependency")

from moe_replay.engines.http import check_samples, reading_answer
from moe_replay.engines.server.sample_wire import decode_samples, encode_samples
from moe_replay.engines.sglang.wire import GenerateResponse
from moe_replay.errors import EngineError, EngineName, MoeReplayError
from moe_replay.records import FinishReason, Sample, SamplingParams
from moe_replay.routes.topology import MoeLayer, MoeTopology
from moe_replay.routes.trace import RouteTrace
from moe_replay.train.config.file import load_config
from moe_replay.train.config.keys import all_fields
from moe_replay.train.rollout.prompts import DataError, load_prompts, read_rows
from moe_replay.weights.identity import CurrentWeights

pytestmark = pytest.mark.slow

HANG_S = 300.0
FIELDS = all_fields()


def within_limit(work: Callable[[], Any]) -> MoeReplayError | None:
    """The error of this library that work ends with, if any; whatever else it raises fails the test, as a hang does."""
    ended: list[Any] = []

    def run() -> None:
        try:
            work()
        except MoeReplayError as error:
            ended.append(error)
        except BaseException as error:
            ended.append(AssertionError(f"{type(error).__name__}: {error}"))
        else:
            ended.append(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(HANG_S)
    assert ended, "it hangs"
    if isinstance(ended[0], AssertionError):
        raise ended[0]
    return ended[0]


# ---- settings --------------------------------------------------------------------------------------------------------

NASTY = st.sampled_from(
    [
        *("", " ", "nan", "inf", "-inf", "-1", "0", "1e400", "-0.0", "null", "none", "true", "[]", "{}", "1,2", "0x10"),
        *("\0", "\udcff", "../..", "http://", "http://[", "a:b", ":", "..:x", "os:path", "verl:a:b", "é", "'", '"'),
        *(str(10**12), str(2**31), str(2**63), "9" * 5000, "[" * 2000, "a" * 1000, "1_000", "--steps", "\ufeff"),
    ]
)
WORDS = NASTY | st.text(max_size=6)


@settings(max_examples=400)
@given(st.lists(st.tuples(st.sampled_from(sorted(FIELDS)), st.lists(WORDS, max_size=3)), min_size=1, max_size=3))
def test_any_command_line_is_used_or_refused(options: list[tuple[str, list[str]]]) -> None:
    words = [word for key, values in options for word in (f"--{key}", *values)]
    error = within_limit(lambda: load_config(None, words))
    assert error is None or error.exit_status == 2
    assert error is None or len(str(error)) < 30_000


def certainly_bad(kind: Any) -> list[str]:
    """Values that no key of this type can have."""
    if get_origin(kind) is Literal:
        return ["no such choice", "", "0"]
    if kind is bool:
        return ["maybe", "2", ""]
    if kind is int or (int in get_args(kind) and float not in get_args(kind)):
        return ["many", "", "1.5", "nan", "-1", str(10**30)]
    if kind is float:
        return ["many", "", "nan", "-1"]
    return []


@pytest.mark.parametrize("key", sorted(key for key, field in FIELDS.items() if certainly_bad(field.annotation)))
def test_a_bad_value_of_any_key_is_refused_by_its_name(key: str) -> None:
    for value in certainly_bad(FIELDS[key].annotation):
        error = within_limit(lambda value=value: load_config(None, [f"--{key}", value]))
        assert error is not None, value
        assert key in str(error)


TOML = st.recursive(
    st.booleans() | st.integers(-(10**20), 10**20) | st.floats() | st.text(max_size=5) | NASTY,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "lr", "path"]), inner, max_size=2)
    ),
    max_leaves=5,
)


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value, ensure_ascii=True).replace("NaN", "nan").replace("Infinity", "inf")


@settings(max_examples=300)
@given(
    key=st.sampled_from(sorted([*FIELDS, "rollout", "optim", "model", "nothing"])), value=TOML, cut=st.integers(0, 30)
)
def test_any_recipe_is_used_or_refused(
    key: str, value: Any, cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "drawn.toml"
    text = f"{key} = {toml(value)}\n"
    path.write_bytes(text[: len(text) - cut if cut < 5 else None].encode("utf-8", "surrogatepass"))
    error = within_limit(lambda: load_config(path))
    assert error is None or str(path) in str(error)


# ---- rows ------------------------------------------------------------------------------------------------------------


class Characters:
    """A tokenizer of bytes, with a template that reads what templates read."""

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def apply_chat_template(self, conversation: Any, *, add_generation_prompt: bool, tokenize: bool) -> str:
        return "".join(message["role"] + message["content"].strip() for message in conversation)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("\ud83d"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "prompt", "messages", "tool_calls", "x"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)
MESSAGES = st.lists(
    st.fixed_dictionaries({}, optional={"role": st.just("user") | JSON, "content": st.just("a") | JSON}), max_size=3
)
ROWS = (
    st.fixed_dictionaries({}, optional={"prompt": st.just("a") | MESSAGES | JSON, "messages": MESSAGES | JSON}) | JSON
)


@pytest.mark.slow
@settings(max_examples=500)
@given(
    rows=st.lists(ROWS, max_size=3),
    encoding=st.sampled_from(["utf-8"] * 5 + ["utf-16", "utf-16-le", "latin-1", "utf-8-sig"]),
    damage=st.none() | st.tuples(st.integers(0, 60), st.binary(max_size=3)),
)
def test_any_rows_are_used_or_refused(
    rows: list[Any], encoding: str, damage: tuple[int, bytes] | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "drawn.jsonl"
    lines = [json.dumps(row, ensure_ascii=number % 2 == 0) for number, row in enumerate(rows)]
    content = "\n".join(lines).encode(encoding, "surrogatepass" if encoding.startswith("utf") else "replace")
    if damage is not None:
        content = content[: damage[0]] + damage[1] + content[damage[0] + 1 :]
    path.write_bytes(content)
    error = within_limit(lambda: load_prompts(read_rows(path), Characters(), 100, 256))
    assert error is None or isinstance(error, DataError)
    assert error is None or str(path) in str(error) or "every prompt is empty" in str(error)
    assert error is None or "\n" not in str(error)


# ---- answers of servers ----------------------------------------------------------------------------------------------

TOPOLOGY = MoeTopology(2, (MoeLayer(0, 4, 2), MoeLayer(1, 4, 2)))
PROMPT, PARAMS = [1, 2], SamplingParams(n=2, max_tokens=3)


def good_samples() -> list[Sample]:
    random = np.random.default_rng(0)
    made = []
    for _ in range(2):
        tokens = np.concatenate([PROMPT, random.integers(0, 9, 3)]).astype(np.int32)
        experts = np.stack([random.permutation(4)[:2] for _ in range(10)]).reshape(5, 2, 2).astype(np.uint8)
        trace = RouteTrace(tokens, experts, (0, 1), np.arange(5) < 4, 0, num_experts=4)
        logprobs = -random.random(3).astype(np.float32)
        made.append(
            Sample(
                prompt_ids=tokens[:2],
                completion_ids=tokens[2:],
                logprobs=logprobs,
                finish_reason=FinishReason.LENGTH,
                trace=trace,
                weight_version=0,
            )
        )
    return made


WHOLE = encode_samples(good_samples())


@settings(max_examples=400)
@given(st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.binary(max_size=4)), max_size=3), st.integers(0, 40))
def test_any_body_is_samples_that_can_be_true_or_an_error(edits: list[tuple[int, bytes]], cut: int) -> None:
    body = bytearray(WHOLE)
    for position, replacement in edits:
        body[position : position + len(replacement)] = replacement

    def read() -> None:
        with reading_answer("http://a"):
            samples = decode_samples(bytes(body[: len(body) - cut if cut < 20 else None]))
            check_samples(samples, PROMPT, PARAMS, url="http://a", topology=TOPOLOGY, vocab_size=9)

    error = within_limit(read)
    assert error is None or isinstance(error, EngineError)


ANSWER = st.recursive(
    JSON,
    lambda inner: st.dictionaries(
        st.sampled_from(
            [
                *("meta_info", "output_ids", "finish_reason", "type", "weight_version", "weight_versions"),
                *("routed_experts", "output_token_logprobs", "prompt_tokens", "output_token_sampling_logprobs"),
            ]
        ),
        inner | st.just("stop") | st.just([1, 2]) | st.just("AAAA"),
        max_size=5,
    ),
    max_leaves=12,
)


@settings(max_examples=300)
@given(ANSWER)
def test_any_answer_of_sglang_is_a_sample_or_an_error(content: Any) -> None:
    def read() -> None:
        with reading_answer("http://a"):
            response = GenerateResponse(content, EngineName("SGLang", "0"), 0)
            sample = response.to_sample(np.array(PROMPT, np.int32), TOPOLOGY, lambda text: CurrentWeights(0, None), 0)
            check_samples([sample], PROMPT, SamplingParams(), url="http://a", topology=TOPOLOGY, vocab_size=9)

    error = within_limit(read)
    assert error is None or isinstance(error, EngineError)


def test_what_is_whole_is_accepted() -> None:
    samples = decode_samples(WHOLE)
    check_samples(samples, PROMPT, PARAMS, url="http://a", topology=TOPOLOGY, vocab_size=9)
    assert load_config(None, ["--steps", "3"]).steps == 3
    assert Path(__file__).is_file()
