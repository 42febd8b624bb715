"""Every Python snippet of the docs is used as printed: run, compared with an example, or resolved name by name.

A snippet may use names that the text around it introduces (`model`, `traces`, ...); here is what it gets for them.
Snippets that need servers, GPUs or several ranks are not run: their imports must exist, and every other name must come
from the page or from that list.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("pydantic")

import moe_replay as mr
from moe_replay import interop
from tests.models import tiny_qwen3_moe

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
CHINESE = "zh/"  # compared with the English pages by tests/test_docs.py
ELSEWHERE = {"extending.md": "test_extending.py", "environments.md": "train/test_environments_docs.py"}
EXCERPTS = {  # snippets of use-in-your-trainer.md, from the second on
    1: "plain_loop.py",
    2: "accelerate_loop.py",
    3: "fsdp2_loop.py",
    4: "megatron_forward_step.py",
    5: "sft_recompute.py",
    6: "anticipatory_routing.py",
}
NAMED = {  # what the text around snippets that are not run introduces
    "checkpoints.md": "config backend base_model_folder one_step version stream",
    "first-run.md": "",
    "engines.md": "prompts model probe",
    "lora.md": "folder tensors",
    "megatron.md": "models config loss_function model inputs routes number chunk layout token_ids sizes folder",
    "tools.md": "topology config",
    "trl.md": "model reward dataset my_engine",
}


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)


WRITTEN = {path.relative_to(DOCS).as_posix(): path.read_text() for path in DOCS.rglob("*.md")}
PAGES = sorted(page for page, text in WRITTEN.items() if "```python" in text and not page.startswith(CHINESE))


@pytest.fixture
def names() -> dict[str, Any]:
    """A tiny model, two sequences, and their routes as the model itself chooses them."""
    model = tiny_qwen3_moe()
    replay = mr.attach(model)
    ids = [list(range(1, 12)), [5, 8, 13, 21]]
    layout = mr.TokenLayout.padded([len(one) for one in ids])
    fed = torch.tensor(layout.fed_token_ids(ids, pad=0)).long()
    inputs = {"input_ids": fed, "attention_mask": torch.tensor(layout.fed >= 0).long()}
    with torch.no_grad(), replay.record() as recording:
        model(**inputs)
    traces = recording.traces(layout, ids)
    return {"model": model, "replay": replay, "layout": layout, "inputs": inputs, "traces": traces, "samples": traces}


def run(page: str, names: dict[str, Any], *numbers: int) -> dict[str, Any]:
    found = blocks(page)
    for number in numbers or range(len(found)):
        exec(compile(found[number], f"{page}, snippet {number}", "exec"), names)
    return names


def test_every_page_with_snippets_is_used() -> None:
    here = Path(__file__).read_text()
    assert [page for page in PAGES if page not in ELSEWHERE and page not in NAMED and f'"{page}"' not in here] == []
    assert [page for page, test in ELSEWHERE.items() if page not in (ROOT / "tests" / test).read_text()] == []


# ---- run -------------------------------------------------------------------------------------------------------------


def test_the_five_steps(names: dict[str, Any]) -> None:
    names["replay"].detach()

    def log_probs(model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        return model(**inputs).logits.log_softmax(-1).amax(-1)

    names |= {"lengths": [len(trace) for trace in names["traces"]], "log_probs": log_probs}
    names["loss"] = lambda new, old: (new - old).exp().mean()
    run("use-in-your-trainer.md", names, 0)
    assert all(site.module.weight.grad.norm() > 0 for site in names["replay"].sites.values())


@pytest.mark.parametrize("number", EXCERPTS)
def test_an_excerpt_is_in_its_example(number: int) -> None:
    def statements(text: str) -> list[str]:
        text = text.replace(", observe=True) as replaying:", "):")  # what only the printed line of an example needs
        return [line for raw in text.splitlines() if (line := raw.partition("  #")[0].strip()) and line != "..."]

    example = iter(statements((ROOT / "examples" / EXCERPTS[number]).read_text()))
    missing = [line for line in statements(blocks("use-in-your-trainer.md")[number]) if line not in example]
    assert missing == []  # in the order of the example


def test_own_check(names: dict[str, Any], capsys: pytest.CaptureFixture) -> None:
    names["replay"].detach()
    run("verify.md", names, 1)
    assert "aligned" in capsys.readouterr().out


def test_routes_of_verl(names: dict[str, Any], tmp_path: Path) -> None:
    names["replay"].detach()
    model = names["model"]
    model.config.save_pretrained(tmp_path)
    topology = mr.MoeTopology.from_config(model.config)
    mask = names["inputs"]["attention_mask"]
    names["model_path"] = tmp_path
    names["batch"] = names["inputs"] | {"routed_experts": interop.to_verl(names["traces"], topology, mask)}
    del names["traces"]
    assert len(run("coming-from.md", names)["traces"]) == 2
    assert names["report"].aligned


def test_the_shift_test_and_the_watch(names: dict[str, Any]) -> None:
    names["replay"].detach()
    names["replay"] = mr.attach(names["model"])
    routes = mr.RouteBatch.from_traces(names["traces"], names["layout"])
    names |= {"routes": routes, "step": 1, "sampled": None, "log": {}, "loss_of": lambda output: output.logits.mean()}
    names["device"] = torch.device("cpu")
    run("verify.md", names, 2)
    assert set(names["log"]) == {"routing/aligned", "routing/misalignment_evidence"}


def test_context_parallel_layout(names: dict[str, Any]) -> None:
    ids = [trace.token_ids for trace in names["traces"]]
    lengths = [len(one) for one in ids]
    fed = mr.TokenLayout.packed(lengths, pad_each_to_multiple_of=2).context_parallel(0, 1).fed_token_ids(ids, pad=0)
    names |= {"cp_size": 1, "cp_rank": 0, "lengths": lengths, "input_ids": torch.tensor(fed).long()}
    assert run("use-in-your-trainer.md", names, 7)["logits"].isfinite().all()


def test_attribution(names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_replay.engines.transformers import TransformersEngine
    from moe_replay.records import SamplingParams
    from moe_replay.verification.attribution import Attribution

    names["replay"].detach()
    monkeypatch.chdir(tmp_path)
    names |= {"engine": TransformersEngine(tiny_qwen3_moe()), "prompts": [[1, 2, 3]]}
    run("verify.md", names | {"params": SamplingParams(max_tokens=4)}, 0)
    assert Attribution.from_json((tmp_path / "attribution.json").read_text()).scored == 4


def test_a_plan() -> None:
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(num_hidden_layers=48, num_experts=128, hidden_size=2048)
    found = run("tools.md", {"topology": mr.MoeTopology.from_config(config), "config": config}, 0)
    assert found["plan"].parallel.world == 512


def test_a_reward_and_the_completions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pandas = pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/first/completions").mkdir(parents=True)
    pandas.DataFrame({"reward": [1.0, 0.0]}).to_parquet("runs/first/completions/step-00000001.parquet")
    found = run("training.md", {})
    assert found["brief"](prompts=["?"], completions=["it is 4"], solution=["4"]) == [1.0]
    assert list(found["texts"]["reward"]) == [1.0, 0.0]


class MyGate(nn.Module):
    """The router that docs/routers.md describes."""

    def __init__(self, experts: int, picked: int) -> None:
        super().__init__()
        self.n_choices, self.n_picked = experts, picked
        self.weight = nn.Parameter(torch.randn(experts, 4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.topk(hidden @ self.weight.T, self.n_picked, dim=-1).values


class MyMoe(nn.Module):
    """Decoder layers, all but the first with a router."""

    def __init__(self, layers: int, experts: int, picked: int) -> None:
        super().__init__()
        sizes = {"num_hidden_layers": layers, "n_experts": experts, "n_experts_per_token": picked}
        self.config = SimpleNamespace(model_type="my_moe", **sizes)
        gated = [nn.ModuleDict({"gate": MyGate(experts, picked)}) for _ in range(layers - 1)]
        self.layers = nn.ModuleList([nn.ModuleDict({"mlp": nn.Linear(4, 4)}), *gated])


def test_a_family_of_routers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_moe.py").write_text(blocks("routers.md")[0])
    monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, Any] = {"model": MyMoe(24, 64, 6)}
    run("routers.md", names, 1)
    assert names["replay"].layers == tuple(range(1, 24))
    names["replay"].detach()
    assert run("routers.md", names, 2)["replay"].layers == tuple(range(1, 24))
    monkeypatch.delitem(sys.modules, "my_moe")


def test_a_sink(tmp_path: Path) -> None:
    sink = run("checkpoints.md", {}, 0)["MySink"](SimpleNamespace(folder=tmp_path))
    sink.log(3, {"reward/mean": 0.5})
    sink.close()
    assert (tmp_path / "rewards.txt").read_text() == "3 0.5\n"


# ---- resolved name by name -------------------------------------------------------------------------------------------


def unresolved(code: str, known: set[str]) -> set[str]:
    """Names that code reads and that neither it nor its surroundings define; its imports must exist."""
    tree = ast.parse(code)
    defined = set(known) | set(dir(builtins))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            defined |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
    read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    known |= defined - set(dir(builtins))
    return read - defined


@pytest.mark.parametrize("page", NAMED)
def test_names_of_snippets_exist(page: str) -> None:
    if page == "trl.md":
        pytest.importorskip("trl")
    if page.startswith("megatron"):
        pytest.importorskip("megatron.core")
    known = set(NAMED[page].split())
    found = [unresolved(code, known) for code in blocks(page)]
    assert [sorted(names) for names in found if names] == []


def test_unresolved_names_are_found() -> None:
    assert unresolved("import torch\nx = mr.attach(model)\n", {"model"}) == {"mr"}
    with pytest.raises(ImportError):
        unresolved("from moe_replay.errors import NoSuchError", set())
