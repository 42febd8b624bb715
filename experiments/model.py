"""The model of the study: a mixture of experts of real shape, pre-trained on worked problems, and kept in a folder.

    python -m experiments.model --device cuda --minutes 8
    python -m experiments.model --device cuda --large --minutes 9

Pre-training stops at its time limit and continues with the next call. What comes out is judged on held-out problems
(accuracy at temperature 1, by teacher forcing) and by its routers: load, entropy, and what they know of the token.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from experiments import long_task, task
from experiments.scales import LARGE_SCALES, SCALES, Scale
from experiments.task import END, PAD, TOKENS, Problem
from moe_replay.demo.files import default_cache
from moe_replay.demo.warm_start import load_balancing_loss

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3MoeForCausalLM

SEED = 0
PAD_ID, END_ID = TOKENS.index(PAD), TOKENS.index(END)
IDS = {token: number for number, token in enumerate(TOKENS)}
AUX_LOSS = 0.01
CHECKED = 256
POOL = 16
"""Batches whose problems are sorted by length together, so that a batch has little padding."""
Encode = Callable[[str], list[int]]


class Language(NamedTuple):
    """Problems of a scale, and how their text becomes tokens; padding is PAD_ID and the end END_ID."""

    tokenizer: PreTrainedTokenizerFast
    encode: Encode
    kinds: Sequence[Callable[[Random, int], Problem]]

    def lessons(self, random: Random, steps: tuple[int, int], *, held_out: bool) -> Iterator[Problem]:
        """Yield problems without end."""
        return task.problems(random, steps, held_out=held_out, kinds=self.kinds)


def language_of(scale: Scale) -> Language:
    """Return the language of a scale; that of the long problems trains its tokenizer, which takes seconds."""
    if scale.task == "short":
        return Language(task.build_tokenizer(), characters, task.KINDS)
    tokenizer = long_task.build_tokenizer(scale.vocabulary)
    return Language(tokenizer, lambda text: tokenizer.backend_tokenizer.encode(text).ids, long_task.KINDS)


def characters(text: str) -> list[int]:
    """Return the tokens of `task.py`'s text."""
    return [IDS[letter] for letter in text]


def encoded(problem: Problem, encode: Encode = characters) -> list[int]:
    """Return prompt, working and end; the prompt is encoded by itself, as in RL."""
    return [*encode(problem.prompt), *encode(problem.worked), END_ID]


def model_folder(scale: Scale, work: Path | None = None) -> Path:
    """Return where the model of a scale and its data are kept, by everything that determines them."""
    of_runs = ("rl_steps", "prompts", "samples", "max_tokens", "eval_every", "kv_gib")
    own = {key: value for key, value in asdict(scale).items() if key not in of_runs}
    digest = hashlib.sha256(json.dumps(own, sort_keys=True).encode())
    for name in ("task.py", "long_task.py", "model.py"):
        digest.update(Path(__file__).with_name(name).read_bytes())
    return (work or default_cache() / "experiments") / f"model-{scale.name}-{digest.hexdigest()[:10]}"


def prepare(scale: Scale, device: str, work: Path | None = None, minutes: float = math.inf) -> Path:
    """Return the folder of the pre-trained model and its data; raise TimeoutError if the time runs out before."""
    folder = model_folder(scale, work)
    if (folder / "facts.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    language = language_of(scale)
    model = build_model(scale).to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    if not pretrain(model, scale, folder, device, time.monotonic() + 60 * minutes, language):
        raise TimeoutError(f"pre-training is not finished: the same command continues it ({folder})")
    facts = judge(model, scale, device, language)
    language.tokenizer.save_pretrained(folder / "model")
    model.save_pretrained(folder / "model")
    for name, count, held_out in (("train", scale.train_rows, False), ("eval", scale.eval_prompts, True)):
        lines = task.rows(count, language.lessons(Random(SEED + 1), scale.asked, held_out=held_out))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (folder / "facts.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
    return folder


def build_model(scale: Scale) -> Qwen3MoeForCausalLM:
    """Return the model with random weights."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=scale.vocabulary,
        hidden_size=scale.hidden,
        intermediate_size=3 * scale.hidden,
        moe_intermediate_size=scale.expert,
        num_hidden_layers=scale.layers,
        num_attention_heads=scale.heads,
        num_key_value_heads=max(scale.heads // 2, 1),
        head_dim=64 if scale.hidden >= 256 else 32,
        num_experts=scale.experts,
        num_experts_per_tok=scale.top_k,
        mlp_only_layers=[0],
        norm_topk_prob=True,
        max_position_embeddings=max(scale.context, 2048),
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
    )
    torch.manual_seed(SEED)
    return Qwen3MoeForCausalLM(config)


# ---- pre-training ----------------------------------------------------------------------------------------------------


def pretrain(
    model: Qwen3MoeForCausalLM, scale: Scale, folder: Path, device: str, until: float, language: Language
) -> bool:
    """Train on worked problems from where an earlier call stopped; return whether all steps are done.

    The optimizer has float32 weights of its own: updates of a bfloat16 weight would be lost in rounding.
    """
    weights = [parameter.detach().float() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(weights, betas=(0.9, 0.95), weight_decay=0.1, fused=device == "cuda")
    saved, done = folder / "pretraining.pt", 0
    if saved.exists():
        state = torch.load(saved, map_location=device, weights_only=True)
        torch._foreach_copy_(weights, state["weights"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["done"]
    _copy_weights(model, weights)
    model.train()
    began = time.monotonic()
    batches: list[list[list[int]]] = []
    for step in range(done, scale.steps):
        if step % POOL == 0 or not batches:
            batches = draw_batches(scale, step // POOL, language)[step % POOL :]
        loss = learn(model, optimizer, scale, step, batch_of(batches.pop(0), device))
        if step % max(scale.steps // 30, 1) == 0:
            print(f"pre-training: step {step}, loss {float(loss):.4f}, {time.monotonic() - began:.0f} s", flush=True)
        if time.monotonic() > until:
            state = {"weights": weights, "optimizer": optimizer.state_dict(), "done": step + 1}
            torch.save(state, saved.with_suffix(".partial"))
            saved.with_suffix(".partial").replace(saved)
            return step + 1 == scale.steps
    return True


def draw_batches(scale: Scale, pool: int, language: Language | None = None) -> list[list[list[int]]]:
    """Return the batches of a pool, each a list of sequences: problems of similar length together, in random order."""
    language = language or language_of(scale)
    random = Random(f"{SEED} {pool}")
    lessons = language.lessons(random, scale.taught, held_out=False)
    drawn, tokens = [], 0
    while tokens < POOL * scale.batch_tokens:
        drawn.append(encoded(next(lessons), language.encode))
        tokens += len(drawn[-1])
    drawn.sort(key=len)
    batches: list[list[list[int]]] = [[] for _ in range(POOL)]
    before = 0
    for sequence in drawn:
        batches[min(before * POOL // tokens, POOL - 1)].append(sequence)
        before += len(sequence)
    random.shuffle(batches)
    return batches


def batch_of(sequences: Sequence[list[int]], device: str) -> Tensor:
    """Return token ids (B, W), padded on the right."""
    width = max(map(len, sequences))
    padded = [sequence + [PAD_ID] * (width - len(sequence)) for sequence in sequences]
    return torch.tensor(padded).to(device, non_blocking=True)


def learn(model: Qwen3MoeForCausalLM, optimizer: torch.optim.Optimizer, scale: Scale, step: int, ids: Tensor) -> Tensor:
    """Take one step on the text and on the balance of the experts; return the loss of the text."""
    rate = min((step + 1) / scale.warmup, 0.5 * (1 + math.cos(math.pi * step / scale.steps)) * 0.9 + 0.1)
    for group in optimizer.param_groups:
        group["lr"] = scale.lr * rate
    is_token = ids.ne(PAD_ID)
    output = model(input_ids=ids, attention_mask=is_token.long(), output_router_logits=True)
    labels = ids.where(is_token, -100)[:, 1:]
    loss = cross_entropy(output.logits[:, :-1].float().transpose(1, 2), labels, ignore_index=-100)
    scores = output.router_logits
    balance = sum(load_balancing_loss(model.config, one.float(), is_token.long()) for one in scores)
    (loss + AUX_LOSS * balance / len(scores)).backward()
    weights = optimizer.param_groups[0]["params"]
    for weight, parameter in zip(weights, model.parameters(), strict=True):
        assert parameter.grad is not None
        weight.grad = parameter.grad.float()
    torch.nn.utils.clip_grad_norm_(weights, 1.0)
    optimizer.step()
    model.zero_grad()
    _copy_weights(model, weights)
    return loss.detach()


@torch.no_grad()
def _copy_weights(model: Qwen3MoeForCausalLM, weights: list[Tensor]) -> None:
    """Give the model the optimizer's weights, rounded to its own dtype."""
    torch._foreach_copy_(list(model.parameters()), weights)


# ---- what came out ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def judge(model: Qwen3MoeForCausalLM, scale: Scale, device: str, language: Language) -> dict[str, object]:
    """Return the chance of the worked answer at temperature 1 on held-out problems, and how the routers behave."""
    model.eval()
    facts: dict[str, object] = {"parameters": sum(one.numel() for one in model.parameters())}

    def held_out(seed: int, steps: tuple[int, int], count: int) -> list[Problem]:
        return list(islice(language.lessons(Random(seed), steps, held_out=True), count))

    for name, steps in (("taught", scale.taught), ("asked", scale.asked)):
        facts[f"right/{name}"] = _chance(model, held_out(SEED, steps, CHECKED), language.encode, device)
    sequences = [encoded(problem, language.encode) for problem in held_out(SEED + 2, scale.asked, 32)]
    facts["tokens/asked"] = max(map(len, sequences))
    ids = batch_of(sequences, device)
    output = model(input_ids=ids, output_router_logits=True)
    real = ids.ne(PAD_ID).ravel()
    layers = [_routing(one.float()[real], ids.ravel()[real], scale) for one in output.router_logits]
    for key in layers[0]:
        facts[f"routers/{key}"] = [round(layer[key], 4) for layer in layers]
    return facts


def _chance(model: Qwen3MoeForCausalLM, asked: Sequence[Problem], encode: Encode, device: str) -> float:
    """Return the mean probability of writing the working and the answer exactly so."""
    total = 0.0
    for start in range(0, len(asked), 32):
        part = asked[start : start + 32]
        ids = batch_of([encoded(problem, encode) for problem in part], device)
        place = torch.arange(ids.shape[1], device=device)
        prompts = torch.tensor([len(encode(problem.prompt)) for problem in part], device=device)
        wanted = (place >= prompts[:, None]) & ids.ne(PAD_ID)
        logits = model(input_ids=ids).logits[:, :-1]
        losses = cross_entropy(logits.float().transpose(1, 2), ids[:, 1:], reduction="none")
        total += float((-(losses * wanted[:, 1:]).sum(1)).exp().sum())
    return total / len(asked)


def _routing(scores: Tensor, ids: Tensor, scale: Scale) -> dict[str, float]:
    """Return how even, how sure and how dependent on the token the choice of one layer is; scores are (T, E)."""
    chosen = scores.topk(scale.top_k).indices
    load = torch.bincount(chosen.ravel(), minlength=scale.experts).float()
    shares = scores.softmax(-1)
    entropy = -(shares * shares.clamp_min(1e-12).log()).sum(-1).mean()
    joint = torch.zeros(scale.vocabulary, scale.experts, device=scores.device)
    joint.index_put_((ids.repeat_interleave(scale.top_k), chosen.ravel()), torch.ones(()).to(joint), accumulate=True)
    joint /= joint.sum()
    apart = joint.sum(1, keepdim=True) * joint.sum(0, keepdim=True)
    information = (joint * (joint / apart.clamp_min(1e-12)).clamp_min(1e-12).log())[joint > 0].sum()
    return {
        "largest_load": float(load.max() / load.mean()),
        "idle_experts": float((load == 0).sum()),
        "entropy": float(entropy),
        "information_on_token": float(information),
    }


def main() -> None:
    """Pre-train, or say what the model is that is there."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", choices=SCALES, default="cpu")
    options.add_argument("--large", action="store_true", help="the larger model, on problems that take 1,000 tokens")
    options.add_argument("--minutes", type=float, default=math.inf)
    options.add_argument("--work", type=Path)
    chosen = options.parse_args()
    scale = (LARGE_SCALES if chosen.large else SCALES)[chosen.device]
    folder = prepare(scale, chosen.device, chosen.work, chosen.minutes)
    print(folder, (folder / "facts.json").read_text(encoding="utf-8"), sep="\n")


if __name__ == "__main__":
    main()
