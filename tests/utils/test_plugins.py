"""Names of implementations in a configuration."""

from __future__ import annotations

import math

import pytest

from moe_replay.utils.plugins import PluginError, is_path, resolve

KNOWN = {"plain": len, "lazy": "math:sqrt"}


def test_built_in_lazy_and_own_names_are_found() -> None:
    assert resolve("plain", KNOWN, kind="loss", key="algorithm.loss") is len
    assert resolve("lazy", KNOWN, kind="loss", key="algorithm.loss") is math.sqrt
    assert resolve("math:floor", KNOWN, kind="loss", key="algorithm.loss") is math.floor


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("lazzy", "unknown loss 'lazzy': expected algorithm.loss: lazy, plain, or 'module:name'. Did you mean 'lazy'"),
        ("qqq", "unknown loss 'qqq'"),
        (":floor", "unknown loss ':floor'"),
        ("nowhere:f", "loss 'nowhere:f' cannot be loaded: No module named 'nowhere'"),
        ("math:nothing", "cannot be loaded: module 'math' has no attribute 'nothing'"),
    ],
)
def test_other_names_are_refused(name: str, says: str) -> None:
    with pytest.raises(PluginError, match=says.replace(".", r"\.").replace("?", r"\?")):
        resolve(name, KNOWN, kind="loss", key="algorithm.loss")


def test_a_path_has_both_parts() -> None:
    assert [is_path(name) for name in ("a:b", "a.b:c", "a", "a:", ":b")] == [True, True, False, False, False]
