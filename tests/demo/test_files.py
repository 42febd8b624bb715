"""The embedded default as files: made once, found again, whole or not there, and loadable by everything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import moe_replay as mr
from moe_replay import demo
from moe_replay.demo import files as files_module
from moe_replay.demo.model import FULL, QUICK, VOCABULARY, build_model
from moe_replay.demo.task import CHARACTERS, Problem
from moe_replay.demo.warm_start import expected_accuracy, warm_start
from moe_replay.train.rollout.prompts import Chat, load_prompts, read_rows

pytest.importorskip("transformers", reason="needs Transformers")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def made(cache: Path) -> demo.DemoFiles:
    return demo.prepare(cache, quick=True, status=lambda line: None)


def load(made: demo.DemoFiles):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(made.model).eval(), AutoTokenizer.from_pretrained(made.model)


def test_it_is_made_once(made, cache):
    before = {file: file.stat().st_mtime_ns for file in cache.rglob("*")}
    told: list[str] = []
    assert demo.prepare(cache, quick=True, status=told.append) == made
    assert {file: file.stat().st_mtime_ns for file in cache.rglob("*")} == before
    assert len(told) == 1
    assert str(made.model.parent) in told[0]


def test_only_whole_ones_are_left(made, cache, monkeypatch):
    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(files_module, "rows", killed)  # the model is written by then, the data is not
        patch.setattr(files_module, "warm_start", lambda *_: 0.0)
        with pytest.raises(KeyboardInterrupt):
            demo.prepare(cache / "other", quick=True, status=lambda line: None)
    assert list((cache / "other").iterdir()) == []


def test_another_run_may_be_quicker(made, cache, monkeypatch):
    """Two runs make it at the same time: the later one takes what the other made."""
    theirs = cache / "race" / made.model.parent.name

    def overtaken(*_: object) -> float:
        theirs.mkdir(parents=True)
        (theirs / "train.jsonl").write_text("theirs")
        return 0.0

    monkeypatch.setattr(files_module, "warm_start", overtaken)
    told: list[str] = []
    found = demo.prepare(cache / "race", quick=True, status=told.append)
    assert "pre-training" in told[0], "what takes minutes is announced"
    assert found.train.read_text() == "theirs"
    assert list((cache / "race").iterdir()) == [theirs]


def test_its_files_have_the_permissions_of_the_umask(made, tmp_path):
    plain = tmp_path / "plain"
    plain.touch()
    files = [path for path in made.model.parent.rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"model.safetensors", "config.json", "train.jsonl"}
    assert {path.name: path.stat().st_mode for path in files} == {path.name: plain.stat().st_mode for path in files}


def test_everything_that_determines_it_names_the_folder(made, cache):
    assert files_module._fingerprint(QUICK) in made.model.parent.name
    assert files_module._fingerprint(FULL) != files_module._fingerprint(QUICK)


def test_the_cache_is_in_the_users_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert files_module.default_cache() == tmp_path / "moe-replay"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert files_module.default_cache() == tmp_path / ".cache" / "moe-replay"


def test_the_data_can_be_trained_on(made):
    _, tokenizer = load(made)
    for file, count in ((made.train, QUICK.train_rows), (made.eval, QUICK.eval_rows)):
        prompts = load_prompts(read_rows(file), tokenizer, max_prompt_length=16, chat=Chat("none"))
        assert len(prompts) == count
        for prompt in prompts:
            assert tokenizer.decode(prompt.token_ids) == prompt.content
            assert str(sum(map(int, prompt.content[:-1].split("+")))) == prompt.columns["solution"]


def test_a_token_is_a_character(made):
    _, tokenizer = load(made)
    ids = tokenizer(CHARACTERS)["input_ids"]
    assert len(set(ids)) == len(ids) == len(CHARACTERS)
    assert tokenizer.decode(ids) == CHARACTERS
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == CHARACTERS
    assert tokenizer("x")["input_ids"] == [tokenizer.unk_token_id]
    assert len(tokenizer) <= VOCABULARY


def test_a_chat_is_rendered(made):
    _, tokenizer = load(made)
    chat = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    assert text == "<user>1+2=<end><assistant>3<end>"
    asked = tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    assert asked == "<user>1+2=<end><assistant>"
    assert tokenizer.convert_ids_to_tokens(tokenizer(asked)["input_ids"])[-1] == "<assistant>"


def test_the_model_is_the_one_that_was_asked_for(made):
    model, tokenizer = load(made)
    replay = mr.attach(model)
    assert replay.layers == tuple(range(1, QUICK.layers))  # the first layer is dense
    assert (replay.topology.num_experts, replay.topology.top_k) == (QUICK.num_experts, QUICK.top_k)
    assert model.config.vocab_size % 4 == 0
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.config.pad_token_id == tokenizer.pad_token_id
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_the_warm_start_teaches(made):
    model, tokenizer = load(made)
    asked = [Problem((a, b)) for a in range(1, 10) for b in range(1, 10)]
    before, after = (expected_accuracy(one, tokenizer, asked) for one in (build_model(QUICK), model))
    assert after > 10 * before


def test_the_chance_of_a_right_answer_is_that_of_sampling(made):
    model, tokenizer = load(made)
    problem = Problem((4, 7))
    chance = 0.0
    for answer in (problem.solution, problem.worked):
        ids = torch.tensor([tokenizer(problem.prompt + answer + "<end>")["input_ids"]])
        with torch.no_grad():
            logprobs = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])
        chance += float(logprobs[len(problem.prompt) - 1 :].sum().exp())
    assert expected_accuracy(model, tokenizer, [problem]) == pytest.approx(chance, rel=1e-4)


def test_the_warm_start_is_that_of_its_seed(made):
    """Whatever the number of threads: it takes one, in which it is quickest, and gives the others back."""
    _, tokenizer = load(made)
    short = replace(QUICK, layers=2, batch_size=8, max_steps=2, mixed_steps=1, warmup_steps=1)
    trained = [build_model(short) for _ in range(2)]
    before, during, after = torch.get_num_threads(), [], []
    for model, threads in zip(trained, (1, 2), strict=True):
        torch.set_num_threads(threads)
        warm_start(model, tokenizer, short, lambda line: during.append(torch.get_num_threads()))
        after.append(torch.get_num_threads())
    torch.set_num_threads(before)
    assert (set(during), after) == ({1}, [1, 2])
    first, second = (model.state_dict() for model in trained)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_making_a_model_leaves_the_random_state_alone():
    before = torch.random.get_rng_state()
    build_model(QUICK)
    assert torch.equal(torch.random.get_rng_state(), before)


def heaviest_loads(model, tokenizer) -> np.ndarray:
    """(layers,) the share of the choices that the most used expert of each layer gets, on worked problems."""
    replay = mr.attach(model)
    texts = [Problem((a, b)) for a in range(1, 10) for b in range(1, 10)]
    ids = [np.array(tokenizer(text.prompt + text.worked)["input_ids"]) for text in texts]
    layout = mr.TokenLayout.padded([len(one) for one in ids])
    fed = torch.tensor(layout.fed_token_ids(ids)).long().clamp(min=0)
    with torch.no_grad(), replay.record() as recording:
        model(input_ids=fed, use_cache=False)
    replay.detach()
    chosen = np.concatenate([trace.routed_experts for trace in recording.traces(layout, ids)])
    return np.array([np.bincount(layer.ravel()).max() / layer.size for layer in chosen.swapaxes(0, 1)])


def test_experts_are_balanced(made):
    _, tokenizer = load(made)
    short = replace(QUICK, max_steps=15, mixed_steps=0, warmup_steps=1)
    free, balanced = build_model(short), build_model(short)
    free.config.router_aux_loss_coef, balanced.config.router_aux_loss_coef = 0.0, 1.0
    for model in (free, balanced):
        warm_start(model, tokenizer, short, lambda line: None)
    assert (heaviest_loads(balanced, tokenizer) < heaviest_loads(free, tokenizer)).all()
