"""A recipe under conversion: settings with the options they come from, what has changed, and what was lost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from moe_replay.errors import MoeReplayError
from moe_replay.train.config.checks import problems
from moe_replay.train.config.command_line import parse_scalar, parse_value
from moe_replay.train.config.file import toml_value
from moe_replay.train.config.foreign import TABLES
from moe_replay.train.config.foreign.options import Option
from moe_replay.train.config.keys import all_fields, enclosing_table, fields_of, sections
from moe_replay.train.config.sections import Sections

WIDTH = 40
UNKNOWN = "unknown option"
SUBJECTS = {
    "model.": "model",
    "data.": "data",
    "reward.": "reward",
    "rollout.environment": "environment",
    "rollout.tools": "environment",
    "rollout.max_turns": "environment",
    "rollout.temperature": "sampling",
    "rollout.top_": "sampling",
    "rollout.num_generations": "sampling",
    "algorithm.": "loss",
    "optim.": "optimizer",
    "replay.mode": "replay",
}
"""Prefix of our keys -> what they decide; a command that loses an option of one becomes another run."""
NEEDED = {"model.path": "model", "data.path": "data", "reward.functions": "reward"}
"""Keys whose defaults here are of no use to a converted run."""
_WHOLE = "write it as a function in environments.py: docs/environments.md"
_SPLIT = (
    "write it as a function in environments.py, with episode.rewrite where each turn is a separate sample: "
    "docs/coming-from.md#turns-as-samples"
)


class ConversionError(MoeReplayError):
    """A command or file of another trainer that cannot be converted."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and its source option."""

    value: Any
    source: str
    is_default: bool = False  # the other trainer's default, not part of the command
    change: str = ""  # how the value, or what it counts, differs from theirs


@dataclass(slots=True)
class Draft:
    """Settings by dotted key, and remarks in the order in which they came up."""

    settings: dict[str, Setting] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)  # options without a counterpart that do not change what is learned
    # reasons why the recipe is not the run of the command: "subject: option: reason"
    differences: list[str] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)  # options whose meaning is another here
    header: list[str] = field(default_factory=list)
    is_recipe: bool = True  # false for the command of a rollout server

    def put(self, key: str, value: Any, source: str, *, is_default: bool = False, change: str = "") -> None:
        """Set a key; a default never replaces an explicit value, and None sets nothing."""
        previous = self.settings.get(key)
        if value is not None and not (is_default and previous is not None and not previous.is_default):
            self.settings[key] = Setting(value, source, is_default, change)

    def drop(self, key: str, reason: str) -> None:
        """Remove a setting if present, with a remark if it was explicit."""
        setting = self.settings.pop(key, None)
        if setting is not None and not setting.is_default:
            self.remark(setting.source, reason)

    def remark(self, option: str, reason: str, subject: str = "") -> None:
        """Note an option that has no counterpart.

        subject   what is another here without it; empty: nothing that decides what is learned
        """
        line = f"{subject}: {option}: {reason}" if subject else f"{option}: {reason}"
        lines = self.differences if subject else self.lost
        if line not in lines:
            lines.append(line)

    def environment(self, name: str, option: str, source: str, *, may_split: bool) -> None:
        """Name the function that a class of the user becomes.

        name        of the class there, and of the function
        may_split   there, each turn can be a separate sample with the advantage of its episode
        """
        if name.isidentifier():
            self.put("rollout.environment", f"environments:{name}", source)
            self.put("algorithm.advantage_turns", "episode" if may_split else None, source)
        self.remark(option, _SPLIT if may_split else _WHOLE, "environment")

    def change(self, option: str, reason: str) -> None:
        """Note an option that has another meaning or form here."""
        self.changes.append(f"{option}: {reason}")

    def number(self, text: str, default: float, shown: str, key: str, least: float = -math.inf) -> float:
        """Return an option as a number of at least `least`; the default, with a remark, if it is none."""
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if math.isfinite(number) and number >= least:
            return number
        problem = "not a number" if math.isnan(number) else "an impossible number"
        self.remark(shown, f"{problem}; {default} was used instead", subject_of(key) or UNKNOWN)
        return default

    def micro_batch(self, sequences: float, length: int, source: str) -> None:
        """Set the tokens of a micro-batch from its sequences of `length` tokens."""
        change = "micro-batches are filled by tokens, not by sequences"
        tokens = int(sequences * length)
        self.put("batch.tokens_per_micro_batch", tokens, f"{source} x {length} tokens", change=change)

    def warm_up(self, fraction: float, source: str, shown: str) -> None:
        """Set the steps of the warm-up from their part of all steps."""
        steps = self.settings.get("steps")
        if steps is None:
            self.remark(shown, "set optim.warmup_steps, which counts steps", "optimizer")
        else:
            self.put("optim.warmup_steps", math.ceil(fraction * float(steps.value)) or None, source)

    def drop_evaluation(self, shown: str) -> None:
        """Leave out an evaluation without data; `shown` is the option for how often."""
        interval = self.settings.get("eval.every")
        if interval is not None and interval.value and "data.eval_path" not in self.settings:
            self.remark(shown, "without effect: set data.eval_path too")
            del self.settings["eval.every"]

    def log(self, sinks: Iterable[str], source: str, prefix: str, *, is_default: bool) -> None:
        """Set metric sinks; `prefix` stands before the name of a sink in the option as written."""
        for sink in sinks:
            if sink in ("wandb", "tensorboard", "mlflow"):
                self.put(f"log.{sink}", True, source, is_default=is_default)
            elif sink not in ("console", "none", ""):
                self.remark(f"{prefix}{sink}", "a custom metric sink: log.sinks, docs/extending.md")

    def apply(self, shown: str, source: str, words: list[str], option: Option, *, is_default: bool = False) -> None:
        """Set the counterpart of an option of the other trainer, or note that there is none.

        shown    the option as written, for remarks
        source   its name, for the comment next to the setting
        """
        subject = option.subject or subject_of(option.key)
        value: Any = ...
        if option.values is not None:
            value = _looked_up(option.values, words)
        elif option.key:
            kind = all_fields()[option.key].annotation if _table(option.key) is None else None
            try:
                value = _entry(words) if kind is None else parse_value(source, words, kind)
            except MoeReplayError as error:
                self.remark(shown, str(error), subject or UNKNOWN)
                return
        if value is not ...:
            self.put(option.key, value, source, is_default=is_default)
        elif not is_default:
            self.remark(shown, option.note or f"only {', '.join(option.values or ())} can be converted", subject)

    def render(self) -> tuple[str, list[str]]:
        """Return the recipe as TOML with comments, and why it is not the run of the command, or not valid."""
        config, invalid = self._validated()
        missing = {key: f"{subject}: the command names none; set {key}" for key, subject in self._missing()}
        invalid = [problem for problem in invalid if problem.partition(":")[0] not in missing]
        different = [*missing.values(), *self.differences, *invalid]
        lines = [f"# {line}".rstrip() for line in self.header]
        changes = [f"{item.source}: {item.change}" for item in self.settings.values() if item.change] + self.changes
        for title, entries in (
            ("Not the run of this command yet:", different),
            ("Changed:", changes),
            ("Lost, without a counterpart:", self.lost),
        ):
            listed = [f"#   {line}" for entry in entries for line in entry.splitlines()]
            lines += ["#", f"# {title}", *listed] if listed else []
        lines += [
            "#",
            "# Taken: all other options, named beside their settings or equal to the defaults.",
        ] * self.is_recipe
        for name, section in sections():
            keys = [key for key, _ in fields_of(name, section) if self._holds(key)]
            body = [line for key in keys for line in self._lines(key, key.removeprefix(f"{name}."), config)]
            lines += ["", *([f"[{name}]"] if name else []), *body] if body else []
        return "\n".join(lines).lstrip("\n") + "\n", different

    def _missing(self) -> Iterator[tuple[str, str]]:
        """Yield key and subject of what a recipe needs and no option, not even a lost one, has named."""
        for key, subject in NEEDED.items() if self.is_recipe else ():
            if key not in self.settings and not any(line.startswith(f"{subject}: ") for line in self.differences):
                yield key, subject

    def _holds(self, key: str) -> bool:
        return key in self.settings or (key in TABLES and any(_table(name) == key for name in self.settings))

    def _lines(self, key: str, name: str, config: Sections) -> Iterator[str]:
        if key in TABLES:
            items = {
                entry.removeprefix(f"{key}."): item for entry, item in self.settings.items() if _table(entry) == key
            }
            for entry, item in items.items():
                yield _line(f"{name}.{entry}", item.value, item)
            return
        item = self.settings[key]
        value = _validated_value(config, key)
        if not (item.is_default and value == all_fields()[key].default):
            yield _line(name, value, item)

    def _validated(self) -> tuple[Sections, list[str]]:
        """Return the settings less invalid values, which become remarks, and the problems of their combination."""
        while True:
            try:
                config = Sections.model_validate(self._tables())
            except ValidationError as error:
                messages = {_key(problem["loc"], self.settings): problem["msg"] for problem in error.errors()}
            else:
                return config, list(problems(config))
            for key, message in messages.items():
                setting = self.settings.pop(key)
                shown = f"{setting.source} {_shown(setting.value)}"
                self.remark(shown, f"{key}: {message}", subject_of(key) or UNKNOWN)

    def _tables(self) -> dict[str, Any]:
        tables: dict[str, Any] = {}
        for key, setting in self.settings.items():
            inner = _table(key)
            table, name = enclosing_table(tables, key if inner is None else inner)
            if inner is None:
                table[name] = setting.value
            else:
                table.setdefault(name, {})[key.removeprefix(f"{inner}.")] = setting.value
        return tables


def _line(name: str, value: Any, item: Setting) -> str:
    comment = f"{item.source}: the default" if item.is_default else item.source
    return f"{f'{name} = {toml_value(value)}':<{WIDTH}}  # {comment}" if comment else f"{name} = {toml_value(value)}"


def torchrun(ranks: str, nodes: str) -> str:
    """Return the command that trains a recipe on `ranks` ranks of each node."""
    nnodes = "" if nodes in ("", "1") else f"--nnodes {nodes} "
    return f"torchrun {nnodes}--nproc-per-node {ranks} -m moe_replay.cli.main train RECIPE.toml"


def subject_of(key: str) -> str:
    """Return what a key of ours decides; empty if a run without it learns the same."""
    return next((subject for prefix, subject in SUBJECTS.items() if key.startswith(prefix)), "")


def _validated_value(config: Sections, key: str) -> Any:
    section, _, name = key.rpartition(".")
    return getattr(getattr(config, section) if section else config, name)


def _table(key: str) -> str | None:
    return next((table for table in TABLES if key.startswith(f"{table}.")), None)


def _key(location: Iterable[Any], settings: Mapping[str, Setting]) -> str:
    dotted = ".".join(map(str, location))
    return next(key for key in settings if f"{dotted}.".startswith(f"{key}.") or key.startswith(f"{dotted}."))


def _looked_up(values: Mapping[str, Any], words: list[str]) -> Any:
    """Return our value for theirs, ignoring case; a switch without a value is on; `...` if there is no counterpart."""
    name = _canonical(" ".join(words) or "true")
    return next((ours for theirs, ours in values.items() if _canonical(theirs) == name), ...)


def _canonical(text: str) -> str:
    try:
        return str(float(text))  # 0, 0.0 and 0.00 are one value
    except ValueError:
        return text.lower()


def _entry(words: list[str]) -> Any:
    values = [parse_scalar(word) for word in words]
    return values[0] if len(values) == 1 else values or True


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
