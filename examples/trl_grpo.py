"""TRL's GRPOTrainer on a tiny MoE, without replay and with R3. Under two minutes on a CPU.

python examples/trl_grpo.py
"""

import tempfile

import torch
from datasets import Dataset
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl import GRPOConfig, GRPOTrainer

from moe_replay.demo.model import build_tokenizer
from moe_replay.integrations.trl import RouterReplayMixin


class ReplayTrainer(RouterReplayMixin, GRPOTrainer):
    """TRL's trainer, with routes."""


def digits(completions: list[str], **_: object) -> list[float]:
    """Reward the fraction of digits in an answer, which can be learned in a few steps."""
    return [sum(character.isdigit() for character in text) / max(len(text), 1) for text in completions]


def tiny_model(vocabulary: int) -> Qwen3MoeForCausalLM:
    """Build one dense and five MoE layers in bfloat16, with weights so large that a change of experts matters."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=vocabulary, hidden_size=64, moe_intermediate_size=64, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=64, num_experts_per_tok=2, norm_topk_prob=True,
        mlp_only_layers=[0], initializer_range=0.2, eos_token_id=1, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config).to(torch.bfloat16)


def run(folder: str, replay: str) -> dict[str, float]:
    """Train for a few steps; return the mean of each logged metric."""
    tokenizer = build_tokenizer()
    settings = GRPOConfig(
        output_dir=folder, use_cpu=True, bf16=False, report_to=[], save_strategy="no", logging_steps=1,
        disable_tqdm=True, per_device_train_batch_size=16, num_generations=8, max_completion_length=24, max_steps=8,
        gradient_accumulation_steps=1, num_iterations=2, learning_rate=3e-4, seed=0,
    )  # fmt: skip
    trainer = ReplayTrainer(
        model=tiny_model(len(tokenizer)),
        reward_funcs=digits,
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": [f"{a}+{b}=" for a in range(1, 20) for b in range(1, 20)]}),
        processing_class=tokenizer,
        replay=replay,
    )
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {name: sum(step[name] for step in steps) / len(steps) for name in SHOWN}


SHOWN = {
    "routing/agreement": "the trainer's own routers agree with the rollout",
    "routing/replayed_fraction": "tokens that took the routes of the rollout",
    "mismatch/rollout_vs_old/logprob_abs_diff/mean": "|d log-prob|, rollout and old-log-prob pass",
    "mismatch/rollout_vs_old/k3_kl": "KL, rollout and old-log-prob pass",
    "mismatch/rollout_vs_old/ratio/max": "largest ratio, rollout and old-log-prob pass",
    "mismatch/old_vs_train/ess": "effective share of the samples in an update",
}

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        without, with_replay = (run(name, replay) for replay in ("observe", "r3"))
    print(f"\n{'mean over the steps, bfloat16':52}{'without':>12}{'with R3':>12}")
    for metric, words in SHOWN.items():
        print(f"{words:52}{without[metric]:12.4g}{with_replay[metric]:12.4g}")
