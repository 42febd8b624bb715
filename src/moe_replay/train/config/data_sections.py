"""Settings of what a run reads and keeps: prompts, rewards, checkpoints, evaluation and logs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from moe_replay.train.config.plugin_names import PluginName
from moe_replay.train.config.section import Limit, Section
from moe_replay.train.rewards import REWARDS
from moe_replay.train.sinks.registry import SINKS

RewardChoices = Annotated[
    tuple[str, ...], PluginName(lambda: REWARDS, "reward", forms=("module:name", "verl:module:name"))
]
SinkChoices = Annotated[tuple[str, ...], PluginName(lambda: SINKS, "metric sink")]


class DataConfig(Section):
    """Prompts."""

    path: str = ""
    """A .jsonl or .parquet file, a datasets folder, or a name on the hub; empty: sums that come with the library's own
    model."""
    subset: str | None = None
    """Subset (configuration) of a data set on the hub that has several."""
    split: str = Field("train", min_length=1)
    """Split of a data set on the hub or in a datasets folder."""
    max_prompt_tokens: int = Field(512, ge=1)
    """Longer prompts are left out."""
    shuffle: bool = True
    """A new order for each pass over the data."""
    epochs: float | None = Field(None, gt=0, le=1e6)
    """Passes over the prompts, also parts of one; replaces `steps`, whose number follows from it."""
    eval_path: str | None = None
    """Prompts for evaluation, in the same forms."""
    eval_split: str | None = Field(None, min_length=1)
    """Split for evaluation; left out: that of `split`."""


class RewardConfig(Section):
    """Rewards and their weights."""

    functions: RewardChoices = Field(("accuracy",), min_length=1)
    """Reward functions; the reward of a sample is their weighted sum."""
    weights: tuple[float, ...] | None = None
    """Weight of each in the sum; left out: 1."""
    workers: int = Field(4, ge=0, le=1024)
    """Processes in which reward functions run; 0: in threads of the trainer's own process, for functions that share
    state with it or with each other."""
    timeout_s: Limit = Field(60.0, gt=0)
    """Seconds that a reward function may take for each sample."""
    on_timeout: Literal["error", "unscored"] | None = None
    """What becomes of a sample whose reward takes longer, or ends its process: `error` ends the run, `unscored` leaves
    it out of training and counts it in `reward/timeouts`; left out: `unscored` for built-in rewards, else `error`."""


class CheckpointConfig(Section):
    """Checkpoints of a run: when they are saved, what they hold, how many are kept."""

    every: int = Field(50, ge=0)
    """Steps between checkpoints; 0: only at the end."""
    at_end: bool = True
    """Save when the run ends or is interrupted. With `every = 0`, false saves nothing at all."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints that stay."""
    asynchronous: bool = True
    """Write checkpoints in the background, from copies in host memory: a step waits for the copies alone."""
    export: bool = True
    """Put the weights in each checkpoint as a Transformers folder too."""
    push_to_hub: str = Field("", pattern=r"^([\w.-]+/)?[\w.-]*$")
    """Repository on the Hugging Face Hub that the export goes to when the run is complete, as owner/name; "": none."""
    hub_private: bool = True
    """Create that repository as a private one."""
    optimizer: bool = True
    """Keep the optimizer's state in checkpoints; without it they are smaller, and a resumed run starts it anew."""


class EvalConfig(Section):
    """Rewards on prompts that are not trained on."""

    every: int = Field(0, ge=0)
    """Steps between evaluations; 0: none."""
    prompts: int = Field(64, ge=1)
    """Prompts of an evaluation at most."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature; 0: greedy."""


class LogConfig(Section):
    """Destinations of metrics besides metrics.jsonl and the console."""

    tensorboard: bool = False
    """Write TensorBoard files to the run's folder."""
    wandb: bool = False
    """Send metrics to Weights & Biases."""
    mlflow: bool = False
    """Send metrics to MLflow, at $MLFLOW_TRACKING_URI."""
    sinks: SinkChoices = ()
    """More destinations of metrics."""
    project: str = "moe-replay"
    """Project in Weights & Biases, experiment in MLflow."""
    traces: int = Field(0, ge=0)
    """Samples of each step whose route traces are kept in the run's folder."""
    completions: bool = False
    """Keep prompts and completions of each step with their rewards and advantages, as parquet in the run's folder."""
    shown_completions: int = Field(4, ge=0)
    """Completions of each step in a table on the console, best and worst, where `completions` is set; 0: none."""
    report: bool = True
    """Write report.html at the end of `moe-replay train`; `moe-replay report` writes it at any time."""

    @property
    def enabled_sinks(self) -> tuple[str, ...]:
        """Names of all metric sinks of the run, metrics.jsonl first."""
        switches = {"tensorboard": self.tensorboard, "wandb": self.wandb, "mlflow": self.mlflow}
        return tuple(dict.fromkeys(["jsonl", *(name for name, on in switches.items() if on), *self.sinks]))
