"""The architecture as rules over the source, and for each rule a proof that it bites.

A rule takes one file and yields `(line, what is wrong)`. An exception to a rule is an entry in `EXCEPTIONS`, with a
reason; one that is no longer needed fails as well.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

from tests.test_layers import imports_of, named_by, read_modules

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "moe_replay"

LONGEST_LINES = 600
BASE = sys.stdlib_module_names | {"numpy", "torch", PACKAGE}
OPTIONAL = {"accelerate", "datasets", "matplotlib", "megatron", "peft", "ray", "sglang", "transformers", "trl", "vllm"}
OTHER_NAMES_FOR_IDS = {"captured", "chosen", "expert_ids", "experts", "experts_taken", "rollout_experts", "taken"}
ARRAY = re.compile(r"\b(ndarray|NDArray|Tensor)\b")
PICKLERS = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
PICKLED_COLLECTIVE = re.compile(r"(?:all_gather|gather|broadcast|scatter|send|recv)_object(?:_list)?")
PICKLED_CHECKPOINT = re.compile(r"torch\.distributed\.checkpoint(?:\.\w+)*\.(\w+)")
PICKLED_STORAGE = {"FileSystemReader", "FileSystemWriter"}
PICKLED_MESSAGES = {"MultiprocessingSerializer", "ForkingPickler", "packed_ipc_producer"}
AUTO_CLASS = re.compile(r"\bAuto[A-Z]\w*\.from_(?:pretrained|config)$")
STORAGE_ARGUMENTS = {
    "load": {"storage_reader"},
    "load_state_dict": {"storage_reader"},
    "save": {"storage_writer"},
    "async_save": {"storage_writer"},
    "save_state_dict": {"storage_writer"},
}
ENGINE_PROBES = {"getattr", "hasattr", "isinstance", "inspect.signature"}
MACHINE_PATH = re.compile(r"(?<![\w.:/~}>-])/(?:root|home|work|farm|mnt|opt|Users)/[\w.-]+")


@dataclass(frozen=True)
class File:
    """One text file of the project; Python is parsed on demand."""

    path: str  # relative to the root, with forward slashes
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @cached_property
    def imported(self) -> dict[str, str]:
        """Local name -> the dotted name it was imported as."""
        names: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    bound = alias.asname or alias.name.partition(".")[0]
                    names[bound] = alias.name if alias.asname else bound
            elif isinstance(node, ast.ImportFrom):
                names |= {a.asname or a.name: f"{node.module or PACKAGE}.{a.name}" for a in node.names}
        return names

    def dotted(self, node: ast.AST) -> str:
        """`np.load` -> "numpy.load"; "" for what is not a plain chain of names."""
        if isinstance(node, ast.Name):
            return self.imported.get(node.id, node.id)
        if isinstance(node, ast.Attribute) and (owner := self.dotted(node.value)):
            return f"{owner}.{node.attr}"
        return ""


Rule = Callable[[File], Iterator[tuple[int, str]]]

EXCEPTIONS: dict[str, dict[str, str]] = {
    "broad_except": {
        "src/moe_replay/cluster/connection.py": "Ray raises Exception itself for a node that does not start in time",
        "src/moe_replay/engines/vllm/engine.py": "vLLM's start may raise anything; it is raised again as ours",
        "src/moe_replay/engines/vllm/worker.py": "vLLM's loaders may raise anything; the engine raises it",
        "src/moe_replay/train/checkpoint/checkpoint.py": "whatever stops a rank from writing is raised on all of them",
        "src/moe_replay/utils/misc.py": "a user's __str__ may raise anything; the type is named in its place",
        "src/moe_replay/utils/plugins.py": "a user's function may raise anything; it is named and raised again",
    },
    "patched_class": {
        "src/moe_replay/megatron/without_transformer_engine.py": "upstream bugs, each listed; undone on leaving",
        "src/moe_replay/utils/processes.py": "Python has no hook before os._exit, whose status 0 would be a success",
        "src/moe_replay/replay/adapters/megatron_settings.py": "a name that Megatron-Core reads and forgets to set",
        "src/moe_replay/integrations/ms_swift_megatron.py": "ms-swift has no registry of trainers; it loads us for it",
        "src/moe_replay/engines/vllm/processes.py": "tempfile.tempdir is documented to be set; in vLLM's own process",
    },
    "unsafe_loading": {
        "src/moe_replay/engines/vllm_serve/weights.py": "vLLM's message to a server started to accept it",
        "src/moe_replay/engines/sglang/weights.py": "SGLang's message to a server beside the trainer",
    },
    "eager_import": {
        "src/moe_replay/engines/vllm/processes.py": "classes that vLLM imports by name, in processes of its own",
    },
}


# ---- rules for the package -------------------------------------------------------------------------------------------


def global_statement(file: File) -> Iterator[tuple[int, str]]:
    """Two models in one process must never see each other's routes."""
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Global):
            yield node.lineno, f"global {', '.join(node.names)}"


def unsafe_loading(file: File) -> Iterator[tuple[int, str]]:
    """Traces and checkpoints may come from anywhere: nothing we read may run code."""
    for line, module in imports(file, ast.walk(file.tree)):
        if module.partition(".")[0] in PICKLERS:
            yield line, f"imports {module}"
    for node in ast.walk(file.tree):
        if isinstance(node, (ast.Name, ast.Attribute)):
            # Attributes of anything: what is reached through a variable pickles as well.
            name = file.dotted(node) or getattr(node, "attr", "")
            if PICKLED_COLLECTIVE.fullmatch(name.rpartition(".")[2]):
                yield node.lineno, f"{name} sends pickled objects"
            if name.rpartition(".")[2] in PICKLED_MESSAGES:
                yield node.lineno, f"{name} pickles what it sends"
            if (found := PICKLED_CHECKPOINT.fullmatch(name)) and found[1] in PICKLED_STORAGE:
                yield node.lineno, f"{name} pickles its metadata"
        if not isinstance(node, ast.Call):
            continue
        name = file.dotted(node.func).removeprefix("builtins.")
        constants = {k.arg: k.value.value for k in node.keywords if isinstance(k.value, ast.Constant)}
        if name in ("eval", "exec"):
            yield node.lineno, f"calls {name}"
        if name in ("torch.load", "torch.serialization.load") and constants.get("weights_only") is not True:
            yield node.lineno, "torch.load without weights_only=True"
        if AUTO_CLASS.search(ast.unparse(node.func)) and "trust_remote_code" not in {k.arg for k in node.keywords}:
            yield node.lineno, "without trust_remote_code, a prompt may ask to run code of the model"
        if constants.get("broadcast_from_rank0"):
            yield node.lineno, "broadcast_from_rank0 sends pickled objects"
        if (found := PICKLED_CHECKPOINT.fullmatch(name)) and found[1] in STORAGE_ARGUMENTS:
            arguments = {k.arg for k in node.keywords}
            if not arguments & STORAGE_ARGUMENTS[found[1]]:
                yield node.lineno, f"{name} without a storage of its own pickles its metadata"
        if name == "numpy.load":
            allowed = [k.value for k in node.keywords if k.arg in ("allow_pickle", None)] + node.args[2:]
            if any(not isinstance(value, ast.Constant) or value.value for value in allowed):
                yield node.lineno, "numpy.load with allow_pickle"


def ray_import(file: File) -> Iterator[tuple[int, str]]:
    """Ray pickles what its actors exchange: only the processes of one run on a cluster do, all in one folder."""
    if not file.path.startswith(f"src/{PACKAGE}/cluster/"):
        for line, module in imports(file, ast.walk(file.tree)):
            if module.partition(".")[0] == "ray":
                yield line, f"imports {module} outside of cluster/"


def probed_engine(file: File) -> Iterator[tuple[int, str]]:
    """The interface of engines is `engines/base.py`: nobody asks whether an engine has a member, or which one it is."""
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Call) and file.dotted(node.func) in ENGINE_PROBES and node.args:
            probed = ast.unparse(node.args[0])
            if re.search(r"(^|[._])engine(\.\w+)?$", probed):
                yield node.lineno, f"{file.dotted(node.func)}({probed}, ...)"


def broad_except(file: File) -> Iterator[tuple[int, str]]:
    """Fail closed: a handler names what it expects."""
    for node in ast.walk(file.tree):
        if isinstance(node, ast.ExceptHandler):
            kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            for kind in kinds:
                name = file.dotted(kind).removeprefix("builtins.") if kind else "everything"
                if name in ("everything", "Exception", "BaseException"):
                    yield node.lineno, f"catches {name}"


def patched_class(file: File) -> Iterator[tuple[int, str]]:
    """No patches: an imported name, or a class as a whole, is not ours to assign to; `setattr` would hide that."""
    shared = {"cls", *file.imported, *(node.name for node in ast.walk(file.tree) if isinstance(node, ast.ClassDef))}
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Name) and node.id in ("setattr", "delattr"):
            yield node.lineno, f"uses {node.id}"
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            owner = node.value
            while isinstance(owner, ast.Attribute):
                owner = owner.value
            if isinstance(owner, ast.Name) and owner.id in shared:
                yield owner.lineno, f"assigns to an attribute of {owner.id}"


def eager_import(file: File) -> Iterator[tuple[int, str]]:
    """An optional library is imported by the function that needs it, never by importing us."""
    for line, module in imports(file, run_at_import(file, file.tree)):
        if module.partition(".")[0] in OPTIONAL:
            yield line, f"imports {module} at module level"


def core_import(file: File) -> Iterator[tuple[int, str]]:
    """The core, which other trainers use, knows numpy and torch only; adapters import what they adapt themselves."""
    if is_core(file):
        for line, module in imports(file, ast.walk(file.tree)):
            if module.partition(".")[0] not in BASE:
                yield line, f"core module imports {module}"


def other_name_for_ids(file: File) -> Iterator[tuple[int, str]]:
    """An array of expert ids that crosses a function is `routed_experts`: one grep shows its way to the router."""
    for node in ast.walk(file.tree):
        named: list[tuple[str, ast.expr | None]] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            parameters = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            named = [(parameter.arg, parameter.annotation) for parameter in parameters]
        elif isinstance(node, ast.ClassDef):
            fields = [field for field in node.body if isinstance(field, ast.AnnAssign)]
            named = [(field.target.id, field.annotation) for field in fields if isinstance(field.target, ast.Name)]
        for name, annotation in named:
            if name in OTHER_NAMES_FOR_IDS and annotation is not None and ARRAY.search(ast.unparse(annotation)):
                yield node.lineno, f"an array called {name}; expert ids are routed_experts"


def waiting_copy(file: File) -> Iterator[tuple[int, str]]:
    """Arrays go to a GPU by `to_device`: other copies wait until it has done all that it was given before."""
    if file.path.endswith("utils/device.py"):
        return
    for node in ast.walk(file.tree):
        is_copy = isinstance(node, ast.Attribute) and node.attr in ("to", "cuda")
        if is_copy and any(file.dotted(part) == "torch.from_numpy" for part in ast.walk(node.value)):
            yield node.lineno, "an array copied by .to(); use utils.device.to_device"


def too_long_file(file: File) -> Iterator[tuple[int, str]]:
    """A file has one subject; one this long has several."""
    if (lines := len(file.text.splitlines())) > LONGEST_LINES:
        yield lines, f"{lines} lines, more than {LONGEST_LINES}"


# ---- rules for tests and for every file ------------------------------------------------------------------------------


def empty_test(file: File) -> Iterator[tuple[int, str]]:
    """A test checks something, itself or through a function of its file that it names."""
    functions = {n.name: n for n in ast.walk(file.tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))}

    def checks(node: ast.AST) -> bool:
        if isinstance(node, ast.Assert):
            return not isinstance(node.test, ast.Constant)
        name = file.dotted(node)
        return (
            name in ("pytest.raises", "pytest.warns") or re.search(r"(^|\.)_?(check|assert)(_\w+)?$", name) is not None
        )

    def reaches_a_check(function: ast.AST, seen: set[str]) -> bool:
        for node in ast.walk(function):
            if checks(node):
                return True
            if isinstance(node, ast.Name) and node.id in functions and node.id not in seen:
                seen.add(node.id)
                if reaches_a_check(functions[node.id], seen):
                    return True
        return False

    for name, function in functions.items():
        if name.startswith("test") and not reaches_a_check(function, {name}):
            yield function.lineno, f"{name} checks nothing"


def machine_path(file: File) -> Iterator[tuple[int, str]]:
    """A path of somebody's machine works on that machine."""
    for number, line in enumerate(file.text.splitlines(), 1):
        for match in MACHINE_PATH.finditer(line):
            yield number, f"names {match[0]}"


# ---- what the rules are made of --------------------------------------------------------------------------------------


def imports(file: File, nodes: Iterator[ast.AST]) -> Iterator[tuple[int, str]]:
    """(line, module) of every absolute import, `importlib.import_module` included."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module
        elif isinstance(node, ast.Call) and file.dotted(node.func) in ("importlib.import_module", "__import__"):
            yield from ((node.lineno, str(name.value)) for name in node.args[:1] if isinstance(name, ast.Constant))


def is_core(file: File) -> bool:
    return re.fullmatch(rf"src/{PACKAGE}/((routes|replay|utils)/)?\w+\.py", file.path) is not None


def run_at_import(file: File, node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that importing the file runs: no function bodies, nothing under TYPE_CHECKING."""
    yield node
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        return
    children = ast.iter_child_nodes(node)
    if isinstance(node, ast.If) and file.dotted(node.test).removeprefix("typing.") == "TYPE_CHECKING":
        children = iter(node.orelse)
    for child in children:
        yield from run_at_import(file, child)


def project_paths() -> Iterator[Path]:
    """Every file that is or would be tracked; in an unpacked archive, every file but products of building."""
    if (ROOT / ".git").exists():
        command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        yield from (ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file())
        return
    for folder, names, files in os.walk(ROOT):
        names[:] = [
            name for name in names if not re.match(r"\.venv|\.\w+_cache|\.hypothesis|__pycache__|build|dist", name)
        ]
        yield from (Path(folder, name) for name in files)


def read_files(*folders: str, suffix: str = "") -> list[File]:
    found = []
    for path in sorted(project_paths()):
        name = path.relative_to(ROOT).as_posix()
        if name.startswith(folders) and name.endswith(suffix):
            content = path.read_bytes()
            if b"\0" not in content:  # pictures and traces are not text
                found.append(File(name, content.decode()))
    return found


def offences(rule: Rule, files: list[File]) -> list[str]:
    return [f"{file.path}:{line}: {what}" for file in files for line, what in rule(file)]


# ---- the project follows the rules -----------------------------------------------------------------------------------

SOURCE = read_files("src/", suffix=".py")
TESTS = read_files("tests/", suffix=".py")
EVERYTHING = read_files("")

SCOPE: dict[Rule, list[File]] = {
    global_statement: SOURCE,
    unsafe_loading: SOURCE,
    ray_import: SOURCE,
    broad_except: SOURCE,
    probed_engine: [file for file in SOURCE if file.path.split("/")[2] in ("train", "engines", "weights")],
    patched_class: SOURCE,
    eager_import: SOURCE,
    core_import: SOURCE,
    other_name_for_ids: SOURCE,
    waiting_copy: SOURCE,
    too_long_file: SOURCE,
    empty_test: TESTS,
    machine_path: EVERYTHING,
}


@pytest.mark.parametrize("rule", SCOPE, ids=lambda rule: rule.__name__)
def test_the_project_follows(rule: Rule) -> None:
    assert SCOPE[rule], "the rule has nothing to look at"
    excepted = EXCEPTIONS.get(rule.__name__, {})
    found = offences(rule, [file for file in SCOPE[rule] if file.path not in excepted])
    assert not found, "\n".join([str(rule.__doc__), *found])


def test_exceptions_are_needed_and_explained() -> None:
    rules = {rule.__name__: rule for rule in SCOPE}
    assert "too_long_file" not in EXCEPTIONS
    for name, excepted in EXCEPTIONS.items():
        for path, reason in excepted.items():
            assert len(reason.split()) > 3, f"{name}: {path} wants a reason"
            assert offences(rules[name], [f for f in SCOPE[rules[name]] if f.path == path]), f"{name}: {path} is stale"


# ---- each rule bites, and bites nothing else -------------------------------------------------------------------------

CAUGHT: list[tuple[Rule, str]] = [
    (global_statement, "def f():\n    global state\n    state = 1"),
    (probed_engine, "hasattr(self.engine, 'servers')"),
    (probed_engine, "import inspect\ninspect.signature(engine.sleep)"),
    (probed_engine, "isinstance(member.engine, EnginePool)"),
    (unsafe_loading, "import pickle"),
    (unsafe_loading, "def f():\n    from cloudpickle import loads"),
    (unsafe_loading, "eval('1')"),
    (unsafe_loading, "import builtins\nbuiltins.exec('1')"),
    (unsafe_loading, "import torch\ntorch.load(path)"),
    (unsafe_loading, "import torch as t\nt.load(path, weights_only=False)"),
    (unsafe_loading, "from torch import load\nload(path, weights_only=flag)"),
    (unsafe_loading, "from torch.serialization import load\nload(path)"),
    (unsafe_loading, "import numpy as np\nnp.load(path, allow_pickle=True)"),
    (unsafe_loading, "import numpy as np\nnp.load(path, allow_pickle=flag)"),
    (unsafe_loading, "import numpy as np\nnp.load(path, None, True)"),
    (unsafe_loading, "import numpy as np\nnp.load(path, **options)"),
    (unsafe_loading, "from sglang.srt.utils import MultiprocessingSerializer as s\ns.serialize(tensors)"),
    (unsafe_loading, "import torch.distributed as dist\ndist.all_gather_object(found, own)"),
    (unsafe_loading, "from torch.distributed import broadcast_object_list as send\nsend([own])"),
    (unsafe_loading, "group.collectives().scatter_object_list(out, given)"),
    (unsafe_loading, "import torch.distributed as dist\ngather = partial(dist.gather_object, group=group)"),
    (unsafe_loading, "import torch.distributed.checkpoint as dcp\ndcp.load(state, checkpoint_id=folder)"),
    (unsafe_loading, "import torch\ntorch.distributed.checkpoint.save(state, checkpoint_id=folder)"),
    (unsafe_loading, "from torch.distributed.checkpoint.state_dict_saver import async_save\nasync_save(state)"),
    (unsafe_loading, "from torch.distributed import checkpoint as dcp\nreader = dcp.FileSystemReader(folder)"),
    (unsafe_loading, "import torch.distributed.checkpoint as dcp\ndcp.save(s, storage_writer=dcp.FileSystemWriter(f))"),
    (unsafe_loading, "options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)"),
    (unsafe_loading, "from transformers import AutoConfig\nAutoConfig.from_pretrained(path)"),
    (unsafe_loading, "import transformers\nmodel = transformers.AutoModelForCausalLM.from_config(config)"),
    (ray_import, "def f():\n    import ray"),
    (ray_import, "from ray.util import get_node_ip_address"),
    (broad_except, "try:\n    f()\nexcept:\n    pass"),
    (broad_except, "try:\n    f()\nexcept Exception as error:\n    pass"),
    (broad_except, "try:\n    f()\nexcept (OSError, BaseException):\n    pass"),
    (patched_class, "from megatron.core import TopKRouter\nTopKRouter.routing = mine"),
    (patched_class, "import torch\ntorch.nn.Linear.forward, x = mine, 1"),
    (patched_class, "import torch\ndel torch.nn.Linear.forward"),
    (patched_class, "def f(owner):\n    setattr(owner, name, mine)"),
    (patched_class, "undo.callback(delattr, owner, name)"),
    (patched_class, "class Ours:\n    @classmethod\n    def add(cls):\n        cls.count += 1"),
    (patched_class, "class Ours:\n    pass\nOurs.registry = {}"),
    (eager_import, "import transformers"),
    (eager_import, "from vllm.outputs import RequestOutput"),
    (eager_import, "try:\n    import megatron.core\nexcept ImportError:\n    megatron = None"),
    (eager_import, "class C:\n    import sglang"),
    (eager_import, "import importlib\nvllm = importlib.import_module('vllm')"),
    (eager_import, "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    pass\nelse:\n    import vllm"),
    (core_import, "def f():\n    import transformers"),
    (core_import, "from safetensors.torch import load_file"),
    (other_name_for_ids, "def trace_of(captured: np.ndarray, topology: MoeTopology): ..."),
    (other_name_for_ids, "async def route(*, chosen: Mapping[int, Tensor] | None = None): ..."),
    (other_name_for_ids, "class Batch:\n    experts: torch.Tensor"),
    (waiting_copy, "import torch\nrows = torch.from_numpy(layout.rows).to(device)"),
    (waiting_copy, "import torch\nmask = torch.from_numpy(layout.rows != -1).long().to(device, non_blocking=True)"),
    (too_long_file, "x = 1\n" * 601),
    (empty_test, "def test_nothing():\n    run()"),
    (empty_test, "def test_constant():\n    assert True"),
    (empty_test, "def helper():\n    run()\ndef test_through_a_helper():\n    helper()"),
    (empty_test, "class TestIt:\n    def test_nothing(self):\n        run()"),
    (empty_test, "def test_words():\n    checked = failing.raises()"),
    (empty_test, "def test_circle():\n    test_circle()"),
    (machine_path, "cd /" + "root/project"),
    (machine_path, 'open("/' + 'home/me/data.json")'),
]

FREE: list[tuple[Rule, str]] = [
    (probed_engine, "getattr(config, 'engine')\nisinstance(weights, Path)\nengine.sleep(level)"),
    (unsafe_loading, "import torch\ntorch.load(path, weights_only=True)\nmodel.eval()\njson.load(file)"),
    (unsafe_loading, "import numpy as np\nnp.load(path)\nnp.load(path, allow_pickle=False)"),
    (unsafe_loading, "AutoConfig.from_pretrained(path, trust_remote_code=False)\nEngine.from_pretrained(path)"),
    (unsafe_loading, "import torch.distributed as dist\ndist.all_gather(found, own)\ntokenizer_object = 1"),
    (unsafe_loading, "import torch.distributed.checkpoint as dcp\ndcp.load(state, storage_reader=OurReader(folder))"),
    (broad_except, "try:\n    f()\nexcept (OSError, ValueError):\n    raise"),
    (
        patched_class,
        "import torch\nclass C:\n    def f(self):\n        self.x = torch.ones(1)\n        self.x.grad = None",
    ),
    (patched_class, "import os\nos.environ['X'] = '1'"),
    (eager_import, "def f():\n    import transformers"),
    (eager_import, "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import vllm"),
    (eager_import, "from moe_replay.routers import transformers\nfrom . import vllm"),
    (core_import, "import os.path\nimport numpy as np\nfrom torch import nn\nfrom moe_replay.errors import TraceError"),
    (other_name_for_ids, "def trace_of(routed_experts: np.ndarray, chosen: int, experts: range): ..."),
    (waiting_copy, "import torch\nrows = to_device(layout.rows, device).to(torch.int32)\nids = torch.from_numpy(ids)"),
    (too_long_file, "x = 1\n" * 600),
    (empty_test, "def test_plain():\n    assert f() == 1"),
    (empty_test, "def test_raises():\n    with pytest.raises(ValueError):\n        f()"),
    (empty_test, "def test_library():\n    torch.testing.assert_close(a, b)"),
    (empty_test, "def test_short():\n    close = torch.testing.assert_close\n    close(a, b)"),
    (empty_test, "def test_named():\n    check_alignment(a, b)"),
    (empty_test, "def rank(i):\n    assert f(i)\ndef test_ranks():\n    spawn(rank, 2)"),
    (machine_path, "https://example.org/home/page and src/home/file and ~/home/x and /usr/bin/env"),
]


def name_case(value: object) -> str | None:
    return value.__name__ if callable(value) else None


@pytest.mark.parametrize(("rule", "snippet"), CAUGHT, ids=name_case)
def test_a_rule_catches(rule: Rule, snippet: str) -> None:
    assert offences(rule, [File("src/moe_replay/routes/trace.py", snippet)])


@pytest.mark.parametrize(("rule", "snippet"), FREE, ids=name_case)
def test_a_rule_lets_pass(rule: Rule, snippet: str) -> None:
    assert offences(rule, [File("src/moe_replay/routes/trace.py", snippet)]) == []


def test_every_rule_is_shown_to_bite() -> None:
    assert {rule for rule, _ in CAUGHT} == set(SCOPE)


@pytest.mark.parametrize("path", ["rollout/vllm/engine.py", "replay/adapters/megatron.py"])
def test_other_folders_are_not_core(path: str) -> None:
    assert offences(core_import, [File(f"src/moe_replay/{path}", "def f():\n    import vllm")]) == []


def test_the_cluster_may_use_ray() -> None:
    assert offences(ray_import, [File("src/moe_replay/cluster/driver.py", "def f():\n    import ray")]) == []


# ---- files that serve one sibling only -------------------------------------------------------------------------------


def single_importers(modules: Mapping[str, str]) -> dict[str, str]:
    """Module -> its only importer, for modules that nothing but one module of the same folder imports."""
    importers: dict[str, set[str]] = {}
    for found in (*imports_of(modules), *named_by(modules)):
        importers.setdefault(found.imported, set()).add(found.importer)
    return {
        module: importer
        for module, (importer, *others) in ((name, sorted(names)) for name, names in sorted(importers.items()))
        if not others and module in modules and importer.rpartition(".")[0] == module.rpartition(".")[0]
    }


SERVE_ONE_SIBLING = {
    "cluster.engines": "actors of engines; the driver knows ranks as well",
    "demo.warm_start": "needs torch; the rest of the demo is imported without it",
    "engines.sglang.weights": "weight updates of SGLang; its client samples",
    "engines.sglang.wire": "SGLang's requests and responses, tested without a server",
    "engines.vllm.arguments": "vLLM's arguments, checked without starting it",
    "engines.vllm.capture_worker": "imported by name in vLLM's worker processes",
    "engines.vllm.processes": "subclasses of vLLM's classes, which need it installed",
    "engines.vllm.weights": "imported in vLLM's worker processes only",
    "engines.vllm_serve.weights": "weight updates of `vllm serve`; its client samples",
    "integrations.ms_swift_megatron": "needs torch and ms-swift's trainers; the module that it loads imports neither",
    "integrations.verl_megatron": "a guard for verl's own replay; what it shares with FSDP is in verl_batch",
    "integrations.verl_fsdp": "needs torch and verl's engine; the module that verl loads imports neither",
    "integrations.trl_generation": "engines behind TRL, which rest on other methods of TRL than the trainer does",
    "train.backends.compilation": "compiled layers, and what happens where the compiler fails",
    "train.backends.fsdp_loading": "reading a model folder into shards",
    "train.backends.megatron_plans": "what dispatchers know before the forward; the backend trains without it too",
    "train.backends.megatron_build": "process groups, model and optimizer; the backend trains them",
    "train.backends.megatron_state": "what a rank of Megatron saves",
    "train.learn.step_checks": "the checks of a step, of which the learner asks for the verdict",
    "train.run": "what is open during a run; the loop stays on one page",
    "weights.sender": "one rank of a transfer; the transports decide which ranks send",
    "train.sync.weight_sync": "how an update is sent and retried; the caller decides who holds the device",
    "train.workers.worker": "the program of a worker process",
}


def test_a_file_that_serves_one_sibling_only_has_a_reason() -> None:
    modules = {f"{PACKAGE}.{name}" for name in SERVE_ONE_SIBLING}
    assert single_importers(read_modules()).keys() == modules, "fold it into its importer, or say why it stays"


def test_a_file_that_serves_one_sibling_is_found() -> None:
    modules = {
        "moe_replay.a.part": "x = 1",
        "moe_replay.a.whole": "from moe_replay.a.part import x\nfrom moe_replay.a import shared",
        "moe_replay.a.shared": "y = 2",
        "moe_replay.b": "from moe_replay.a.shared import y\nfrom moe_replay.a.whole import x",
    }
    assert single_importers(modules) == {"moe_replay.a.part": "moe_replay.a.whole"}


# ---- pins ------------------------------------------------------------------------------------------------------------


def pins(name: str) -> list[str]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    return [line for line in lines if line and not line.startswith(("#", "-r "))]


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "requirements").glob("*.txt")))
def test_a_pin_file_holds_exact_versions(name: str) -> None:
    assert [line for line in pins(name) if not re.match(r"[\w.-]+==[\w.]+(; |$)", line)] == []


def test_only_its_own_file_pins_torch() -> None:
    holders = [
        path.name for path in (ROOT / "requirements").glob("*.txt") if re.search(r"(?m)^torch\b", path.read_text())
    ]
    assert holders == ["torch.txt"]


def test_every_extra_that_is_named_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {
        extra
        for file in EVERYTHING
        for listed in re.findall(r"moe-replay\[([a-z,]+)\]", file.text)
        for extra in listed.split(",")
    }
    assert named
    assert named <= set(extras)


def test_commit_hooks_format_like_make_lint() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    (ruff,) = [line.removeprefix("ruff==") for line in pins("test.txt") if line.startswith("ruff==")]
    assert f"rev: v{ruff}\n" in hooks


# ---- importing the package is light ----------------------------------------------------------------------------------


def loaded_by(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after the statement."""
    code = f"import sys\n{statement}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_importing_the_package_imports_no_optional_library() -> None:
    core = [file.path for file in SOURCE if is_core(file) and not file.path.endswith("__init__.py")]
    modules = [path.removeprefix("src/").removesuffix(".py").replace("/", ".") for path in core]
    loaded = loaded_by(f"import {', '.join([PACKAGE, *modules])}")
    assert PACKAGE in loaded
    assert not loaded & OPTIONAL


def test_what_an_interpreter_loaded_is_seen() -> None:
    assert "hypothesis" in loaded_by("import hypothesis.errors")


def test_rewards_are_imported_without_torch() -> None:
    """Processes that score samples start in a fraction of a second, and need no memory for it."""
    loaded = loaded_by(f"import {PACKAGE}.train.rollout.rewards")
    assert "numpy" in loaded
    assert not loaded & ({"torch"} | OPTIONAL)
