"""Commands of trainers that are configured by Hydra overrides: `key=value`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import ClassVar

from moe_replay.tools.convert.draft import UNKNOWN, ConversionError, Draft
from moe_replay.train.config.foreign.options import Option, Table

NEVER = ("-1", "null", "none", "")
"""Values that set nothing."""


def overrides_of(words: list[str], entry_points: Sequence[str], trainer: str, command: str) -> list[str]:
    """Return what follows an entry point, or overrides without one; raise for anything else.

    command   of the trainer, for the error
    """
    for index, word in enumerate(words):
        if PurePath(word).name in entry_points or word.rpartition(".")[2] in entry_points:
            return words[index + 1 :]
    is_override = re.compile(r"\+{0,2}[a-z_]\w*(\.\w+)*=")
    has_dotted_key = any("." in word.partition("=")[0] for word in words)
    if words and is_override.match(words[0]) and has_dotted_key:
        return words
    raise ConversionError(
        f"not a command of {trainer}",
        expected=f"{command}, or key=value ...",
        found=shlex.join(words[:3]),
    )


def values_of(text: str) -> list[str]:
    """Return the items of a Hydra list, or the text itself: `["a","b"]`, `[a, b]`, `'a'`."""
    text = text.strip()
    if text.startswith(("[", "(")) and text.endswith(("]", ")")):
        return [_unquoted(item) for item in text[1:-1].split(",") if item.strip()]
    return [_unquoted(text)]


def _unquoted(text: str) -> str:
    text = text.strip()
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


class HydraCommand:
    """The overrides of one command and how they become settings of a draft.

    table, groups   our counterparts of the trainer's options, and of all options with a prefix
    options         of the command: dotted name -> text
    defaults        of the trainer, for names that the command does not set
    """

    table: ClassVar[Table]
    groups: ClassVar[Table]
    all_defaults: ClassVar[Mapping[str, str]]

    def __init__(self, draft: Draft, words: list[str]) -> None:
        self.draft = draft
        self.options: dict[str, str] = {}
        self.config_name = ""
        rest = iter(words)
        for word in rest:
            name, equals, value = word.partition("=")
            if name in ("--config-name", "--config-path", "--config-dir"):
                value = value if equals else next(rest, "")
                self.config_name += value if name == "--config-name" else ""
                if name != "--config-name":
                    draft.remark(word, "its files are not read: convert the YAML file itself, unless it is the default")
            elif word.startswith("~"):
                draft.remark(word, "deletions of keys are not converted", UNKNOWN)
            elif equals:
                self.options[name.lstrip("+").removeprefix("--")] = value
            else:
                draft.remark(word, "not a key=value override", UNKNOWN)
        self.defaults = {name: value for name, value in self.all_defaults.items() if name not in self.options}

    def shown(self, name: str) -> str:
        return f"{name}={self.options.get(name, self.defaults.get(name, ''))}"

    def text(self, name: str, default: str = "") -> str:
        """Return the value of an option, or the trainer's default for it."""
        return _unquoted(self.options.get(name, self.defaults.get(name, default)))

    def number(self, name: str, default: float) -> float:
        text = self.text(name)
        if text.lower() in NEVER:
            return default
        return self.draft.number(text, default, self.shown(name), self.table[name].key)

    def is_true(self, name: str) -> bool:
        return self.text(name).lower() == "true"

    def option(self, name: str) -> Option | None:
        """Return the counterpart of an option, by its name or its group; None if it is not known."""
        group = next((option for prefix, option in self.groups.items() if name.startswith(prefix)), None)
        return self.table.get(name, group)

    def apply_options(self) -> None:
        """Set the counterparts of all options that are not derived."""
        for name, text in [*self.options.items(), *self.defaults.items()]:
            option, is_default = self.option(name), name in self.defaults
            if option is None:
                self.draft.remark(self.shown(name), "whether it changes the run is not known", UNKNOWN)
            elif option.derived:
                continue
            elif _unquoted(text).lower() in NEVER:
                if option.key in ("checkpoint.every", "eval.every"):
                    self.draft.put(option.key, 0, name, is_default=is_default)
            else:
                self.draft.apply(self.shown(name), name, values_of(text), option, is_default=is_default)

    def path(self, name: str, key: str) -> None:
        paths = [path for path in values_of(self.options.get(name, "")) if path.lower() not in NEVER]
        for path in paths[1:]:
            self.draft.remark(f"{name}={path}", f"{key} takes one file; merge the files", "data")
        self.draft.put(key, paths[0] if paths else None, name)

    def batches(self, batch: str, mini_batch: str) -> None:
        """Set prompts and updates of a step from the sizes of batch and mini-batch, both in prompts."""
        prompts, mini = int(self.number(batch, 1024)), int(self.number(mini_batch, 256)) or 1
        self.draft.put("rollout.prompts_per_step", prompts, batch)
        if prompts % mini:
            self.draft.remark(self.shown(mini_batch), f"does not divide {prompts} prompts", "loss")
        self.draft.put("algorithm.updates_per_rollout", max(prompts // mini, 1), f"{batch} / {mini_batch}")

    def top_k(self, name: str) -> None:
        self.draft.put("rollout.top_k", int(max(self.number(name, 0), 0)) or None, name)

    def log(self, name: str) -> None:
        self.draft.log(values_of(self.text(name)), name, f"{name}=", is_default=name in self.defaults)
