"""Imports inside the package point one way (design, section 1)."""

import ast
from pathlib import Path

import pytest

import dflash_hf

ROOT = Path(dflash_hf.__file__).parent

# A module may import from lower layers and from its own layer.
LAYERS = [
    {"errors"},
    {
        "configuration_dflash",
        "checkpoints",
        "masks",
        "draft_cache",
        "graphs",
        "transfers",
        "configuration_checks",
        "inherited",
        "training.anchors",
        "training.attention",
        "training.curve",
        "training.masks",
        "training.losses",
        "training.metrics",
        "training.muon",
        "model_card",
    },
    {
        "modeling_dflash",
        "attention",
        "convolution",
        "gemma4",
        "correction_heads",
        "loading",
        "pretrained",
        "publishing",
        "token_index",
        "compiled_target",
        "compiled_draft",
        "packing",
        "weight_files",
        "target",
        "draft_head",
    },
    {"data", "generation", "training"},
    {"evaluation", "hub"},
    {"cli"},
]
# Within the layer of data, generation and training, only training may look at a sibling, and only at data.
SIBLINGS = {("training", "data")}


def part_of(module: str) -> str | None:
    """The entry of LAYERS that holds `module` (dotted, without the package's name); the longest name wins."""
    names = [name for layer in LAYERS for name in layer if module == name or module.startswith(f"{name}.")]
    return max(names, key=len, default=None)


def level(part: str) -> int:
    return next(number for number, layer in enumerate(LAYERS) if part in layer)


def imports_of(source: str, module: str, *, is_package: bool, modules: set[str]) -> set[str]:
    """Modules of the package that `source` imports, at any depth, absolutely or relatively."""
    found = set()
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("dflash_hf.") for alias in node.names if "dflash_hf." in alias.name}
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = package[: len(package) - node.level + 1] + (node.module.split(".") if node.module else [])
            elif (node.module or "").split(".")[0] == "dflash_hf":
                base = node.module.split(".")[1:]
            else:
                continue
            for alias in node.names:
                name = ".".join([*base, alias.name])
                found.add(name if name in modules else ".".join(base))
    return found - {""}


def forbidden_arrows(sources: dict[str, tuple[str, bool]]) -> list[str]:
    """Arrows that point back, as text. `sources`: module -> (source, is it a package's `__init__`)."""
    wrong = []
    for module, (source, is_package) in sorted(sources.items()):
        part = part_of(module)
        if part is None:
            wrong.append(f"{module} belongs to no layer")
            continue
        for imported in sorted(imports_of(source, module, is_package=is_package, modules=set(sources))):
            other = part_of(imported)
            if other is None:
                wrong.append(f"{module} -> {imported}, which belongs to no layer")
            elif level(other) > level(part):
                wrong.append(f"{module} -> {imported} points back")
            elif level(part) == 3 and level(other) == 3 and part != other and (part, other) not in SIBLINGS:
                wrong.append(f"{module} -> {imported}: siblings do not know each other")
    return wrong


def package_sources() -> dict[str, tuple[str, bool]]:
    sources = {}
    for path in ROOT.rglob("*.py"):
        parts = list(path.relative_to(ROOT).with_suffix("").parts)
        is_package = parts[-1] == "__init__"
        if is_package:
            parts.pop()
        if parts:  # the package's own __init__ may name everything
            sources[".".join(parts)] = (path.read_text(), is_package)
    return sources


def test_no_import_points_back():
    """errors; configuration and pure functions; modeling and target; data, generation, training; evaluation; cli."""
    assert forbidden_arrows(package_sources()) == []


def test_the_walk_sees_the_package():
    """The check above would pass on an empty folder, or if relative imports were resolved to nothing."""
    sources = package_sources()
    assert {"modeling_dflash", "target", "generation.decoding", "training.trainer", "cli.train"} <= set(sources)
    source, is_package = sources["generation.decoding"]
    found = imports_of(source, "generation.decoding", is_package=is_package, modules=set(sources))
    assert {"modeling_dflash", "target", "generation.acceptor"} <= found
    source, is_package = sources["checkpoints"]
    assert imports_of(source, "checkpoints", is_package=is_package, modules=set(sources)) == {
        "errors",
        *(f"checkpoints.{name}" for name in ("deepspec", "deepspec_gemma4", "dflash2", "domino", "dspark", "muse")),
        *(f"checkpoints.{name}" for name in ("speculators", "zlab")),
        "checkpoints.refused",
    }


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("masks", "from .training.trainer import DFlashTrainer"),
        ("masks", "from . import target"),
        ("errors", "import dflash_hf.configuration_dflash"),
        ("modeling_dflash", "def late():\n    from .generation import decoding"),
        ("training.losses", "from ..target import OutputHead"),
        ("training.trainer", "from ..generation.decoding import DFlashDecoding"),
        ("generation.decoding", "from ..training.trainer import DFlashTrainer"),
        ("generation.decoding", "from dflash_hf.data.chat import prepare_dataset"),
        ("data.chat", "from ..training.trainer import DFlashTrainer"),
        ("training.trainer", "from ..cli.main import app"),
        ("target", "from ..dflash_hf.evaluation import harness\nfrom dflash_hf.evaluation import harness"),
        ("a_new_module", "import torch"),
    ],
)
def test_a_backward_import_is_caught(module, source):
    """Put back one wrong import of each kind, in every spelling."""
    sources = {**package_sources(), module: (source, False)}
    arrows = forbidden_arrows(sources)
    assert arrows
    assert all(arrow.startswith(module) for arrow in arrows)


def test_allowed_arrows_pass():
    """Training may use data, and every layer the ones below."""
    sources = {
        "training.trainer": ("from ..data.chat import x\nfrom ..target import y\nfrom .losses import z", False),
        "evaluation.harness": ("from ..generation.decoding import x\nfrom ..training.trainer import y", False),
        "cli.main": ("from dflash_hf.evaluation import harness", False),
    }
    assert forbidden_arrows(sources) == []
