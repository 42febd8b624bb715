"""Settings of a run inside another trainer."""

from __future__ import annotations

import pytest

from moe_replay.integrations.hosts import HostError, ReplaySettings


def test_what_a_trainer_leaves_unset_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_REPLAY_CHECK_EVERY", "7")
    found = ReplaySettings.read({"mode": "R3", "check_every": None, "record_file": None, "_target_": "x"})
    assert found == ReplaySettings(mode="R3", check_every=7)
    assert ReplaySettings.read({"mode": "R3", "check_every": 0}).check_every == 0
    with pytest.raises(HostError, match="record_file"):
        ReplaySettings.read({"record_file": "routes"})
