"""The private names of the libraries are where shmload looks; if one moves, this names it."""

import ast
import functools
import importlib
import inspect
from pathlib import Path

import pytest
import transformers

from shmload import _compat as compat

pytestmark = pytest.mark.libraries

_LIBRARIES = ("torch", "diffusers", "transformers", "accelerate", "safetensors", "huggingface_hub")
_ROOT = Path(__file__).parents[2]
_MODULES = [
    path.relative_to(_ROOT)
    for folder in ("shmload", "workers", "integrations")
    for path in sorted((_ROOT / folder).rglob("*.py"))
]
# A base class has to be named where it is used.
_BASES = {"torch.utils._python_dispatch"}

# What came with transformers 5.
_NEW = (
    "transformers.conversion_mapping",
    "transformers.core_model_loading",
    "transformers.utils.output_capturing",
)


@pytest.mark.parametrize("where", compat.NAMES)
def test_name_is_there(where):
    if where.startswith(_NEW) and transformers.__version__ < "5":
        pytest.skip("an older transformers")
    home, _, path = where.partition(":")
    *above, name = path.split(".")
    holder = functools.reduce(getattr, above, importlib.import_module(home))
    # Attributes that a constructor sets, and inner functions, are in the code alone.
    assert hasattr(holder, name) or name in inspect.getsource(holder), compat.NAMES[where]


@pytest.mark.parametrize("where", ["no_such_module:name", "torch:_no_such_name"])
def test_name_that_has_moved_is_none(where):
    assert compat.find(where) is None


def test_no_other_module_names_what_is_private_to_a_library():
    for path in _MODULES:
        if path.name != "_compat.py":
            assert not private_names((_ROOT / path).read_text()) - _BASES, path


def private_names(code):
    """Return the dotted names of a library in some code that have a private part."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Import(names=names):
                found |= {each.name for each in names}
            case ast.ImportFrom(module=str(module), names=names, level=0):
                found |= {module} | {
                    f"{module}.{each.name}" for each in names if each.name[0] == "_"
                }
            case ast.Attribute():
                found.add(ast.unparse(node))
    return {
        name
        for name in found
        if name.split(".")[0] in _LIBRARIES
        and any(part[0] == "_" and part[:2] != "__" for part in name.split("."))
    }
