"""Tiny pipelines of the families of diffusers, made by its own tests or by `further_families`.

A family is a sub-package of `diffusers.pipelines`. What would be fetched from the hub is made here
(`stand_in_parts`).
"""

import ast
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from stand_in_parts import replace_the_hub

# What the tests import to run, and not to make components.
_OF_TESTS_ALONE = ("parameterized", "requests_mock")
_NO_FAMILIES = {"deprecated", "pipeline_utils", "auto_pipeline"}


@dataclass(frozen=True, slots=True)
class Candidate:
    """A class of pipelines, and what can make one."""

    family: str
    class_name: str
    module: str
    """The module of the test, below the checkout; empty for one of `further_families`."""
    test: str


def prepare(checkout: Path) -> None:
    """Have the tests of a checkout of diffusers found by imports."""
    sys.path.insert(0, str(checkout.resolve()))
    for module in _OF_TESTS_ALONE:
        sys.modules.setdefault(module, mock.MagicMock())


def candidates(checkout: Path) -> dict[str, list[Candidate]]:
    """Return what can be tried of each family, in this order; without an import of the tests."""
    from diffusers.pipelines import _import_structure
    from further_families import FURTHER

    home = {name: key for key, names in _import_structure.items() for name in names}
    found: dict[str, list[Candidate]] = {
        key: [] for key in _import_structure if key not in _NO_FAMILIES
    }
    for path in sorted((checkout / "tests/pipelines").glob("*/test_*.py")):
        module = ".".join(path.relative_to(checkout).with_suffix("").parts)
        for test, class_name in _tests(ast.parse(path.read_text())):
            family = home.get(class_name, "")
            if family in found:
                found[family].append(Candidate(family, class_name, module, test))
    for family in FURTHER.keys() & found.keys():
        found[family].append(Candidate(family, FURTHER[family].class_name, "", ""))
    return {key: sorted(each, key=lambda c: c.class_name) for key, each in found.items()}


def _tests(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield each class of a test module that names a class of pipelines, and that name."""
    for node in tree.body:
        for each in node.body if isinstance(node, ast.ClassDef) else ():
            match each:
                case ast.Assign(targets=[ast.Name(id="pipeline_class")], value=ast.Name(id=name)):
                    yield node.name, name


def save_tiny(candidate: Candidate, source: Path) -> None:
    """Make a tiny pipeline and save it; call it in a child, which it changes.

    Raises:
        ValueError: the pipeline has no weights.
        Exception: whatever is raised where components cannot be made.
    """
    import diffusers
    import torch
    from further_families import FURTHER

    replace_the_hub(source.parent)
    torch.manual_seed(0)
    if candidate.module:
        test = getattr(importlib.import_module(candidate.module), candidate.test)()
        components = test.get_dummy_components()
    else:
        components = FURTHER[candidate.family].make()
    pipe = getattr(diffusers, candidate.class_name)(**components)
    pipe.save_pretrained(source)
    if not list(source.glob("*/*.safetensors")):
        raise ValueError("it has no weights")
