"""TRL's own trainer with replay: nothing changes where nothing should, and routes reach the tokens they belong to."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_replay.integrations.trl import SAMPLES
from tests.combinations import with_thorough, with_whole_runs
from tests.integrations.foreign import Watched, Watcher, experts_of, foreign_rollout, foreign_trace
from tests.integrations.trl_tiny import make, model, numbers_of_trl, prompts, tokenizer, trained

pytest.importorskip("trl")
pytestmark = pytest.mark.slow

TWICE = {"num_iterations": 2, "gradient_accumulation_steps": 1, "max_steps": 4}
CHECKPOINTS = {
    "none": {},
    "checkpoints": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
}


def assert_same_run(found: tuple, expected: tuple) -> None:
    """The same numbers, and the same weights bit for bit."""
    assert numbers_of_trl(found[0]) == numbers_of_trl(expected[0])
    different = [name for name, weight in expected[1].items() if not torch.equal(found[1][name], weight)]
    assert not different


# ---- nothing changes where nothing should ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "replay"),
    with_whole_runs(
        with_thorough(
            itertools.product([TWICE, CHECKPOINTS["checkpoints"], {"beta": 0.1}], ["off", "observe"]),
            [(TWICE, "observe"), (CHECKPOINTS["checkpoints"], "off")],
        ),
        [({"beta": 0.1}, "off"), (CHECKPOINTS["checkpoints"], "observe")],
    ),
    ids=str,
)
def test_without_replay_it_is_trl(replay: str, setting: dict, tmp_path: Path) -> None:
    policy = saved_model(tmp_path) if "beta" in setting else model()
    expected = trained(make(tmp_path, None, policy=copy.deepcopy(policy), **setting))
    assert_same_run(trained(make(tmp_path, replay, policy=policy, **setting)), expected)


@pytest.mark.parametrize(
    ("replay", "checkpoints", "cache"),
    with_whole_runs(
        [
            ("r3", "none", True),
            ("r3", "none", False),
            ("r3", "checkpoints", True),
            ("r3", "reentrant", True),
            ("r2", "none", True),
        ],
        [("r3", "none", True), ("r3", "reentrant", True)],
    ),
)
def test_the_same_routes_give_the_same_numbers(replay: str, checkpoints: str, cache: bool, tmp_path: Path) -> None:
    setting = CHECKPOINTS[checkpoints]
    expected = trained(make(tmp_path, None, policy=model(use_cache=cache), **setting))
    found = trained(make(tmp_path, replay, policy=model(use_cache=cache), **setting))
    assert_same_run(found, expected)
    for entry in found[0]:
        if replay == "r3":
            assert entry["routing/agreement"] == 1.0
            assert 0.85 < entry["routing/replayed_fraction"] < 0.95  # all tokens but the last of each sample
            assert entry["mismatch/rollout_vs_train/logprob_abs_diff/max"] < 1e-5
        else:  # TRL makes no old-log-prob pass where all updates have the weights of the rollout
            assert entry["routing/replayed_fraction"] == 0.0
            assert "routing/agreement" not in entry


def test_an_evaluation_is_not_replayed(tmp_path: Path) -> None:
    from datasets import Dataset

    questions = Dataset.from_dict({"prompt": ["1+1=", "20+3="] * 4})
    found = {}
    for replay in (None, "r3"):
        trainer = make(tmp_path, replay, rollout_func=foreign_rollout, per_device_eval_batch_size=4)
        found[replay] = trainer.evaluate(questions)
    assert numbers_of_trl([found["r3"]]) == numbers_of_trl([found[None]])


def saved_model(folder: Path) -> Any:
    """TRL loads the reference model from where the policy came from."""
    from transformers import AutoModelForCausalLM

    model().save_pretrained(folder / "policy")
    return AutoModelForCausalLM.from_pretrained(folder / "policy")


# ---- routes reach the tokens they belong to --------------------------------------------------------------------------

WAYS_THROUGH_TRL: dict[str, dict[str, Any]] = {
    "one update": {"gradient_accumulation_steps": 1},
    "accumulated": {"gradient_accumulation_steps": 2},
    "one sample a step": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
    "more updates than generations": {"gradient_accumulation_steps": 1, "steps_per_generation": 2},
    "two iterations": TWICE,
    "iterated and accumulated": {"num_iterations": 2, "gradient_accumulation_steps": 2, "max_steps": 4},
    "padded wider": {"pad_to_multiple_of": 8},
    "checkpoints": {**TWICE, **CHECKPOINTS["checkpoints"]},
    "reentrant": {**TWICE, **CHECKPOINTS["reentrant"]},
}


def watched_run(folder: Path, replay: str, **setting: Any) -> list[Watched]:
    policy = model()
    watcher = Watcher(policy)
    trained(make(folder, replay, policy=policy, rollout_func=foreign_rollout, **setting))
    return watcher.passes


@pytest.mark.parametrize("setting", WAYS_THROUGH_TRL.values(), ids=WAYS_THROUGH_TRL)
def test_every_token_goes_where_the_rollout_sent_it(setting: dict, tmp_path: Path) -> None:
    passes = watched_run(tmp_path, "r3", **setting)
    again = 2 if setting.get("gradient_checkpointing") else 1
    updates = [one for one in passes if one.with_gradient]
    assert len(updates) >= 3
    for one in passes:  # the old-log-prob passes too
        went_there, pairs = one.count(experts_of)
        assert went_there == pairs > 0
        if not setting.get("gradient_checkpointing"):
            assert {len(routes) for routes in one.routes.values()} == {1}
    if again == 2:
        assert any(len(routes) == again for one in passes for routes in one.routes.values())


def test_routes_are_foreign_to_the_model(tmp_path: Path) -> None:
    """Or the test above would show nothing."""
    counts = [one.count(experts_of) for one in watched_run(tmp_path, "observe", **TWICE)]
    assert sum(there for there, _ in counts) < 0.1 * sum(pairs for _, pairs in counts)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


class Calculator:
    """The same tool as an environment."""

    def reset(self, **kwargs: Any) -> None:
        pass

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: the first
            b: the second
        """
        return add(a, b)


CHAT = """{% for message in messages %}{{ message.content }}
{%- for call in message.tool_calls or [] %}{{ call }}{% endfor %}
{%- if message.role == "assistant" %}<end>{% endif %}{% endfor %}{% if add_generation_prompt %}={% endif %}"""


def calling_tokenizer(calls: Iterator[bool]) -> Any:
    """A tokenizer that finds a call of the tool in a completion where the next of `calls` says so."""
    found = tokenizer()
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}

    def parse_response(ids: list[int], **kwargs: Any) -> dict[str, Any]:
        message = {"role": "assistant", "content": found.decode(ids, skip_special_tokens=True)}
        return message | {"tool_calls": [call]} if next(calls) else message

    found.chat_template, found.response_template, found.parse_response = CHAT, {}, parse_response
    return found


def conversations() -> Any:
    return prompts().map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})


def test_r2_takes_the_routes_of_the_old_pass(tmp_path: Path) -> None:
    """In the second iteration the weights have moved far, the routes of each sample have not."""

    def by_sample(one: Watched) -> dict[tuple[int, ...], list]:
        found = {}
        for row in range(len(one.ids)):
            held = one.mask[row].bool()
            key = tuple(one.ids[row, held].tolist())
            found[key] = [one.routes[layer][0][row, held].tolist() for layer in sorted(one.routes)]
        return found

    old: dict[tuple[int, ...], list] = {}
    updates = 0
    for one in watched_run(tmp_path, "r2", **TWICE):
        if not one.with_gradient:
            old = old | by_sample(one)
            continue
        updates += 1
        for tokens, routes in by_sample(one).items():
            assert routes == old[tokens]
    assert updates == 4
    moved = trained(make(tmp_path, "r2", **TWICE))[0][1]
    assert moved["routing/agreement"] < 0.5
    assert moved["routing/replayed_fraction"] == 1.0


@pytest.mark.parametrize("given", [{"tools": [add]}, {"environment_factory": Calculator}], ids=["tools", "environment"])
def test_r2_replays_samples_that_called_a_tool(given: dict, tmp_path: Path) -> None:
    """One sample of four calls it: TRL generates once more, for that sample alone."""
    trainer = make(
        tmp_path,
        "r2",
        processing_class=calling_tokenizer(itertools.cycle([False, True, False, False, False])),
        train_dataset=conversations(),
        reward_funcs=lambda completions, **kwargs: [float(len(str(messages)) % 7) for messages in completions],
        max_completion_length=24,
        generation_kwargs={"max_new_tokens": 5},  # of each turn, so that the answer of the tool fits
        **TWICE,
        **given,
    )
    logged, _ = trained(trainer)
    assert [entry["tools/call_frequency"] for entry in logged[::2]] == [0.25, 0.25]
    assert [entry["tools/failure_frequency"] for entry in logged[::2]] == [0, 0]
    assert [entry["routing/replayed_fraction"] for entry in logged] == [1.0] * 4
    (batch,) = trainer._buffered_inputs
    answered = 0
    for row, sample in enumerate(batch[SAMPLES]):
        prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()]
        completion = batch["completion_ids"][row][batch["completion_mask"][row].bool()]
        assert sample.token_ids == (*prompt.tolist(), *completion.tolist())
        assert sample.prompt_length == len(prompt)
        answered += 0 in batch["tool_mask"][row][: len(completion)].tolist()
    assert answered == 1


def test_masked_completions_keep_their_routes(tmp_path: Path) -> None:
    """TRL takes truncated completions out of the attention, and leaves their ids in the batch."""
    logged, _ = trained(
        make(tmp_path, "r3", rollout_func=foreign_rollout, mask_truncated_completions=True, temperature=0.7)
    )
    assert all(entry["completions/clipped_ratio"] > 0 for entry in logged)
    assert all(entry["routing/replayed_fraction"] > 0.5 for entry in logged)


# ---- the reference is never replayed ---------------------------------------------------------------------------------


@pytest.mark.parametrize("peft", [False, True])
def test_the_reference_routes_as_it_likes(peft: bool, tmp_path: Path) -> None:
    policy = saved_model(tmp_path)
    batches = {}
    for replay in (None, "r3"):
        options = {"peft_config": adapters()} if peft else {}
        trainer = make(
            tmp_path, replay, policy=copy.deepcopy(policy), rollout_func=foreign_rollout, beta=0.1, **TWICE, **options
        )
        trained(trainer)
        batches[replay] = trainer._buffered_inputs[0]
    by_tokens = {replay: in_order(batch) for replay, batch in batches.items()}
    assert torch.equal(by_tokens["r3"]["ref_per_token_logps"], by_tokens[None]["ref_per_token_logps"])
    assert not torch.allclose(by_tokens["r3"]["old_per_token_logps"], by_tokens[None]["old_per_token_logps"])


def in_order(batch: dict) -> dict:
    """The batch as it was before TRL shuffled it."""
    order = sorted(range(len(batch["completion_ids"])), key=lambda i: batch["completion_ids"][i].tolist())
    return {name: batch[name][order] for name in ("ref_per_token_logps", "old_per_token_logps")}


def adapters() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


def test_adapters_with_the_same_routes_are_trl(tmp_path: Path) -> None:
    runs = {replay: trained(make(tmp_path, replay, peft_config=adapters())) for replay in (None, "r3")}
    assert_same_run(runs["r3"], runs[None])
    assert all(entry["routing/agreement"] == 1.0 for entry in runs["r3"][0])


# ---- what is logged --------------------------------------------------------------------------------------------------


def test_what_is_logged(tmp_path: Path) -> None:
    logged, _ = trained(make(tmp_path, "r3", temperature=0.7, **TWICE))
    first, second = logged[:2]
    assert {f"routing/agreement/layer_{layer:03d}" for layer in (1, 2, 3)} <= first.keys()
    assert first["routing/unrouted_fraction"] == pytest.approx(1 - first["routing/replayed_fraction"])
    assert first["mismatch/old_vs_train/k3_kl"] == 0.0
    assert first["mismatch/rollout_vs_old/logprob_abs_diff/max"] < 1e-5  # at the temperature that TRL scores with
    assert second["mismatch/rollout_vs_old/logprob_abs_diff/max"] < 1e-5
    assert second["mismatch/old_vs_train/logprob_abs_diff/mean"] > 0.1
    assert second["mismatch/rollout_vs_train/logprob_abs_diff/mean"] == pytest.approx(
        second["mismatch/old_vs_train/logprob_abs_diff/mean"], abs=1e-5
    )
    assert second["routing/agreement"] < 0.9


def test_log_probs_of_the_rollout_are_those_that_it_says(tmp_path: Path) -> None:
    logged, _ = trained(make(tmp_path, "r2", rollout_func=foreign_rollout, **TWICE))
    assert logged[0]["mismatch/rollout_vs_old/logprob_abs_diff/mean"] > 0.1


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_a_rollout_without_routes_is_refused(tmp_path: Path) -> None:
    def forgetful(prompts: list[str], trainer: Any) -> dict:
        return {name: value for name, value in foreign_rollout(prompts, trainer).items() if name != "routes"}

    with pytest.raises(ValueError, match="returned no routes"):
        make(tmp_path, "r3", rollout_func=forgetful).train()
    trained(make(tmp_path, "r2", rollout_func=forgetful))


def test_routes_of_other_tokens_are_refused(tmp_path: Path) -> None:
    def confused(prompts: list[str], trainer: Any) -> dict:
        rollout = foreign_rollout(prompts, trainer)
        return rollout | {"routes": [foreign_trace([2, 3, 4]), *rollout["routes"][1:]]}

    with pytest.raises(ValueError, match=r"other tokens than its sample \[sample 0\]"):
        make(tmp_path, "r3", rollout_func=confused).train()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replay": "r4"}, "unknown way to replay"),
        ({"use_vllm": True, "vllm_mode": "server"}, "TRL's own vLLM returns no routes"),
        ({"use_transformers_continuous_batching": True}, "mixes samples"),
        ({"engine": object(), "rollout_func": foreign_rollout}, "both an engine and a rollout_func"),
        ({"engine": object(), "min_p": 0.1}, "with an engine"),
        ({"engine": object(), "use_vllm": True, "replay": "r2"}, "both an engine and a backend"),
        ({"tools": [print]}, "cuts samples into calls"),
        ({"engine": object(), "tools": [print], "replay": "off"}, "both an engine and TRL's tool loop"),
        ({"engine": object(), "environment_factory": object, "replay": "r2"}, "both an engine and TRL's tool loop"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(options: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        make(tmp_path, **{"replay": "r3"} | options)


def test_an_older_trl_is_refused_and_a_newer_one_is_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import trl

    from moe_replay.integrations import trl as integration

    monkeypatch.setattr(integration, "version", lambda _: "1.15.2")
    with pytest.raises(ValueError, match=r"too old: expected at least 1\.16, found 1\.15\.2"):
        make(tmp_path, replay="r2")
    monkeypatch.setattr(integration, "version", lambda _: "1.17.0")
    make(tmp_path, replay="r2")
    assert "TRL 1.17.0 is newer than the newest tested (1.16); it is tried" in capsys.readouterr().err
    monkeypatch.delattr(trl.GRPOTrainer, "_generate_single_turn")
    with pytest.raises(ValueError, match=r"_generate_single_turn has changed.*TRL 1\.17\.0: no such method"):
        make(tmp_path, replay="r2")


def test_the_mixin_comes_first() -> None:
    from trl import GRPOTrainer

    from moe_replay.integrations.trl import RouterReplayMixin

    with pytest.raises(ValueError, match="comes before GRPOTrainer"):
        type("Wrong", (GRPOTrainer, RouterReplayMixin), {})
    with pytest.raises(ValueError, match="comes before GRPOTrainer"):
        type("Alone", (RouterReplayMixin,), {})
