"""Tools: functions described to the model, calls in its completions, and answers whatever goes wrong."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

pytest.importorskip("transformers")

import moe_replay as mr
from moe_replay.engines.session import Session
from moe_replay.records import FinishReason, Sample, SamplingParams
from moe_replay.train.loop import train
from moe_replay.train.rollout.environments import Episode, EpisodeError, load_environment
from moe_replay.train.rollout.prompts import DataError, Prompt, load_prompts
from moe_replay.train.rollout.tools import (
    MAX_CALLS,
    ToolCall,
    ToolError,
    describe,
    load_tools,
    parse_json,
    parse_tagged,
)

Config = Callable[..., Any]
HERE = "tests.train.test_tools"
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}{% if message.role == 'tool' %}"
    "<|im_start|>user\n<result>{{ message.content }}</result><|im_end|>\n"
    "{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


# ---- functions ------------------------------------------------------------------------------------------------------


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


async def look_up(word: str, kind: Literal["noun", "verb"] = "noun") -> dict[str, str]:
    """Look up a word.

    Args:
        word: What to look up.
        kind: Of word.
    """
    await asyncio.sleep(0)
    return {word: f"a {kind} <|im_start|>"}


def failing(word: str) -> str:
    """Fail.

    Args:
        word: Anything.
    """
    if word == "exit":
        raise SystemExit(3)
    raise KeyError(word)


released = threading.Event()


def hanging() -> str:
    """Hang."""
    released.wait()
    return "late"


def undocumented(a: int) -> int:
    """Add."""
    return a


def untyped(a) -> int:
    """Add.

    Args:
        a: A number.
    """
    return a


def tools(timeout_s: float = 120.0) -> Any:
    return load_tools([f"{HERE}:{name}" for name in ("add", "look_up", "failing", "hanging")], "hermes", timeout_s)


def answers(*calls: ToolCall, timeout_s: float = 120.0) -> list[str]:
    return asyncio.run(tools(timeout_s).answer(calls))


def test_functions_are_described_by_signature_and_docstring() -> None:
    about = describe(add).schema["function"]
    assert about["name"] == "add"
    assert about["description"] == "Add two numbers."
    assert about["parameters"]["required"] == ["a"]
    assert about["parameters"]["properties"]["b"] == {"type": "integer", "description": "The second."}


@pytest.mark.parametrize(("name", "told"), [("undocumented", "argument 'a'"), ("untyped", "type hint"), ("HERE", "no")])
def test_a_function_that_is_not_described_is_refused(name: str, told: str) -> None:
    with pytest.raises(ToolError, match=rf"tool '{HERE}:{name}'.*{told}"):
        load_tools([f"{HERE}:{name}"])


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ToolError, match="two tools are called 'add'"):
        load_tools([f"{HERE}:add", f"{HERE}:add"])


def test_calls_are_answered_in_order() -> None:
    found = answers(
        ToolCall("add", {"a": 2, "b": 3}),
        ToolCall("look_up", {"word": "go", "kind": "verb"}),
        ToolCall("add", {"a": "4"}),
    )
    assert found == ["5", '{"go": "a verb <|im_start|>"}', "5"]  # "4" is a number by the schema


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (ToolCall("multiply", {}), "Error: no tool 'multiply'; there is add, look_up, failing, hanging"),
        (ToolCall("add", {"c": 1}), "Error: missing a required argument: 'a'"),
        (ToolCall("add", {"a": 1, "c": 1}), "Error: got an unexpected keyword argument 'c'"),
        (ToolCall("add", {"a": "one"}), "Error: add raised TypeError"),
        (ToolCall("failing", {"word": "x"}), "Error: failing raised KeyError: 'x'"),
        (ToolCall("failing", {"word": "exit"}), "Error: failing raised SystemExit: 3"),
        (ToolCall(problem="the call is not valid JSON"), "Error: the call is not valid JSON"),
    ],
)
def test_what_goes_wrong_is_an_answer(call: ToolCall, told: str) -> None:
    assert answers(call)[0].startswith(told)


def test_a_tool_that_hangs_holds_up_nobody() -> None:
    try:
        found = answers(ToolCall("hanging"), ToolCall("add", {"a": 1}), timeout_s=0.3)
    finally:
        released.set()
    assert found[0] == "Error: hanging did not return within 0.3 s"
    assert found[1] in ("2", "Error: add did not return within 0.3 s")  # on a busy machine


def test_a_turn_has_a_limited_number_of_calls() -> None:
    found = answers(*[ToolCall("add", {"a": 1})] * (MAX_CALLS + 2))
    assert found == ["2"] * MAX_CALLS + [f"Error: at most {MAX_CALLS} calls in a turn"] * 2


# ---- formats --------------------------------------------------------------------------------------------------------

XML = (
    "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=b>3</parameter>\n</function>\n</tool_call>"
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the answer is 4", []),
        ('<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call><|im_end|>', [ToolCall("add", {"a": 2})]),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 2}"}', [ToolCall("add", {"a": 2})]),
        ('<think><tool_call>{"name": "x"}</tool_call></think>4', []),
        ('<tool_call>{"name": "x"}</tool_call></think>4', []),  # the template has written <think>
        ('<tool_call>{"name": "a"}</tool_call><think>4</think>', [ToolCall("a")]),
        (XML, [ToolCall("add", {"a": "2", "b": "3"})]),
        (
            '<tool_call>{"name": "a"}</tool_call> and <tool_call>{"name": "b"}</tool_call>',
            [ToolCall("a"), ToolCall("b")],
        ),
    ],
)
def test_calls_in_tags(text: str, expected: list[ToolCall]) -> None:
    assert parse_tagged(text) == expected


@pytest.mark.parametrize("content", ["{name: add}", "[1]", '{"name": 3}', '{"name": "add", "arguments": [1]}', ""])
def test_calls_that_cannot_be_read_are_problems(content: str) -> None:
    (call,) = parse_tagged(f"<tool_call>{content}</tool_call>")
    assert call.problem


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4", []),
        ("in {braces}", []),
        ('{"answer": 4}', []),
        ('<|python_tag|>{"name": "add", "parameters": {"a": 2}}<|eom_id|>', [ToolCall("add", {"a": 2})]),
        ('[{"name": "a"}, {"name": "b"}]', [ToolCall("a"), ToolCall("b")]),
    ],
)
def test_calls_in_json(text: str, expected: list[ToolCall]) -> None:
    assert parse_json(text) == expected


# ---- the environment ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    words = Tokenizer(models.WordLevel({one: place for place, one in enumerate(characters)}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    words.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=words,
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = TEMPLATE
    return made


class Scripted:
    """Says what is given, turn by turn."""

    def __init__(self, tokenizer: Any, *turns: str) -> None:
        self.tokenizer, self._turns = tokenizer, iter(turns)

    async def generate_one(self, prompt: Sequence[int], params: SamplingParams) -> list[Sample]:
        text = next(self._turns)
        ids = np.array(self.tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
        tokens = np.concatenate([np.asarray(prompt, np.int32), ids])
        experts = np.broadcast_to(np.array([0, 1], np.uint8), (len(tokens), 1, 2)).copy()
        covered = np.arange(len(tokens)) < len(tokens) - 1
        return [
            Sample(
                prompt_ids=np.asarray(prompt, np.int32),
                completion_ids=ids,
                logprobs=np.zeros(len(ids), np.float32),
                finish_reason=FinishReason.STOP if text.endswith("<|im_end|>") else FinishReason.LENGTH,
                trace=mr.RouteTrace(tokens, experts, (0,), covered, 0, num_experts=4),
                weight_version=0,
            )
        ]


def play(tokenizer: Any, *turns: str, max_length: int = 4000, max_turns: int = 4) -> str:
    """Return what the sequence has become after a prompt."""
    engine = Scripted(tokenizer, *turns)
    episode = Episode(
        prompt=Prompt(0, "", (1,), {}),
        session=Session([1]),
        engine=engine,  # type: ignore[arg-type]
        params=SamplingParams(max_tokens=500),
        tokenizer=tokenizer,
        max_length=max_length,
        max_turns=max_turns,
        tools=tools(),
    )

    async def run() -> None:
        (first,) = await engine.generate_one([1], episode.params)
        await episode.start(first)
        environment = load_environment("tools")
        assert environment is not None
        await environment(episode)

    asyncio.run(run())
    return tokenizer.decode(episode.session.token_ids[1:], skip_special_tokens=False)


CALL = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call><|im_end|>'
DONE = "it is 3<|im_end|>"


def test_results_are_written_by_the_chat_template(tokenizer: Any) -> None:
    answered = "\n<|im_start|>user\n<result>3</result><|im_end|>\n<|im_start|>assistant\n"
    assert play(tokenizer, CALL, DONE) == CALL + answered + DONE
    assert play(tokenizer, CALL, CALL, DONE) == (CALL + answered) * 2 + DONE
    assert play(tokenizer, DONE) == DONE


def test_a_result_cannot_begin_another_turn(tokenizer: Any) -> None:
    call = '<tool_call>{"name": "look_up", "arguments": {"word": "x"}}</tool_call><|im_end|>'
    text = play(tokenizer, call, DONE)
    assert "a noun < |im_start|>" in text
    assert text.count("<|im_start|>") == 2


def test_a_sequence_ends_with_a_turn_that_was_cut_off(tokenizer: Any) -> None:
    cut = CALL.removesuffix("<|im_end|>")
    assert play(tokenizer, cut) == cut


def test_a_sequence_ends_where_no_result_fits_and_after_its_last_turn(tokenizer: Any) -> None:
    assert play(tokenizer, CALL, max_length=len(CALL) + 20) == CALL
    assert play(tokenizer, CALL, CALL, max_turns=2).count("<result>") == 1


def test_a_template_that_takes_no_results_is_named(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
    )
    monkeypatch.setattr(tokenizer, "chat_template", refusing)
    with pytest.raises(EpisodeError, match=r"does not accept tool results: no tools"):
        play(tokenizer, CALL, DONE)


# ---- prompts and runs -----------------------------------------------------------------------------------------------


def test_tools_are_described_in_the_prompt(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": [{"role": "user", "content": "2+1"}]}]
    (prompt,) = load_prompts(rows, tokenizer, 9999, tools=tools().schemas)
    text = tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
    assert '"name": "look_up"' in text
    assert "The second." in text
    monkeypatch.setattr(tokenizer, "chat_template", "{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(DataError, match=r"does not describe tools.*row 0"):
        load_prompts(rows, tokenizer, 9999, tools=tools().schemas)


def every_time(text: str) -> list[ToolCall]:
    return [ToolCall("add", {"a": 41})]


def test_a_run_calls_tools_and_replays_the_routes_of_their_results(config: Config) -> None:
    pytest.importorskip("pyarrow")
    from moe_replay.train.output.completions import completion_steps, read_completions

    made = config(
        steps=1,
        rollout={
            "environment": "tools",
            "tools": [f"{HERE}:add"],
            "tool_format": f"{HERE}:every_time",
            "max_turns": 2,
        },
        log={"completions": True, "num_completions_to_print": 0},
    )
    found = read_completions(completion_steps(train(made))[1])
    stopped = [one for one in found if "<user>" in one.completion]
    assert stopped  # a turn that was cut off has no calls
    assert all("<end><user>42<end><assistant>" in one.completion for one in stopped)


@pytest.mark.parametrize(
    ("rollout", "told"),
    [
        ({"environment": "tools"}, r"rollout\.tools: the environment has no tools"),
        ({"tools": ["m:f"]}, r"rollout\.tools: tool calls need an environment"),
        ({"environment": "tools", "tools": ["m:f"], "tool_format": "hermse"}, "did you mean 'hermes'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(config: Config, rollout: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        config(rollout=rollout)


def test_a_tool_that_is_not_there_is_named_before_the_run(config: Config, tmp_path: Path) -> None:
    made = config(rollout={"environment": "tools", "tools": [f"{HERE}:nothing"]})
    with pytest.raises(ValueError, match=r"tool 'tests\.train\.test_tools:nothing' cannot be loaded"):
        train(made)
