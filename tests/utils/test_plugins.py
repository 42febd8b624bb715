"""Names of implementations in a configuration."""

from __future__ import annotations

import math

import pytest

from moe_replay.errors import MoeReplayError
from moe_replay.utils.plugins import PluginError, is_path, resolve, user_code

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


def test_other_forms_are_named() -> None:
    with pytest.raises(PluginError, match=r"reward\.functions: plain, or 'verl:module:name'"):
        resolve("qqq", {"plain": len}, kind="reward", key="reward.functions", forms="'verl:module:name'")


def test_what_user_code_raises_names_it() -> None:
    class OurError(MoeReplayError):
        """An error of the caller's."""

    with (
        pytest.raises(OurError, match=r"reward 'mine' raised ZeroDivisionError: division by zero \[sample 3\]") as info,
        user_code("reward 'mine'", OurError, sample=3),
    ):
        _ = 1 / 0
    assert isinstance(info.value.__cause__, ZeroDivisionError)
    with pytest.raises(PluginError, match="as it was"), user_code("reward 'mine'", OurError):
        raise PluginError("as it was")
    with pytest.raises(KeyboardInterrupt), user_code("reward 'mine'", OurError):
        raise KeyboardInterrupt
