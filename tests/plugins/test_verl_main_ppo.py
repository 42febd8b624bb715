"""verl's own trainer by `examples/verl/run_r3.sh`, on a CPU: its driver, Ray workers and vLLM server, and our plug-in.

What differs from a run on GPUs is in `verl_main_ppo_cpu` and in SETTINGS. Minutes a run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.models import tiny_qwen3_moe

ROOT = Path(__file__).parents[2]
NEEDED = ("verl", "vllm", "ray", "transfer_queue")
MISSING = [name for name in NEEDED if find_spec(name) is None]
pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(MISSING), reason=f"`make test-plugins` runs it; not installed here: {' '.join(MISSING)}"),
]
STEPS, SAMPLES = 2, 32
CPU = "tests.plugins.verl_main_ppo_cpu"
LATE = "tests.plugins.verl_late_routes"
SETTINGS = [
    "data.train_batch_size=8",
    "data.max_prompt_length=16",
    "data.max_response_length=24",
    "data.dataloader_num_workers=0",
    "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "actor_rollout_ref.actor.use_torch_compile=False",
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.ignore_eos=True",  # tokens enough that some are routed otherwise
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.1",
    "actor_rollout_ref.rollout.enforce_eager=True",
    "actor_rollout_ref.rollout.free_cache_engine=False",  # vLLM's sleep is for GPUs
    "+actor_rollout_ref.rollout.enable_sleep_mode=False",
    "actor_rollout_ref.rollout.max_model_len=64",
    "actor_rollout_ref.rollout.max_num_seqs=32",
    "actor_rollout_ref.rollout.max_num_batched_tokens=512",
    "actor_rollout_ref.rollout.agent.num_workers=1",
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=16",
    "reward.num_workers=1",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    "trainer.device=cpu",
    "trainer.n_gpus_per_node=1",
    f"trainer.total_training_steps={STEPS}",
    "trainer.val_before_train=False",
    "trainer.resume_mode=disable",
    "ray_kwargs.ray_init.num_cpus=10",  # those that verl asks for, not those that are there
    "+ray_kwargs.ray_init.num_gpus=1",
    "+ray_kwargs.ray_init.address=local",
    "+ray_kwargs.ray_init.include_dashboard=False",
]
VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",  # the name of its FSDP engine in verl's registry; the engine asks the platform
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",  # ten processes, most of them for nothing
    "RAY_raylet_start_wait_time_s": "600",
    "RAY_worker_register_timeout_seconds": "600",
}
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(letter.isdigit() for letter in solution_str) / max(len(solution_str), 1)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose routers decide, a tokenizer, prompts, a reward, and metadata that say which vLLM this is."""
    import pandas

    from moe_replay.demo.model import END, PAD, TOKENS, build_tokenizer

    made = tmp_path_factory.mktemp("main_ppo")
    model = tiny_qwen3_moe(
        vocab_size=len(TOKENS),  # verl lets vLLM sample no others
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=4,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=TOKENS.index(END),
        pad_token_id=TOKENS.index(PAD),
    )
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            parameter.data.mul_(10)
        if "embed" in name or ".experts." in name or "lm_head" in name:
            parameter.data.mul_(20)
    model.save_pretrained(made / "model")
    build_tokenizer().save_pretrained(made / "model")
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{a}+{b}"}],
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {"index": 8 * a + b},
        }
        for a in range(1, 9)
        for b in range(1, 9)
    ]
    pandas.DataFrame(rows).to_parquet(made / "prompts.parquet")
    (made / "reward.py").write_text(REWARD)
    # verl asks for the version of the package `vllm`, which is called vllm-cpu here; vLLM looks for "cpu" in it.
    metadata = made / "metadata" / f"vllm-{version('vllm-cpu')}+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version('vllm-cpu')}+cpu\n")
    return made


@pytest.fixture(scope="module")
def run(folder: Path) -> Iterator[Callable[..., subprocess.CompletedProcess]]:
    """Runs of verl's trainer with further settings; the modules are those that verl imports in each process."""
    with TemporaryDirectory(prefix="ray-") as ray:  # a short path, for Ray's sockets

        def started(*settings: str, modules: tuple[str, ...] = (CPU,)) -> subprocess.CompletedProcess:
            path = [str(ROOT), str(ROOT / "src"), str(folder / "metadata"), os.environ.get("PYTHONPATH", "")]
            environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
            environment |= VARIABLES | {
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "PYTHONPATH": os.pathsep.join(path),
                "VERL_USE_EXTERNAL_MODULES": ",".join(modules),
            }
            files = [folder / "model", folder / "prompts.parquet", folder / "prompts.parquet"]
            command = ["bash", ROOT / "examples" / "verl" / "run_r3.sh", *files, *SETTINGS]
            reward = f"reward.custom_reward_function.path={folder / 'reward.py'}"
            done = subprocess.run(
                [*map(str, command), reward, f"+ray_kwargs.ray_init._temp_dir={ray}", *settings],
                env=environment,
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            print(done.stdout)  # pytest shows it where a test fails
            return done

        yield started


def logged(done: subprocess.CompletedProcess) -> list[dict[str, float]]:
    """What verl's console logger has printed, a dictionary a step."""
    lines = re.findall(r"step:\d+ - (.*)", done.stdout)
    metric = re.compile(r"([\w/@.-]+):(?:np\.\w+\()?(-?[\d.e+-]+)")
    return [{name: float(value) for name, value in metric.findall(line)} for line in lines]


def test_verls_trainer_replays_and_reports_among_its_own_metrics(run) -> None:
    done, off = run(), run("actor_rollout_ref.actor.fsdp_config.router_replay.mode=disabled")
    steps, steps_off = logged(done), logged(off)
    for ended, metrics in ((done, steps), (off, steps_off)):
        assert (ended.returncode, len(metrics)) == (0, STEPS)
    for metrics in steps:
        assert metrics["actor/moe_replay/aligned"] == 1
        assert 0.5 < metrics["actor/moe_replay/agreement"] < 1
        without_route = SAMPLES / metrics["global_seqlen/mean"]  # the last token of each
        assert metrics["actor/moe_replay/covered"] == pytest.approx(1 - without_route)
        assert metrics["actor/moe_replay/replayed"] == metrics["actor/moe_replay/covered"]
        assert metrics["actor/moe_replay/samples_without_routes"] == 0
        # verl's own is of the old-log-prob pass, with the same weights: there is one update a step
        assert metrics["actor/moe_replay/k3"] == pytest.approx(metrics["rollout_corr/k3_kl"], rel=1e-3)
    assert steps[0]["actor/moe_replay/k3_paired"] < steps[0]["actor/moe_replay/k3_native"]
    assert not [name for metrics in steps_off for name in metrics if "moe_replay" in name]
    assert steps[0]["rollout_corr/k3_kl"] < steps_off[0]["rollout_corr/k3_kl"]


def test_routes_of_other_tokens_stop_the_run_by_name(run) -> None:
    done = run("actor_rollout_ref.model.use_remove_padding=False", modules=(CPU, LATE))
    assert done.returncode != 0
    assert "AlignmentError" in done.stdout
    assert "routes are one token late" in done.stdout
    assert not logged(done)
