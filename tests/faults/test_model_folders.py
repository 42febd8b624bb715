"""Model folders that are incomplete, damaged or of another kind: one sentence with the names, before any training.

Transformers 4.57 has a tensor for each expert, 5.x one for all experts of a layer.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from moe_replay.engines.base import StartRequest
from moe_replay.engines.transformers import TransformersEngine
from moe_replay.engines.vllm import engine as vllm_engine
from moe_replay.errors import MoeReplayError
from moe_replay.megatron.weights.checkpoint import Checkpoint
from moe_replay.megatron.weights.tensor_slices import WeightMapError
from moe_replay.train.backends.fsdp_loading import sharded_model
from moe_replay.train.config.sections import ModelConfig
from moe_replay.train.setup import launch
from moe_replay.train.setup.sources import SourceError, load_tokenizer
from moe_replay.weights.model_folder import ModelError, load_model, read_config
from tests.distributed.harness import run_ranks
from tests.models import tiny_qwen3_moe

CPU = torch.device("cpu")
Damage = Callable[[Path], Any]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_qwen3_moe().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


@pytest.fixture
def group() -> Iterator[None]:
    with launch.process_group(CPU):
        yield


def tensors(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Damage:
    """Rewrite the weights."""

    def rewrite(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        file = folder / "model.safetensors"
        save_file(change(load_file(file)), file, metadata={"format": "pt"})

    return rewrite


def without(part: str) -> Damage:
    return tensors(lambda stored: {name: tensor for name, tensor in stored.items() if part not in name})


def changed(part: str, change: Callable[[Tensor], Tensor]) -> Damage:
    return tensors(
        lambda stored: {n: change(tensor).contiguous() if part in n else tensor for n, tensor in stored.items()}
    )


def settings(**values: Any) -> Damage:
    def rewrite(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return rewrite


def with_nan(tensor: Tensor) -> Tensor:
    tensor[0, 0] = float("nan")
    return tensor


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size - 100)


def as_bin(content: Any) -> Damage:
    def rewrite(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        file = folder / "pytorch_model.bin"
        file.write_bytes(content) if isinstance(content, bytes) else torch.save(content, file)

    return rewrite


def as_whole_bin(folder: Path) -> None:
    """Move the weights into a .bin file."""
    from safetensors.torch import load_file

    as_bin(load_file(folder / "model.safetensors"))(folder)


def in_order(*damages: Damage) -> Damage:
    return lambda folder: [damage(folder) for damage in damages]


UNTRAINABLE: dict[str, tuple[Damage, str]] = {
    "a tensor is missing": (without("layers.1.self_attn.q_proj"), r"1 weights .*layers\.1\.self_attn\.q_proj\.weight"),
    "output projection": (without("lm_head"), r"1 weights .*lm_head\.weight"),
    "experts of a layer": (without("layers.2.mlp.experts"), r"layers\.2\.mlp\.experts"),
    "the last expert": (without(".experts.7."), r"layers\.1\.mlp\.experts.*(\(7, 32, 16\)|experts\.7\.up_proj)"),
    "an expert between": (without(".experts.3."), r"layers\.1\.mlp\.experts\.3\."),
    "a tensor of an expert": (without("layers.1.mlp.experts.3.gate_proj"), r"layers\.1\.mlp\.experts\.3\.gate_proj"),
    "renamed": (
        tensors(lambda stored: {name.replace("q_proj", "query"): tensor for name, tensor in stored.items()}),
        r"4 weights .*0\.self_attn\.q_proj\.weight.*in their place .*0\.self_attn\.query\.weight",
    ),
    "more layers in the config": (settings(num_hidden_layers=5), r"layers\.4\."),
    "fewer layers in the config": (settings(num_hidden_layers=3), r"layers\.3\..*num_hidden_layers"),
    "more experts in the config": (
        settings(num_local_experts=16, num_experts=16),
        r"experts.*\(16, 32, 16\), found \(8, 32, 16\)|gate\.weight: expected \(16, 32\), found \(8, 32\)",
    ),
    "fewer experts in the config": (
        settings(num_local_experts=4, num_experts=4),
        r"experts.*\(4, 32, 16\), found \(8, 32, 16\)|gate\.weight: expected \(4, 32\), found \(8, 32\)",
    ),
    "another shape": (changed("0.self_attn.q_proj", lambda t: t[:-1]), r"0\.self_attn\.q_proj.*\(31, 32\)"),
    "another shape of an expert": (
        changed("1.mlp.experts.3.up_proj", lambda t: t[:-1]),
        r"layers\.1\.mlp\.experts\.3\.up_proj\.weight .*another shape",
    ),
    "router in int8": (
        changed("2.mlp.gate.weight", lambda t: (40 * t).to(torch.int8)),
        r"layers\.2\.mlp\.gate\.weight .*type that the model cannot have.*BF16, F16, F32, F64, found I8|"
        r"cannot be loaded: .*Only Tensors of floating point",  # Transformers 4 refuses it itself
    ),
    "router in int8 in a .bin": (
        in_order(changed("2.mlp.gate.weight", lambda t: (40 * t).to(torch.int8)), as_whole_bin),
        r"layers\.2\.mlp\.gate\.weight .*type that the model cannot have.*BF16, F16, F32, F64, found I8|"
        r"cannot be loaded: .*Only Tensors of floating point",  # Transformers 4 refuses it itself
    ),
    "an expert between in a .bin": (in_order(without(".experts.3."), as_whole_bin), r"1\.mlp\.experts\.3\."),
    "experts in fp8 without scales": (
        changed("1.mlp.experts", lambda t: t.to(torch.float8_e4m3fn)),
        r"layers\.1\.mlp\.experts.*type that the model cannot have.*found F8_E4M3",
    ),
    "cut short": (cut, r"model\.safetensors is damaged or cut short"),
    "no bytes": (lambda folder: os.truncate(folder / "model.safetensors", 0), r"damaged or cut short"),
    "garbage": (lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 999), r"damaged or cut short"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), r"no file named .*model\.safetensors"),
    "a .bin without bytes": (as_bin(b""), r"a \.bin file is damaged, or holds more than tensors"),
    "a .bin of an object": (as_bin({"a": Fraction(1, 2)}), r"a \.bin file is damaged, or holds more than tensors"),
    "a .bin that is text": (as_bin(b"hello" * 99), r"cannot be loaded"),
    "no config": (lambda folder: (folder / "config.json").unlink(), r"cannot be read.*config\.json"),
    "config not JSON": (lambda folder: (folder / "config.json").write_text("{"), r"config\.json"),
    "config not text": (lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe\0"), r"config\.json"),
    "config a list": (lambda folder: (folder / "config.json").write_text("[]"), r"config\.json"),
    "unknown type": (settings(model_type="frobnicate"), r"frobnicate"),
    "wrong type of a setting": (settings(hidden_size="many"), r"hidden_size"),
    "vision": (
        lambda folder: (folder / "config.json").write_text('{"model_type": "qwen3_vl_moe"}'),
        r"not a causal language model.*Qwen3VLMoeConfig.*language model alone",
    ),
    "NaN": (changed("2.self_attn.o_proj", with_nan), r"1 weights .*not finite.*layers\.2\.self_attn\.o_proj\.weight"),
}


@pytest.mark.parametrize("name", UNTRAINABLE)
@pytest.mark.usefixtures("group")
def test_the_trainer_refuses(folder: Path, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    damage, message = UNTRAINABLE[name]
    damage(folder)
    with pytest.raises(ModelError, match=message) as raised:
        sharded_model(str(folder), ModelConfig(dtype="float32"), CPU, trained=True)
    assert "\n" not in str(raised.value)
    assert "LOAD REPORT" not in capfd.readouterr().err


def load_on_rank(folder: str) -> str:
    with pytest.raises(MoeReplayError) as raised:
        sharded_model(folder, ModelConfig(dtype="float32"), CPU, trained=True)
    return f"{type(raised.value).__name__} {raised.value.known_on_all_ranks}: {raised.value}"


@pytest.mark.distributed
def test_all_ranks_refuse_what_rank_0_reads(folder: Path) -> None:
    without("layers.1.self_attn.q_proj")(folder)
    first, second = run_ranks(2, load_on_rank, str(folder))
    assert first.startswith("ModelError True: 1 weights of the model are not in")
    assert second.startswith("OtherRankError True: loading the model failed on rank 0: ModelError: 1 weights")


@pytest.mark.parametrize(
    "name", ["a tensor is missing", "the last expert", "renamed", "router in int8", "cut short", "vision", "NaN"]
)
def test_the_transformers_engine_refuses(folder: Path, name: str) -> None:
    damage, message = UNTRAINABLE[name]
    damage(folder)
    with pytest.raises(ModelError, match=message):
        TransformersEngine.from_pretrained(folder, dtype="float32")


@pytest.mark.parametrize("name", ["cut short", "no bytes", "garbage", "no weights", "config not JSON", "config a list"])
def test_the_megatron_loader_refuses(folder: Path, name: str) -> None:
    UNTRAINABLE[name][0](folder)
    with pytest.raises(WeightMapError, match=r"model\.safetensors|config\.json"):
        assert Checkpoint(folder).names


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": "absent.safetensors"}}'])
def test_the_megatron_loader_refuses_an_index(folder: Path, index: str) -> None:
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(WeightMapError, match=r"index\.json|absent\.safetensors"):
        assert Checkpoint(folder).names


@pytest.mark.usefixtures("group")
def test_whole_folders_load_with_parts_that_are_not_trained(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    more = {"mtp.norm.weight": torch.ones(4), "visual.patch.weight": torch.ones(4)}
    tensors(lambda stored: stored | more)(folder)
    with caplog.at_level("WARNING"):
        model = sharded_model(str(folder), ModelConfig(dtype="float32"), CPU, trained=True)
    assert "mtp.norm.weight, visual.patch.weight" in caplog.text
    expected = tiny_qwen3_moe().get_parameter("model.layers.1.mlp.gate.weight")
    assert torch.equal(model.model.layers[1].mlp.gate.weight.full_tensor(), expected)


def test_tied_embeddings_are_not_missing(tmp_path: Path) -> None:
    tiny_qwen3_moe(tie_word_embeddings=True).save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype=torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_hub_that_does_not_answer_is_not_asked_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: tuple[str, int], timeout: float) -> None:
        raise OSError(f"no way to {address[0]}")

    def unused(*arguments: object, **settings: object) -> None:
        raise AssertionError("a request")

    monkeypatch.setattr("socket.create_connection", refuse)
    monkeypatch.setattr("moe_replay.weights.model_folder.getproxies", dict)
    monkeypatch.setattr("huggingface_hub.utils._http.http_backoff", unused)
    monkeypatch.setattr("httpx.Client.send", unused)
    with pytest.raises(ModelError, match=r"the model cannot be read.*'nobody/has-this'"):
        read_config("nobody/has-this")


def test_no_tokenizer_is_said_to_be_missing(folder: Path) -> None:
    with pytest.raises(SourceError, match=r"no tokenizer in .*Put the tokenizer into the folder"):
        load_tokenizer(str(folder))


# ---- code that comes with a model ------------------------------------------------------------------------------------

CODE = """
from pathlib import Path
Path({ran!r}).touch()
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
class MyConfig(Qwen3MoeConfig):
    model_type = "mine"
class MyModel(Qwen3MoeForCausalLM):
    config_class = MyConfig
"""


@pytest.fixture
def with_code(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model that brings its own classes, which leave a file behind when they are imported."""
    import builtins

    monkeypatch.setattr(builtins, "input", lambda *_: pytest.fail("asked at a prompt"))
    (folder / "mine.py").write_text(CODE.format(ran=str(tmp_path / "ran")))
    classes = {"AutoConfig": "mine.MyConfig", "AutoModelForCausalLM": "mine.MyModel"}
    settings(model_type="mine", auto_map=classes)(folder)
    tensors(lambda _: tiny_qwen3_moe().state_dict())(folder)  # Transformers fuses the experts of types it knows only
    tokenizer = {"tokenizer_class": "T", "auto_map": {"AutoTokenizer": ["mine.T", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.mark.usefixtures("group")
def test_code_of_a_model_runs_only_where_a_setting_says_so(with_code: Path, tmp_path: Path) -> None:
    refused: list[Callable[[], Any]] = [
        lambda: sharded_model(str(with_code), ModelConfig(dtype="float32"), CPU, trained=True),
        lambda: TransformersEngine.from_pretrained(with_code),
        lambda: load_tokenizer(str(with_code)),
    ]
    for load in refused:
        with pytest.raises(MoeReplayError, match=r"Set model\.trust_remote_code = true"):
            load()
    assert not (tmp_path / "ran").exists()
    trusting = ModelConfig(dtype="float32", trust_remote_code=True)
    model = sharded_model(str(with_code), trusting, CPU, trained=True)
    assert type(model).__name__.endswith("MyModel")
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_pipe_in_a_model_folder_is_refused(folder: Path, name: str) -> None:
    """Whoever opens it waits for somebody who writes to it."""
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    for load in (load_model, lambda path: vllm_engine.start(StartRequest(model=str(path)))):
        with pytest.raises(ModelError, match=f"{name} is not a file"):
            load(folder)
