"""`moe-replay convert routes`: dumps of verl into trace files."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import moe_replay as mr
from moe_replay.cli.main import main

pytest.importorskip("transformers")
LAYERS, EXPERTS, TOP_K = 3, 8, 2
IDS = [[5, 6, 7, 8], [9, 10]]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    shape = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": LAYERS,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
    }
    (tmp_path / "config.json").write_text(json.dumps({**shape, "mlp_only_layers": [0], "decoder_sparse_step": 1}))
    return tmp_path


@pytest.fixture
def traces() -> list[mr.RouteTrace]:
    chance = np.random.default_rng(0)
    made = []
    for ids in IDS:
        experts = np.argsort(chance.random((len(ids), LAYERS - 1, EXPERTS)), axis=-1)[..., :TOP_K]
        valid = np.ones((len(ids), LAYERS - 1), bool)
        valid[-1] = False
        made.append(mr.RouteTrace(ids, experts, (1, 2), valid, weight_version=3, num_experts=EXPERTS))
    return made


def padded(traces: list[mr.RouteTrace]) -> dict[str, torch.Tensor]:
    """As verl has them: prompts on the left."""
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    ids = torch.zeros((2, 5), dtype=torch.long)
    ids[mask.bool()] = torch.tensor([*IDS[0], *IDS[1]])
    topology = mr.MoeTopology(LAYERS, tuple(mr.routes.MoeLayer(layer, EXPERTS, TOP_K) for layer in (1, 2)))
    routes = mr.interop.to_verl(traces, topology, mask)
    return {"routed_experts": routes, "input_ids": ids, "attention_mask": mask}


def write(kind: str, file: Path, traces: list[mr.RouteTrace]) -> None:
    batch = padded(traces)
    if kind == ".pt":
        torch.save(batch, file)
    elif kind == ".npz":
        np.savez(file, **{name: tensor.numpy() for name, tensor in batch.items()})
    else:
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        kept = batch["attention_mask"].bool()
        columns = {
            name: [row[of].tolist() for row, of in zip(batch[name], kept, strict=True)] for name in list(batch)[:2]
        }
        parquet.write_table(pyarrow.table(columns), file)


@pytest.mark.parametrize("kind", [".pt", ".npz", ".parquet"])
def test_dumps_become_a_trace_file(
    kind: str, model: Path, traces: list[mr.RouteTrace], capsys: pytest.CaptureFixture[str]
) -> None:
    dumps = [model / f"{name}{kind}" for name in ("a", "b")]
    for dump in dumps:
        write(kind, dump, traces)
    output = model / "routes.mrt"
    words = ["convert", "routes", *map(str, dumps), "--model", str(model), "--output", str(output)]
    main([*words, "--weight-version", "3"])
    assert capsys.readouterr().out == f"{output}: 4 traces from 2 dumps\n"
    with mr.TraceFile(output) as written:
        assert list(written) == traces * 2
    main(["inspect", str(output), "--check", str(model)])


def refused(capsys: pytest.CaptureFixture[str], model: Path, dump: Path) -> str:
    with pytest.raises(SystemExit) as left:
        main(["convert", "routes", str(dump), "--model", str(model), "--output", str(model / "out.mrt")])
    assert left.value.code == 2
    assert not list(model.glob("out.mrt*"))
    return capsys.readouterr().err


class Ran(Exception):  # noqa: N818
    """Raised by a dump whose code is run."""


class Code:
    def __reduce__(self) -> Any:
        return _run, ()


def _run() -> None:
    raise Ran


def test_code_in_a_dump_is_not_run(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"routed_experts": Code()}, model / "code.pt")
    assert "tensors only: code in a dump is never run" in refused(capsys, model, model / "code.pt")
    objects: Any = np.array([Code()], dtype=object)
    np.savez(model / "code.npz", routed_experts=objects, input_ids=np.zeros((1, 1)))
    assert "cannot be read" in refused(capsys, model, model / "code.npz")


def test_a_damaged_dump(model: Path, traces: list[mr.RouteTrace], capsys: pytest.CaptureFixture[str]) -> None:
    arrays = {name: tensor.numpy() for name, tensor in padded(traces).items()}
    np.savez_compressed(model / "whole.npz", **arrays)
    torch.save(padded(traces), model / "whole.pt", _use_new_zipfile_serialization=False)
    damaged = {"zip.npz": (model / "whole.npz").read_bytes()[:-30]}
    compressed = bytearray((model / "whole.npz").read_bytes())
    compressed[100:140] = b"\xff" * 40
    damaged["bytes.npz"] = bytes(compressed)
    for part in range(1, 40):
        whole = (model / "whole.pt").read_bytes()
        damaged[f"{part}.pt"] = whole[: len(whole) * part // 40]
    for name, content in damaged.items():
        (model / name).write_bytes(content)
        assert f"{name} cannot be read" in refused(capsys, model, model / name)
    torch.save(padded(traces) | {"attention_mask": [[1]]}, model / "list.pt")
    assert "list.pt cannot be read" in refused(capsys, model, model / "list.pt")


def test_what_is_no_dump(model: Path, traces: list[mr.RouteTrace], capsys: pytest.CaptureFixture[str]) -> None:
    (model / "text.pt").write_text("hello")
    assert "cannot be read" in refused(capsys, model, model / "text.pt")
    assert "cannot be read" in refused(capsys, model, model / "nowhere.npz")
    assert "unknown dump format" in refused(capsys, model, model / "x.csv")
    torch.save(OrderedDict(input_ids=torch.zeros(1, 1)), model / "half.pt")
    assert "lacks routed_experts: found input_ids" in refused(capsys, model, model / "half.pt")
    torch.save(padded(traces) | {"routed_experts": None}, model / "none.pt")
    assert "lacks routed_experts: found input_ids, attention_mask" in refused(capsys, model, model / "none.pt")
    shifted = padded(traces)
    shifted["routed_experts"] = shifted["routed_experts"].roll(-1, 2)  # routes in the dense layer
    torch.save(shifted, model / "shifted.pt")
    assert "shifted.pt: " in refused(capsys, model, model / "shifted.pt")
