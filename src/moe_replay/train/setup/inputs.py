"""Inputs that rank 0 reads and checks before a model is loaded: names, options, tokenizer, prompts and rewards."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import partial
from typing import Any

from moe_replay.train.config.checks import plugin_names, warmup_problem
from moe_replay.train.config.keys import ConfigError
from moe_replay.train.config.sections import BackendConfig
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.rollout.prompts import Chat, DataError, Prompt, Rows, load_prompts, prompt_column, read_rows
from moe_replay.train.rollout.reward_pool import check_columns
from moe_replay.train.rollout.rewards import Reward, load_reward
from moe_replay.train.rollout.tools import ToolSet, load_tools
from moe_replay.train.setup.engines import longest_sequence, lora_spec, vocabulary_size
from moe_replay.train.setup.sources import Sources, load_tokenizer
from moe_replay.utils.misc import StatusCallback
from moe_replay.utils.plugins import import_path, is_path

_FUNCTIONS = (
    "weight_sync.transport",
    "rollout.environment",
    "rollout.tools",
    "rollout.tool_format",
    "algorithm.advantage",
    "algorithm.loss",
    "reward.functions",
    "log.sinks",
)

_USUAL_ATTENTION = ("auto", "varlen", "flex", "blocks", "eager", "sdpa", "flash_attention_2")

GIVEN = {"prompts", "completions", "completion_ids"}
"""Arguments of every reward function besides the columns of the data."""


def name_checks(config: TrainConfig) -> Iterator[Callable[[], object]]:
    """Yield a check for each module to import, and for names that Transformers or Megatron-Core may not know."""
    for key, path, kind in _paths(config):
        yield partial(_check_path, key, path, kind)
    yield partial(load_tools, config.rollout.tools, config.rollout.tool_format)
    if config.backend.kind == "megatron":
        yield partial(_check_megatron, config.backend)
    else:
        yield partial(_check_attention, config.model.attn_implementation)


def _check_path(key: str, path: str, kind: str) -> None:
    plugin = import_path(path, kind=kind, key=key)
    if key in _FUNCTIONS and not callable(plugin):
        raise ConfigError(f"{key}: {path!r} is not callable", found=type(plugin).__name__)


def _paths(config: TrainConfig) -> Iterator[tuple[str, str, str]]:
    """Yield key, `module:name` and kind of every user-defined implementation."""
    for key, plugin, name in plugin_names(config):
        path = name.removeprefix("verl:") if name.count(":") > 1 else name
        if path not in plugin.registry() and is_path(path):
            yield key, path, plugin.kind


def _check_attention(name: str) -> None:
    if name in _USUAL_ATTENTION:
        return  # the imports take seconds
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from moe_replay.train.backends.attention import AUTO, IMPLEMENTATIONS

    known = list(dict.fromkeys([AUTO, *IMPLEMENTATIONS, "eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()]))
    if name not in known and "/" not in name:  # with a slash: a kernel of the hub
        near = difflib.get_close_matches(name, known, n=1)
        raise ConfigError(
            "model.attn_implementation: Transformers has no such attention",
            expected=f"one of {', '.join(known)}",
            found=repr(name),
            remedy=f"Did you mean {near[0]!r}?" if near else None,
        )


def _check_megatron(backend: BackendConfig) -> None:
    if not backend.megatron:
        return  # the import takes seconds
    try:
        from megatron.core.transformer.transformer_config import MLATransformerConfig
    except ModuleNotFoundError:
        return  # where it is needed, that is a separate error
    known = [field.name for field in fields(MLATransformerConfig)]
    for name in backend.megatron:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ConfigError(
                f"backend.megatron.{name}: Megatron-Core has no such setting",
                expected="a field of its TransformerConfig",
                remedy=f"Did you mean {near[0]!r}?" if near else None,
            )


@dataclass(frozen=True, slots=True)
class ReadData:
    """Rows of the prompts and of the evaluation prompts; None: those of the embedded default, or no evaluation."""

    rows: Rows | None = None
    eval_rows: Rows | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Inputs that rollouts need besides an engine.

    identity     of the rows, for a resumed run
    max_length   tokens of a sequence at most
    """

    tokenizer: Any
    prompts: Sequence[Prompt]
    eval_prompts: Sequence[Prompt]
    rewards: Sequence[Reward]
    identity: str
    max_length: int
    tools: ToolSet | None = None


def steps_of_epochs(config: TrainConfig, num_prompts: int) -> int:
    """Return the number of steps for `data.epochs`; the last step may start another epoch."""
    assert config.data.epochs is not None
    epochs = Fraction(str(config.data.epochs))  # 1.1 * 100 is more than 110 in binary
    steps = math.ceil(epochs * num_prompts / config.rollout.prompts_per_step)
    if problem := warmup_problem(config, steps):
        raise ConfigError(problem, found=f"data.epochs = {config.data.epochs:g} of {num_prompts} prompts")
    return steps


def epochs_in_words(config: TrainConfig, num_prompts: int, unit: str = "prompts") -> str:
    """Describe the number of steps for `data.epochs`, and that it replaces `steps` if that is set."""
    epochs, steps = config.data.epochs, steps_of_epochs(config, num_prompts)
    assert epochs is not None
    replaced = "steps" in config.model_fields_set and config.steps != steps
    note = f"; data.epochs replaces steps = {config.steps}" if replaced else ""
    return f"{steps} step{'s' * (steps != 1)}: {epochs:g} epoch{'s' * (epochs != 1)} of {num_prompts} {unit}{note}"


def load_rewards(config: TrainConfig) -> list[Reward]:
    weights = config.reward.weights or (1.0,) * len(config.reward.functions)
    return [
        load_reward(name, weight, config.reward.timeout_s)
        for name, weight in zip(config.reward.functions, weights, strict=True)
    ]


def check_reward_columns(rewards: Sequence[Reward], rows: Rows) -> None:
    """Raise for the first row with which a reward function cannot be called, or without a prompt."""
    needed = {reward.name: needed_columns(reward.function) for reward in rewards}
    for number, row in enumerate(rows):
        location = rows.location(number)
        prompt = prompt_column(row, location)
        columns = row.keys() - {prompt}
        if taken := sorted(columns & GIVEN):
            raise DataError(
                f"a column has the name of an argument of every reward function: {', '.join(map(repr, taken))}",
                sample=location,
                remedy=f'Rename it, e.g. data.columns = {{{taken[0]} = "{taken[0]}_in_data"}}, or remove it',
            )
        for name, names in needed.items():
            if missing := sorted(names - columns):
                raise DataError(
                    f"reward {name!r} needs a column that a row does not have",
                    sample=location,
                    expected=f"a column {', '.join(map(repr, missing))}",
                    found=f"columns {sorted(row)}",
                    remedy="Prompts are the argument `prompts`"
                    if prompt in missing
                    else "Add it to the data, give the parameter a default, or set reward.functions",
                )


def needed_columns(function: Callable[..., object]) -> set[str]:
    """Return the parameters of a reward function that must come from a column."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of a builtin, or of an object that has none
        return set()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {
        parameter.name for parameter in parameters if parameter.kind in named and parameter.default is parameter.empty
    } - GIVEN


def read_inputs(config: TrainConfig, sources: Sources, status: StatusCallback, read: ReadData | None = None) -> Inputs:
    """Read the data and load the rewards; raise for what the model cannot be trained with.

    read   what `check_config` has read of the data already
    """
    read = read or ReadData()
    trusted = config.model.trust_remote_code
    max_length = longest_sequence(config, sources.model)
    if config.rollout.lora:
        lora_spec(config.model, sources.model, is_server=config.rollout.is_server)
    tokenizer = load_tokenizer(sources.model, trust_remote_code=trusted)
    max_prompt = min(config.data.max_prompt_length, max_length - 1)
    vocab_size = vocabulary_size(sources.model, trust_remote_code=trusted)
    data = config.data
    rewards = load_rewards(config)
    rows = read.rows
    if rows is None:
        rows = read_rows(sources.data, data.subset, data.split, data.columns)
        check_reward_columns(rewards, rows)
    tools = load_tools(config.rollout.tools, config.rollout.tool_format, config.rollout.tool_timeout_s)
    schemas = None if tools is None else tools.schemas
    chat = Chat(data.chat_template, data.system)
    prompts = load_prompts(rows, tokenizer, max_prompt, vocab_size, schemas, chat)
    if of_text := sum(isinstance(prompt.content, str) for prompt in prompts):
        status(_text_in_words(chat, tokenizer, of_text, len(prompts), has_tools=bool(schemas)))
    if len(prompts) < len(rows):
        left_out = f"{len(rows) - len(prompts)} of {len(rows)} prompts are left out"
        status(f"{left_out}: empty or longer than {max_prompt} tokens")
    eval_prompts: Sequence[Prompt] = ()
    if config.eval.every and sources.eval:
        split = data.eval_split or data.split
        eval_rows = read.eval_rows or read_rows(sources.eval, data.subset, split, data.columns)
        eval_prompts = load_prompts(eval_rows, tokenizer, max_prompt, vocab_size, schemas, chat)[: config.eval.prompts]
    if config.reward.workers:
        check_columns(prompts)
    return Inputs(
        tokenizer=tokenizer,
        prompts=prompts,
        eval_prompts=eval_prompts,
        rewards=rewards,
        identity=rows.identity,
        max_length=max_length,
        tools=tools,
    )


def _text_in_words(chat: Chat, tokenizer: Any, of_text: int, of_all: int, *, has_tools: bool) -> str:
    """Describe how prompts that are text reach the model."""
    count = f"{of_text} of {of_all} prompts are text"
    if chat.renders_text(tokenizer):
        return f"{count}, each a user turn in the model's chat template (data.chat_template = none: as they are)"
    return f"{count} and used as they are{': rollout.tools are described in messages only' * has_tools}"
