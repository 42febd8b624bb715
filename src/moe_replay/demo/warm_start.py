"""A short supervised phase: the model is right now and then, so that reinforcement has something to lift."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from random import Random
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from moe_replay.demo.arithmetic import Problem, problems
from moe_replay.demo.settings import DemoSettings
from moe_replay.demo.tokenizer import PAD, TOKENS
from moe_replay.utils.progress import StatusCallback

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

IGNORED = -100
CHECK_EVERY = 25
CHECKED_PROBLEMS = 256


def warm_start(
    model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, settings: DemoSettings, status: StatusCallback
) -> float:
    """Teach the working of sums, then estimates beside it; the chance of a right answer that this comes to."""
    random = Random(settings.seed)
    lessons = problems(random, settings.terms, held_out=False)
    checked = list(islice(problems(Random(settings.seed), settings.terms, held_out=True), CHECKED_PROBLEMS))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    began, last = time.monotonic(), settings.max_steps + settings.mixed_steps

    def learn(step: int, worked: float) -> float:
        asked = islice(lessons, settings.batch_size)
        answered = [(one.prompt, one.worked if random.random() < worked else one.estimate(random)) for one in asked]
        for group in optimizer.param_groups:
            group["lr"] = _learning_rate(step, settings)
        return _learn(model, optimizer, *_batch(tokenizer, answered))

    def check(step: int, loss: float, after: str = "") -> float:
        chance, seconds = chance_of_right_answer(model, tokenizer, checked), time.monotonic() - began
        told = f"step {step} of at most {last}, loss {loss:.3f}, {chance:.0%} right{after}, {seconds:.0f} s"
        status(f"pre-training: {told}")
        return chance

    model.train()
    with one_thread():
        for step in range(1, settings.max_steps + 1):
            loss = learn(step, worked=1.0)
            if step % CHECK_EVERY == 0 and check(step, loss) >= settings.enough:
                break
        for _ in range(settings.mixed_steps):
            loss = learn(step, worked=settings.worked)
        model.eval()
        return check(step + settings.mixed_steps, loss, after=" after estimates were taught too")


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute in this thread alone: operations this small take longer when threads have to wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def chance_of_right_answer(
    model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, asked: Sequence[Problem]
) -> float:
    """Mean probability of a right answer at temperature 1, with the working or without: the reward to expect."""
    answers = [(problem.prompt, answer) for problem in asked for answer in (problem.solution, problem.worked)]
    token_ids, labels = _batch(tokenizer, answers)
    with torch.no_grad():
        losses = _token_losses(model(input_ids=token_ids).logits, labels)
    return float((-losses.sum(dim=1)).exp().sum()) / len(asked)


def _learning_rate(step: int, settings: DemoSettings) -> float:
    return settings.learning_rate * min(step / settings.warmup_steps, 1 - 0.9 * step / settings.max_steps)


def _learn(model: Qwen3MoeForCausalLM, optimizer: torch.optim.Optimizer, token_ids: Tensor, labels: Tensor) -> float:
    """One step; the loss that balances the experts is added, or a few of them would take all tokens."""
    is_token = token_ids.ne(TOKENS.index(PAD)).long()
    output = model(input_ids=token_ids, attention_mask=is_token, output_router_logits=True)
    loss = _token_losses(output.logits, labels).sum() / (labels != IGNORED).sum()
    balance = sum(load_balancing_loss(model.config, scores, is_token) for scores in output.router_logits)
    (loss + model.config.router_aux_loss_coef * balance).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def load_balancing_loss(config: Qwen3MoeConfig, scores: Tensor, is_token: Tensor) -> Tensor | int:
    """Return Transformers' own loss of one layer: over all layers at once, an expert may lie idle in one of them."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    return load_balancing_loss_func((scores,), config.num_experts, config.num_experts_per_tok, is_token)


def _token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """(B, W - 1) the negative log-prob of each labelled token, 0 for the others."""
    return cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], ignore_index=IGNORED, reduction="none")


def _batch(tokenizer: PreTrainedTokenizerFast, lessons: Sequence[tuple[str, str]]) -> tuple[Tensor, Tensor]:
    """Token ids (B, W), padded on the right, and labels (B, W): the answers and their ends."""
    prompts = [len(prompt) for prompt, _ in lessons]  # one token a character
    texts = [prompt + answer + str(tokenizer.eos_token) for prompt, answer in lessons]
    token_ids = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")["input_ids"]
    place = torch.arange(token_ids.shape[1])
    is_answer = (place >= torch.tensor(prompts)[:, None]) & (token_ids != tokenizer.pad_token_id)
    return token_ids, token_ids.where(is_answer, IGNORED)
