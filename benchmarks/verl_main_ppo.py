"""verl's own trainer, as `examples/verl/run_r3.sh` starts it, with R3 and without replay: k3, rewards and times.

    python benchmarks/verl_main_ppo.py                      # one GPU: 0.87 B parameters, vLLM, Ray, 3 steps of each
    python benchmarks/verl_main_ppo.py --keep FOLDER        # the model, the prompts and the log of each run stay
    python benchmarks/verl_main_ppo.py trainer.device=...   # further overrides of verl's settings

verl, vLLM and Ray are to be installed as verl wants them; `pip install 'verl[vllm]'` is one way.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pandas
from parts.qwen3_moe import SMALL, TINY
from parts.word_task import even_words, write_task
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

ROOT = Path(__file__).parents[1]
MODES = {"r3": "R3", "off": "disabled"}
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
MODELS = {"small": SMALL | {"num_hidden_layers": 16, "mlp_only_layers": [0]}, "tiny": TINY}
SETTINGS = [
    "data.train_batch_size=32",
    "data.max_prompt_length=64",
    "data.max_response_length=256",
    "data.dataloader_num_workers=0",
    "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    "actor_rollout_ref.actor.ppo_mini_batch_size=32",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.actor.optim.lr=1e-6",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.3",
    "actor_rollout_ref.rollout.enforce_eager=True",
    "actor_rollout_ref.rollout.max_model_len=1024",
    "actor_rollout_ref.rollout.agent.num_workers=2",
    "reward.num_workers=1",
    "trainer.n_gpus_per_node=1",
    "trainer.val_before_train=False",
    "trainer.save_freq=-1",
    "trainer.test_freq=-1",
    "trainer.resume_mode=disable",
    "+ray_kwargs.ray_init.address=local",
    "+ray_kwargs.ray_init.include_dashboard=False",
]
SHOWN = {
    "k3": "actor/moe_replay/k3",
    "k3, verl's": "rollout_corr/k3_kl",
    "k3_paired": "actor/moe_replay/k3_paired",
    "k3_native": "actor/moe_replay/k3_native",
    "agreement": "actor/moe_replay/agreement",
    "aligned": "actor/moe_replay/aligned",
    "reward": "critic/score/mean",
    "rollout s": "timing_s/gen",
    "old log-probs s": "timing_s/old_log_prob",
    "update s": "timing_s/update_actor",
    "step s": "timing_s/step",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=[*MODES, "both"], default="both")
    parser.add_argument("--model", choices=list(MODELS), default="small")
    parser.add_argument("--device", default="cuda", help="that the model's weights are drawn on")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="a folder; by default a temporary one")
    parser.add_argument("overrides", nargs="*", help="of verl's settings: NAME=VALUE")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        parameters = write_files(folder, arguments.model, arguments.device)
        print(f"{parameters / 1e9:.2f} B parameters", flush=True)
        for mode in MODES if arguments.mode == "both" else [arguments.mode]:
            settings = [f"actor_rollout_ref.actor.fsdp_config.router_replay.mode={MODES[mode]}"]
            settings += [f"trainer.total_training_steps={arguments.steps}", *arguments.overrides]
            show(mode, run(folder, mode, settings))


def write_files(folder: Path, model: str, device: str) -> int:
    """Write the model, prompts as verl reads them and the reward; return the number of parameters."""
    parameters = write_task(folder, MODELS[model], device)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    lines = pre_tokenizers.Split("\n", "isolated")  # verl wants a token for a newline
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), lines])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    rows = pandas.read_json(folder / "train.jsonl", lines=True)
    rows["prompt"] = [[{"role": "user", "content": text}] for text in rows["prompt"]]
    rows["data_source"], rows["reward_model"] = "words", [{"style": "rule", "ground_truth": ""}] * len(rows)
    rows.to_parquet(folder / "prompts.parquet")
    return parameters


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
    """The reward, as verl loads it from this file."""
    return even_words([""], [solution_str])[0]


def run(folder: Path, mode: str, settings: list[str]) -> list[dict[str, float]]:
    """Run verl's trainer to its end; return what it has logged of each step."""
    path = [str(ROOT / "src"), str(ROOT / "benchmarks"), *sys.path]
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")]),
    }
    files = [folder / "model", folder / "prompts.parquet", folder / "prompts.parquet"]
    reward = f"reward.custom_reward_function.path={Path(__file__).resolve()}"
    command = ["bash", ROOT / "examples" / "verl" / "run_r3.sh", *files, *SETTINGS, reward]
    began = time.monotonic()
    with (folder / f"{mode}.log").open("w+") as log, tempfile.TemporaryDirectory(prefix="ray-") as ray:
        done = subprocess.run(
            [*command, f"+ray_kwargs.ray_init._temp_dir={ray}", *settings],
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        )
        log.seek(0)
        output = log.read()
    print(f"{mode}: exit code {done.returncode} after {time.monotonic() - began:.0f} s", flush=True)
    if done.returncode:
        raise SystemExit(output[-6000:])
    metric = re.compile(r"([\w/@.-]+):(?:np\.\w+\()?(-?[\d.e+-]+)")
    logged = re.findall(r"step:\d+ - (.*)", output)
    return [{name: float(value) for name, value in metric.findall(line)} for line in logged]


def show(mode: str, steps: list[dict[str, float]]) -> None:
    """Print a row for each metric, a column for each step."""
    print(f"| {mode} | " + " | ".join(f"step {number + 1}" for number in range(len(steps))) + " |")
    print("|---" * (len(steps) + 1) + "|")
    for title, name in SHOWN.items():
        cells = [f"{metrics[name]:.5g}" if name in metrics else "" for metrics in steps]
        if any(cells):
            print(f"| {title} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
