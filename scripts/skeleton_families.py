"""Count the families of diffusers' pipelines that are built from skeletons.

    git clone --depth 1 https://github.com/huggingface/diffusers /tmp/diffusers
    python scripts/skeleton_families.py --diffusers /tmp/diffusers [flux wan ...]

A family is a sub-package of `diffusers.pipelines`. Of each, in alphabetical order, the first class
is taken that can be made tiny with the components of diffusers' own tests. It is saved, loaded once
by shmload, judged, and loaded again. Then the last load is compared with diffusers' own. Families
that need files of the hub, or that diffusers itself cannot load, are listed, and not counted.
`--quick` does not look at what a build leaves in modules, so it finds fewer reasons against a
skeleton; it is for the work at hand.
"""

import argparse
import ast
import importlib
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from stand_in_parts import replace_the_hub

_ROOT = Path(__file__).parents[1]
_DEADLINE_S = 300
# What the tests import to run, and not to make components.
_OF_TESTS_ALONE = ("parameterized", "requests_mock")
_NO_FAMILIES = {"deprecated", "pipeline_utils", "auto_pipeline"}


@dataclass(frozen=True, slots=True)
class Candidate:
    """A class of pipelines, and the test that can make one."""

    family: str
    class_name: str
    module: str
    """The module of the test, below the checkout."""
    test: str


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--diffusers", type=Path, required=True, help="a checkout of diffusers")
    parser.add_argument("--quick", action="store_true", help="do not look at modules")
    parser.add_argument("families", nargs="*", help="default: all")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shmload-families-") as name:
        work = Path(name)
        os.environ |= {"SHMLOAD_SKELETONS": "1", "SHMLOAD_CACHE_DIR": str(work / "cache")}
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(work / "hub")}
        sys.path[:0] = [str(asked.diffusers.resolve()), str(_ROOT / "tests/support")]
        for module in _OF_TESTS_ALONE:
            sys.modules.setdefault(module, mock.MagicMock())
        found = _candidates(asked.diffusers)
        chosen = asked.families or sorted(found)
        _prepare(quick=asked.quick)
        results = [_row(name, found.get(name, []), work) for name in chosen]
    counted = [each for each in results if each is not None]
    print(f"{sum(counted)} of {len(counted)}", flush=True)


def _row(family: str, candidates: list[Candidate], work: Path) -> bool | None:
    """Print the row of a family; return whether it has an equal skeleton, None if not counted."""
    why = "diffusers has no test of it"
    for candidate in candidates:
        source = work / family
        shutil.rmtree(source, ignore_errors=True)
        why = _in_child(lambda each=candidate, to=source: _save_tiny(each, to))
        why = why or _in_child(lambda to=source: _load(to))
        if not why:
            result = _in_child(lambda to=source: _judge(to))
            shutil.rmtree(source, ignore_errors=True)
            print(f"{family:24} {candidate.class_name:44} {result or 'skeleton'}", flush=True)
            return not result
    print(f"{family:24} {'-':44} not counted: {why}", flush=True)
    return None


def _candidates(checkout: Path) -> dict[str, list[Candidate]]:
    """Find the tests by family, in the order in which they are tried, without an import."""
    from diffusers.pipelines import _import_structure

    home = {name: key for key, names in _import_structure.items() for name in names}
    found: dict[str, list[Candidate]] = {key: [] for key in _import_structure}
    for path in sorted((checkout / "tests/pipelines").glob("*/test_*.py")):
        module = ".".join(path.relative_to(checkout).with_suffix("").parts)
        for test, class_name in _tests(ast.parse(path.read_text())):
            family = home.get(class_name)
            if family:
                found[family].append(Candidate(family, class_name, module, test))
    ordered = {key: sorted(each, key=lambda c: c.class_name) for key, each in found.items()}
    return {key: each for key, each in ordered.items() if key not in _NO_FAMILIES}


def _tests(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield each class of a test module that names a class of pipelines, and that name."""
    for node in tree.body:
        for each in node.body if isinstance(node, ast.ClassDef) else ():
            match each:
                case ast.Assign(targets=[ast.Name(id="pipeline_class")], value=ast.Name(id=name)):
                    yield node.name, name


def _in_child(function: Callable[[], None]) -> str:
    """Call a function in a forked child; return why it failed, or nothing."""
    with tempfile.TemporaryFile("w+") as file:
        child = os.fork()
        if child == 0:
            signal.alarm(_DEADLINE_S)
            try:
                function()
            except BaseException as exc:
                if os.environ.get("FAMILIES_TRACEBACK"):
                    traceback.print_exc()
                text = str(exc) if isinstance(exc, _Without) else f"{type(exc).__name__}: {exc}"
                file.write(" ".join(text.split())[:160] or "no reason")
                file.flush()
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        file.seek(0)
        return file.read() or (f"status {status}" if status else "")


def _save_tiny(candidate: Candidate, source: Path) -> None:
    """Make a tiny pipeline and save it; call it in a child, which it changes.

    Raises:
        ValueError: the pipeline has no weights.
        Exception: whatever a test raises that cannot make its components.
    """
    import diffusers
    import torch

    replace_the_hub(source.parent)
    test = getattr(importlib.import_module(candidate.module), candidate.test)()
    torch.manual_seed(0)
    components = test.get_dummy_components()
    pipe = getattr(diffusers, candidate.class_name)(**components)
    pipe.save_pretrained(source)
    if not list(source.glob("*/*.safetensors")):
        raise ValueError("it has no weights")


class _Without(Exception):
    """Raised with the reason why a pipeline has no skeleton."""


# Judging ------------------------------------------------------------------------------------------


def _prepare(*, quick: bool) -> None:
    """Import the libraries once, for all children."""
    import diffusers
    import transformers

    from shmload._building import build, examining, skeletons, snapshot
    from shmload._building.rules import import_libraries

    import_libraries()
    importlib.import_module(examining.__name__)
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()

    def judge(request: Any) -> None:
        skeletons.skeleton_memo(request.key).write(examining.examine(request))

    build.ask = judge
    if quick:
        snapshot.Snapshot._walk = lambda *_: None  # type: ignore[method-assign]


def _load(source: Path) -> None:
    """Load as diffusers does; a pipeline that it cannot load is not counted."""
    import torch
    from comparing import reference

    reference(source, torch.bfloat16)


def _judge(source: Path) -> None:
    """Load twice and compare with the library's load.

    Raises:
        _Without: it has no skeleton, which was not used, or led to another pipeline.
    """
    import torch
    from comparing import assert_equal, reference

    import shmload
    from shmload._building.build import Build
    from shmload._building.skeletons import skeletons_of

    shmload.load_pipeline(source, torch_dtype=torch.bfloat16)
    made = skeletons_of(str(source))
    if not made:
        raise _Without("no skeleton was asked for")
    if made[0].models is None:
        raise _Without(made[0].reason)
    build = mock.Mock(side_effect=_Without(f"not used: {made[0].why_not()}"))
    with mock.patch.object(Build, "_build_models", build):
        got = shmload.load_pipeline(source, torch_dtype=torch.bfloat16)
    try:
        assert_equal(got, reference(source, torch.bfloat16))
    except AssertionError as exc:
        raise _Without(f"DIFFERENT: {exc}") from exc


if __name__ == "__main__":
    main()
