"""A recipe that is being converted: settings with where they come from, and remarks on what has no counterpart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from moe_replay.errors import MoeReplayError
from moe_replay.tools.convert.shell_words import names_of
from moe_replay.train.config.checks import problems
from moe_replay.train.config.command_line import parse_scalar, parse_value
from moe_replay.train.config.file import toml_value
from moe_replay.train.config.foreign.advice import TABLES
from moe_replay.train.config.foreign.options import Option
from moe_replay.train.config.keys import all_fields, enclosing_table, fields_of, sections
from moe_replay.train.config.sections import Sections

WIDTH = 40


class ConversionError(MoeReplayError):
    """A command of another trainer that cannot be converted."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and the option that it comes from; `is_default`: the other trainer's default, not in the script."""

    value: Any
    source: str
    is_default: bool = False


@dataclass(slots=True)
class Draft:
    """Settings by dotted key, and remarks in the order in which they came up."""

    trainer: str
    settings: dict[str, Setting] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    header: list[str] = field(default_factory=list)

    def put(self, key: str, value: Any, source: str, *, is_default: bool = False) -> None:
        """Set a key; a default never replaces what was written, and None sets nothing."""
        known = self.settings.get(key)
        if value is not None and not (is_default and known is not None and not known.is_default):
            self.settings[key] = Setting(value, source, is_default)

    def drop(self, key: str, reason: str) -> None:
        """Remove a setting, if it is there; one that was written down is noted."""
        setting = self.settings.pop(key, None)
        if setting is not None and not setting.is_default:
            self.remark(setting.source, reason)

    def remark(self, option: str, reason: str) -> None:
        """Note an option that has no counterpart, or whose counterpart needs a look."""
        line = f"{option}: {reason}"
        if line not in self.remarks:
            self.remarks.append(line)

    def apply(self, shown: str, source: str, words: list[str], option: Option, *, is_default: bool = False) -> None:
        """Set what an option of the other trainer is here, or note that it is nothing.

        shown    the option as it was written, for remarks
        source   its name, for the comment beside the setting
        """
        if option.values is not None:
            value = _looked_up(option.values, words)
            if value is ...:
                listed = ", ".join(option.values)
                self._unless_default(is_default, shown, option.note or f"only {listed} can be converted")
            else:
                self.put(option.key, value, source, is_default=is_default)
            return
        if not option.key:
            self._unless_default(is_default, shown, option.note)
            return
        kind = all_fields()[option.key].annotation if _table(option.key) is None else None
        missing = [name for word in words for name in names_of(word)]
        if missing and kind is not None and str not in (kind, *getattr(kind, "__args__", ())):
            self.remark(shown, f"the script does not assign {', '.join(missing)}; set {option.key}")
            return
        if missing:
            self.remark(shown, f"the script does not assign {', '.join(missing)}; replace it in {option.key}")
        try:
            value = _entry(words) if kind is None else parse_value(source, words, kind)
        except MoeReplayError as error:
            self.remark(shown, str(error))
            return
        self.put(option.key, value, source, is_default=is_default)

    def _unless_default(self, is_default: bool, shown: str, reason: str) -> None:
        if not is_default:
            self.remark(shown, reason)

    def render(self) -> tuple[str, list[str]]:
        """Return the recipe as TOML with comments, and what our configuration would not accept of it."""
        config, wrong = self._validated()
        lines = [f"# {line}".rstrip() for line in self.header]
        lines += ["#", "# Not valid yet:", *(f"#   {problem}" for problem in wrong)] if wrong else []
        for name, section in sections():
            keys = [key for key, _ in fields_of(name, section) if self._holds(key)]
            body = [line for key in keys for line in self._lines(key, key.removeprefix(f"{name}."), config)]
            lines += ["", *([f"[{name}]"] if name else []), *body] if body else []
        if self.remarks:
            lines += ["", f"# Options of {self.trainer} without a counterpart, or that need a look:"]
            lines += [f"#   {line}" for remark in self.remarks for line in remark.splitlines()]
        return "\n".join(lines).lstrip("\n") + "\n", wrong

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
        """Return the settings without values that a key does not take, and what is wrong with all of them together."""
        while True:
            try:
                config = Sections.model_validate(self._tables())
            except ValidationError as error:
                wrong = {_key(problem["loc"], self.settings): problem["msg"] for problem in error.errors()}
            else:
                return config, list(problems(config))
            for key, message in wrong.items():
                setting = self.settings.pop(key)
                self.remark(f"{setting.source} {_shown(setting.value)}", f"{key}: {message}")

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


def _validated_value(config: Sections, key: str) -> Any:
    section, _, name = key.rpartition(".")
    return getattr(getattr(config, section) if section else config, name)


def _table(key: str) -> str | None:
    """Return the table that a key is an entry of; None if it is an entry of none."""
    return next((table for table in TABLES if key.startswith(f"{table}.")), None)


def _key(place: Iterable[Any], settings: Mapping[str, Setting]) -> str:
    dotted = ".".join(map(str, place))
    return next(key for key in settings if f"{dotted}.".startswith(f"{key}.") or key.startswith(f"{dotted}."))


def _looked_up(values: Mapping[str, Any], words: list[str]) -> Any:
    """Return our value for theirs, in any case; a switch without a value is on; ... if there is none."""
    name = " ".join(words) or "true"
    found = [ours for theirs, ours in values.items() if theirs.lower() == name.lower()]
    return found[0] if found else ...


def _entry(words: list[str]) -> Any:
    values = [parse_scalar(word) for word in words]
    return values[0] if len(values) == 1 else values or True


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
