"""What a user imports: the names, how they are loaded, and what they say about themselves."""

import ast
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

import dflash_hf

ROOT = Path(dflash_hf.__file__).parent
MODULES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))


def python(code: str) -> str:
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


@pytest.mark.parametrize("name", dflash_hf.__all__)
def test_every_public_name_resolves(name):
    """A lazy name is only checked when someone uses it, so use each."""
    value = getattr(dflash_hf, name)
    assert value is not None
    assert getattr(value, "__name__", name) == name
    assert name in dir(dflash_hf)


def test_an_unknown_name_is_an_attribute_error():
    """hasattr, copy and pickle rely on AttributeError."""
    with pytest.raises(AttributeError, match="no_such_name"):
        dflash_hf.no_such_name  # noqa: B018


def test_importing_the_package_is_quick_and_changes_nothing():
    """No torch, no transformers, and no registration before the first use of a name."""
    code = (
        "import sys, dflash_hf; dir(dflash_hf); dflash_hf.__version__\n"
        "print(sorted({'torch', 'transformers', 'datasets', 'typer'} & set(sys.modules)))"
    )
    assert python(code) == "[]"


def test_the_first_use_of_a_name_registers():
    """AutoConfig knows `dflash` once a public name was used; errors alone load nothing heavy."""
    code = (
        "import sys, dflash_hf; dflash_hf.DFlashError; light = 'torch' not in sys.modules\n"
        "from transformers import AutoConfig, GenerationMixin\n"
        "before = hasattr(GenerationMixin._assisted_decoding, '_dflash_original')\n"
        "from dflash_hf import DFlashConfig\n"
        "config = AutoConfig.for_model('dflash', mask_token_id=3, target_layer_ids=[1])\n"
        "print(light, before, type(config) is DFlashConfig)"
    )
    assert python(code) == "True False True"


def test_the_version_is_the_distribution_s():
    """pyproject.toml and the package say the same."""
    from importlib.metadata import version

    assert dflash_hf.__version__ == version("dflash_hf")


def test_type_information_is_shipped():
    """PEP 561."""
    assert files("dflash_hf").joinpath("py.typed").is_file()


def undocumented(source: str) -> list[str]:
    """Public modules, classes, functions and methods of public classes that have no docstring."""
    missing = []

    def visit(node, prefix):
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if child.name.startswith("_"):
                continue
            overloads_nothing = not any("setter" in ast.dump(decorator) for decorator in child.decorator_list)
            if ast.get_docstring(child) is None and overloads_nothing:
                missing.append(f"{prefix}{child.name}")
            if isinstance(child, ast.ClassDef):
                visit(child, f"{prefix}{child.name}.")

    visit(ast.parse(source), "")
    return missing


@pytest.mark.parametrize("module", MODULES)
def test_every_public_thing_has_a_docstring(module):
    """Also methods; names that start with an underscore are exempt."""
    assert undocumented((ROOT / module).read_text()) == []


@pytest.mark.parametrize("module", [name for name in MODULES if not name.endswith("__init__.py")])
def test_every_module_says_what_it_is_for(module):
    """A module docstring."""
    assert ast.get_docstring(ast.parse((ROOT / module).read_text()))


def test_the_docstring_walk_finds_gaps():
    """The check above can fail."""
    source = 'class A:\n    def f(self):\n        pass\n    def _g(self):\n        pass\ndef h():\n    "doc"\n'
    assert undocumented(source) == ["A", "A.f"]
