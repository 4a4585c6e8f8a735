"""Tests who may import whom, which parts stay pure, and that our folder called `kernels` does not confuse
transformers.

Imports are read from the syntax tree, wherever they stand in a file. What the tree does not show (a library that loads
torch by itself) is caught by importing the torch-free modules in a fresh interpreter.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Iterable

import pytest

from tools.import_graph import COMPOSITION_ROOTS, ROOT, Module, circles, import_graph, is_below, modules

OURS = ("app", "benchmarks", "cache", "engine", "fleet", "kernels", "loadgen", "model", "scheduler", "tests")

# What the app and whoever else runs without torch may import of the engine.
OF_ENGINE = (
    "engine.process.client",
    "engine.build.resources",
    "engine.config",
    "engine.messages",
    "engine.build.sizes",
)
# Composition root -> the modules of ours that it may import too, where it needs them: inside a function.
ROOTS = {"app.main": ("fleet.replica",), "app.cli": OURS}
# Decisions and names of a fleet, which import nothing of ours.
ALONE = ("fleet.routing", "fleet.scaling", "fleet.keys")
# Folder -> the modules of ours it may import; a name stands for everything below it.
ALLOWED = {
    "scheduler": ("scheduler",),
    "kernels": ("kernels",),
    "cache": ("cache", "kernels"),
    "engine": ("engine", "scheduler", "cache", "kernels"),
    "app": ("app", *OF_ENGINE, "model.directories"),
    "fleet": ("fleet", "app", *OF_ENGINE),
    "loadgen": ("loadgen", "scheduler", "cache", "fleet.routing", "fleet.scaling"),
    "model": ("model", "engine.gguf"),
}
# What needs the extra `fleet`, which is seldom installed.
OF_RAY = ("fleet.ray_app", "fleet.supervise.cluster")
TENSOR_LIBRARIES = ("torch", "transformers", "triton", "flash_attn")
# In cache/ only transfer/ and storage/ touch bytes; the rest of it, and scheduler/, know no tensors, files, threads or
# clock.
BYTES = ("cache.transfer", "cache.storage")
IMPURE = (
    *TENSOR_LIBRARIES,
    *("asyncio", "concurrent", "datetime", "io", "mmap", "multiprocessing", "os", "pathlib", "select", "shutil"),
    *("signal", "socket", "sqlite3", "subprocess", "tempfile", "threading", "time", "zmq"),
)
# The floors of app/, from the top: a module imports from its own folder and from the floors below. Two folders on one
# floor do not know each other.
APP_FLOORS = (
    ("cli",),
    ("main",),
    ("api",),
    ("http",),
    ("observe",),
    ("turn",),
    ("conversations",),
    ("text", "tenancy"),
    ("schemas",),
    ("settings", "errors", "state_dir", "version"),
    ("state_disk",),
)
# Options that are wings, and the parts of the middle that import one although they compose nothing. No list may grow; a
# wing whose list is empty is known to the composition roots alone.
COMPOSES = (*COMPOSITION_ROOTS, "engine.build", "engine.process.rank")
WINGS: dict[str, tuple[str, ...]] = {
    "fleet": ("loadgen.fleet.simulation",),  # the simulator runs the classes of the server
    "engine.ranks": (),
    "engine.codec": (),
    "engine.model.offload": (),
    "engine.packed": (),
    "engine.gguf": ("model.smollm2",),  # a program by itself, which converts one file
    "engine.drafts": (),
    "engine.parked": (),
    "kernels.selectors": (),
    # One place names all policies, for the server and the simulators; the simulation checks the window's promises.
    "scheduler.car": ("loadgen.virtual.simulation", "scheduler.make_policy"),
    "cache.transfer.redis": (),
    "kernels.int8_pages": (),
    "cache.storage.redis": (
        *("cache.transfer.redis.fetches", "cache.transfer.redis.source", "cache.transfer.redis.streams"),
        "cache.transfer.redis.upload_stream",  # the other half of the wing
    ),
}
CODE_FROM_DATA = ("pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib")


def is_pure(name: str) -> bool:
    return is_below(name, ("scheduler", "cache", *ALONE)) and not is_below(name, BYTES)


def is_torch_free(name: str) -> bool:
    return is_pure(name) or is_below(name, ("app", "fleet", "loadgen", *OF_ENGINE, "model.directories"))


def complaint(module: Module, line: int, what: str) -> str:
    return f"{module.path.relative_to(ROOT)}:{line}: {what}"


def forbidden_imports(module: Module) -> list[str]:
    folder = module.name.split(".")[0]
    complaints = []
    for imported in module.imports():
        ours = imported.name.split(".")[0] in OURS
        lazily = imported.lazy and any(
            is_below(module.name, (root,)) and is_below(imported.name, reached) for root, reached in ROOTS.items()
        )
        if ours and not is_below(imported.name, ALLOWED[folder]) and not lazily:
            complaints.append(complaint(module, imported.line, f"{folder} may not import {imported.name}"))
        if ours and is_below(module.name, ALONE):
            complaints.append(complaint(module, imported.line, f"{module.name} imports nothing of ours"))
        if ours and folder == "loadgen" and is_below(imported.name, BYTES):
            complaints.append(
                complaint(module, imported.line, f"loadgen uses the pure part of cache, not {imported.name}")
            )
        if is_pure(module.name) and is_below(imported.name, (*IMPURE, "kernels", *BYTES)):
            complaints.append(complaint(module, imported.line, f"a pure module imports {imported.name}"))
        if is_torch_free(module.name) and is_below(imported.name, TENSOR_LIBRARIES):
            complaints.append(complaint(module, imported.line, f"{module.name} must stay free of {imported.name}"))
    return complaints


def forbidden_calls(module: Module) -> list[str]:
    """Code from data: eval, exec, unpickling (`torch.load` unpickles unless told otherwise); files and unseeded chance
    in pure modules.
    """
    complaints = [
        complaint(module, imported.line, f"{imported.name} runs code from data")
        for imported in module.imports()
        if is_below(imported.name, CODE_FROM_DATA)
    ]
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        weights_only = any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords)
        if called in ("eval", "exec") or (called == "torch.load" and not weights_only):
            complaints.append(complaint(module, node.lineno, f"{called} runs code from data"))
        if is_pure(module.name) and (called == "open" or (called.startswith("random.") and called != "random.Random")):
            complaints.append(complaint(module, node.lineno, f"a pure module calls {called}"))
    return complaints


def test_folders_import_only_what_they_may():
    assert [c for module in modules(*ALLOWED) for c in forbidden_imports(module)] == []


def climbing_imports(module: Module) -> list[str]:
    """Imports inside app/ that do not go down."""
    floors = {name: floor for floor, names in enumerate(APP_FLOORS) for name in names}
    own = module.name.split(".")[1]
    complaints = []
    for imported in module.imports():
        folder, _, rest = imported.name.partition(".")
        other = rest.split(".")[0]
        if folder == "app" and other != own and floors[other] <= floors[own]:
            complaints.append(complaint(module, imported.line, f"app.{own} is not above app.{other}"))
    return complaints


def test_imports_inside_app_go_down():
    assert [c for module in modules("app") if module.name != "app" for c in climbing_imports(module)] == []


@pytest.mark.parametrize(
    ("name", "source", "complaints"),
    [
        ("app.turn.service", "from reprise.app.observe.live import Live", 1),
        ("app.turn.service", "def f():\n    import reprise.app.api.calls", 1),
        ("app.text.template", "from reprise.app.tenancy import quotas", 1),
        ("app.main", "from reprise.app.api import openapi\nfrom reprise.app.settings.settings import Settings", 0),
        ("app.turn.service", "from reprise.app.turn import prepare\nfrom reprise.engine.messages import Submit", 0),
    ],
)
def test_an_import_that_climbs_is_found(name, source, complaints):
    assert len(climbing_imports(Module(name, ROOT / "x.py", ast.parse(source)))) == complaints


def test_no_modules_import_each_other():
    assert circles(import_graph(modules(*ALLOWED, "benchmarks"))) == []


def test_no_two_folders_import_each_other():
    """A folder and one inside it may: what they share lies in the outer one."""
    parsed = list(modules(*ALLOWED, "benchmarks"))
    folder = {m.name: m.name if m.path.stem == "__init__" else m.name.rpartition(".")[0] for m in parsed}
    graph = import_graph([module for module in parsed if not is_below(module.name, COMPOSITION_ROOTS)])
    arrows = {(folder[name], folder[other]) for name, named in graph.items() for other in named}
    apart = {(a, b) for a, b in arrows if not is_below(a, (b,)) and not is_below(b, (a,))}
    assert both_ways(apart) == []


def both_ways(arrows: set[tuple[str, str]]) -> list[tuple[str, str]]:
    return sorted((a, b) for a, b in arrows if a < b and (b, a) in arrows)


def test_no_two_top_folders_import_each_other():
    """Composition roots are outside: they put together what does not know each other."""
    parsed = [m for m in modules(*ALLOWED, "benchmarks") if not is_below(m.name, COMPOSITION_ROOTS)]
    top = {(name.split(".")[0], other.split(".")[0]) for name, named in import_graph(parsed).items() for other in named}
    assert both_ways({(a, b) for a, b in top if a != b}) == []
    assert ("fleet", "app") in top, "a folder that imports another one is seen"


def importers(wing: str, parsed: Iterable[Module]) -> set[str]:
    """Modules outside of a wing that import it and compose nothing."""
    return {
        module.name
        for module in parsed
        for imported in module.imports()
        if is_below(imported.name, (wing,)) and not is_below(module.name, (wing, *COMPOSES))
    }


@pytest.mark.parametrize("wing", WINGS)
def test_the_middle_imports_a_wing_nowhere_else(wing):
    assert importers(wing, modules(*ALLOWED)) == set(WINGS[wing])


def test_an_import_of_a_wing_is_found():
    tree = ast.parse("from reprise.engine.ranks import group")
    parsed = [Module(name, ROOT / "x.py", tree) for name in ("engine.engine", "engine.build.x", "engine.ranks.y")]
    assert importers("engine.ranks", parsed) == {"engine.engine"}


def test_nothing_runs_code_from_data():
    assert [c for module in modules(*ALLOWED, "benchmarks") for c in forbidden_calls(module)] == []


@pytest.mark.parametrize(
    ("name", "source", "complaints"),
    [
        ("scheduler.x", "from reprise.cache import table", 1),
        ("scheduler.x", "import random\nfrom collections import deque", 0),
        ("scheduler.x", "def f():\n    import time", 1),
        ("scheduler.x", "from reprise.scheduler import ports\nopen('x')", 1),
        ("scheduler.x", "import random\nrandom.shuffle(waiting)", 1),
        ("scheduler.x", "import random\nrng = random.Random(0)\nrng.shuffle(waiting)", 0),
        ("cache.manager", "from reprise.kernels import kv_copy", 1),
        ("cache.manager", "import reprise.scheduler.ports", 1),
        ("cache.manager", "from reprise.cache.storage.slab import Slab", 1),
        ("cache.transfer.loader", "from reprise.cache.storage.slab import Slab", 0),
        ("cache.storage.extent_store", "import os\nimport torch\nfrom reprise.kernels import kv_copy", 0),
        ("kernels.rope", "from reprise.cache.block import BLOCK_SIZE", 1),
        ("engine.process.client", "import torch.cuda", 1),
        ("engine.model.hf_model", "import torch\nfrom reprise.app.settings import Settings", 1),
        ("app.main", "from reprise.engine import messages\nfrom reprise.engine.process import client", 0),
        ("app.main", "import reprise.engine.build", 1),
        ("app.main", "def f():\n    import reprise.engine.build", 1),
        ("app.cli.program", "def f():\n    import reprise.engine.build", 0),
        ("app.cli.program", "import reprise.engine.build", 1),
        ("app.main", "def f():\n    from reprise.fleet.replica.replica import Replica", 0),
        ("app.main", "from reprise.fleet.replica.replica import Replica", 1),
        ("app.main", "def f():\n    from reprise.fleet.gateway.server import GatewayServer", 1),
        ("app.turn.service", "from reprise.fleet.keys import SessionName", 1),
        ("app.api.calls", "def f():\n    from reprise.fleet import protocol", 1),
        ("app.cli.program", "def f():\n    from reprise.fleet.gateway.server import GatewayServer", 0),
        ("app.cli.program", "from reprise.fleet import secrets", 1),
        ("fleet.replica.claims", "from reprise.app.turn.ports import EnginePort", 0),
        ("fleet.routing", "from reprise.fleet import keys", 1),
        ("fleet.scaling", "import time", 1),
        ("fleet.keys", "import hmac", 0),
        ("fleet.gateway", "import asyncio\nfrom reprise.fleet import routing", 0),
        ("fleet.gateway", "import torch", 1),
        ("engine.engine", "from reprise.fleet import routing", 1),
        ("cache.manager", "from reprise.fleet import routing", 1),
        ("loadgen.sim.fleet", "from reprise.fleet import routing", 0),
        ("loadgen.sim.fleet", "from reprise.fleet import directory", 1),
        ("loadgen.virtual.simulation", "from reprise.cache.manager import CacheManager\nimport time", 0),
        ("loadgen.virtual.simulation", "from reprise.cache.storage.slab import Slab", 1),
        ("engine.model.hf_model", "import pickle", 1),
        ("engine.model.hf_model", "eval('1')", 1),
        ("engine.model.hf_model", "model.eval()", 0),
        ("engine.model.hf_model", "torch.load(path)", 1),
        ("engine.model.hf_model", "torch.load(path, weights_only=True)", 0),
    ],
)
def test_the_rules_catch_what_they_should(name, source, complaints):
    module = Module(name, ROOT / "x.py", ast.parse(source))
    assert len(forbidden_imports(module) + forbidden_calls(module)) == complaints


def run_python(program: str, *arguments: str) -> str:
    """The standard output of a program run by a fresh interpreter that finds our packages first."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=environment, capture_output=True, text=True, timeout=100, cwd="/",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_torch_free_modules_load_no_torch():
    names = [m.name for m in modules(*ALLOWED) if is_torch_free(m.name) and not is_below(m.name, OF_RAY)]
    entry_points = {"scheduler.scheduler", "cache.manager", "app.main", "engine.process.client", "engine.messages"}
    assert entry_points <= set(names)
    program = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module("reprise." + name)
    if "torch" in sys.modules:
        print(name)
        break
"""
    assert run_python(program, *names) == "", "this module is the first to load torch"


def test_transformers_ignores_our_folder_called_kernels(tmp_path):
    """Run in a checkout's root, it takes our folder for the hub's package, and must find it too old to use."""
    program = """
import importlib, sys
from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import import_utils

ours = importlib.import_module("kernels")
assert Path(ours.__file__) == Path(sys.argv[2])
assert import_utils._is_package_available("kernels", return_version=True) == (True, ours.__version__)
assert not import_utils.is_kernels_available()

config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)
directory = Path(sys.argv[1]) / "tiny"
LlamaForCausalLM(config).save_pretrained(directory)
model = AutoModelForCausalLM.from_pretrained(directory)
assert model(input_ids=torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 64)
print("loaded")
"""
    assert run_python(program, str(tmp_path), str(ROOT / "kernels/__init__.py")) == "loaded"
