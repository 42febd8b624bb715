"""The environment `tools`: answers the calls of tools in a completion, until there is none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moe_replay.rollout.types import FinishReason
from moe_replay.train.episode import Episode, EpisodeError
from moe_replay.train.tool_calls import ToolCall
from moe_replay.utils.messages import one_line

_COMPLETION = "MOE-REPLAY-COMPLETION"  # placeholder for what the model said


async def answer_tool_calls(episode: Episode) -> None:
    """Functions of rollout.tools answer the calls in a completion; the chat template writes their results."""
    tools = episode.tools
    if tools is None:
        raise EpisodeError("there are no tools", expected="functions in rollout.tools")
    while episode.can_continue and episode.session.finish_reason is FinishReason.STOP:
        calls = tools.parse(episode.raw_completion)
        if not calls:
            return
        text = tool_messages(episode, calls, await tools.answer(calls))
        if not episode.fits(text):
            return
        episode.observe(text)
        await episode.generate()


def tool_messages(episode: Episode, calls: Sequence[ToolCall], results: Sequence[str]) -> str:
    """Return what the chat template writes between a completion and the next one, for these results."""
    tokenizer = episode.tokenizer
    conversation = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": _COMPLETION},
        *(
            {"role": "tool", "name": call.name, "content": _harmless(result, tokenizer)}
            for call, result in zip(calls, results, strict=True)
        ),
    ]
    try:
        text = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
    except (ValueError, TypeError, LookupError, AttributeError, *_template_errors()) as error:
        raise _unusable(one_line(error)) from error
    _, found, after = str(text).partition(_COMPLETION)
    if not found:
        raise _unusable("the answer of the assistant is not in what it writes")
    # The model has sampled the token that ends its turn, which the template writes too.
    return after.removeprefix(tokenizer.decode(episode.session.token_ids[-1:], skip_special_tokens=False))


def _harmless(text: str, tokenizer: Any) -> str:
    """Return text in which no special token can be read: the result of a tool must not begin another turn."""
    for token in {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}:
        text = text.replace(token, f"{token[:1]} {token[1:]}")
    return text


def _template_errors() -> tuple[type[Exception], ...]:
    try:
        from jinja2 import TemplateError
    except ImportError:
        return ()
    return (TemplateError,)


def _unusable(why: str) -> EpisodeError:
    return EpisodeError(
        f"the chat template does not take the results of tools: {why}",
        expected="messages of the role 'tool' after one of the assistant",
        remedy="Write an environment that observes the results in the model's own format (docs/environments.md)",
    )
