"""Prove that restored pipelines equal built ones, family by family of diffusers.

    git clone --depth 1 https://github.com/huggingface/diffusers /tmp/diffusers
    python scripts/remembered_families.py --diffusers /tmp/diffusers [flux wan ...]

Run it once a release, and with the oldest libraries (their own tag of diffusers as the checkout).
A family is a sub-package of `diffusers.pipelines`. Diffusers' own tests make tiny pipelines of some
classes; this takes the first of them. What these would fetch from the hub is made here. One process
loads it by shmload and keeps it. Another one, of an interpreter with other hashes, recalls it,
loads the directory with diffusers alone, and compares both as the tests do
(tests/support/comparing.py).

It prints a line for each pipeline: how much of it was kept, and whether what was recalled is equal
or where it differs first. Exit code 1: one differs, or could not be recalled. Families that cannot
be made tiny are listed and not counted.
"""

import argparse
import ast
import importlib
import multiprocessing
import os
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import shmload

_SUPPORT = Path(__file__).parents[1] / "tests/support"
_DTYPES = ("float32", "bfloat16")
_DEADLINE_S = 300
_WHOLE = "whole"

# What makes a configuration tiny; each class takes what it knows.
_SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "intermediate_size", "d_ff", "embed_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "depth"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "num_key_value_heads"), 2),
    **dict.fromkeys(("out_hidden_size", "ffn_hidden_size"), 32),
    **dict.fromkeys(("d_kv", "kv_channels"), 16),
    **dict.fromkeys(("vocab_size", "padded_vocab_size"), 1103),
    **{"image_size": 32, "patch_size": 8, "deepstack_visual_indexes": [0, 1]},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--diffusers", type=Path, required=True, help="a checkout of diffusers")
    parser.add_argument("families", nargs="*", help="default: all")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shmload-families-") as folder:
        work = Path(folder)
        os.environ |= {"SHMLOAD_CACHE_DIR": str(work / "cache"), "PYTHONHASHSEED": "1"}
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(work / "hub")}
        _prepare(asked.diffusers)
        found = _tests_by_family(asked.diffusers)
        rows = [_judge(name, found.get(name, []), work) for name in asked.families or found]
    equal, missing = rows.count(True), rows.count(None)
    print(f"{equal} equal, {rows.count(False)} different, {missing} not counted")
    sys.exit(False in rows)


def _judge(family: str, tests: list[tuple[str, str, str]], work: Path) -> bool | None:
    """Keep, recall and compare a pipeline; print its row. None if none can be made."""
    why = "diffusers has no test of it"
    for module, test, class_name in tests:
        source = work / family / class_name
        try:
            _in_child("fork", _save_tiny, module, test, class_name, source)
        except Exception as exc:  # whatever a class raises that cannot be made
            why = _reason(exc)
            continue
        cells = {dtype: _difference(source, dtype) for dtype in _DTYPES}
        shmload.evict(source)
        print(f"{family:24} {class_name:44} {cells}", flush=True)
        return all(cell.endswith("equal") for cell in cells.values())
    print(f"{family:24} {'-':44} not counted: {why}", flush=True)
    return None


def _difference(source: Path, dtype: str) -> str:
    try:
        kept = _in_child("fork", _keep, source, dtype)
        return f"{kept}, {_in_child('spawn', _compare, source, dtype)}"
    except Exception as exc:  # of shmload or the libraries: no pipeline may fail
        return _reason(exc)


def _reason(exc: Exception) -> str:
    return textwrap.shorten(f"{type(exc).__name__}: {exc}", 300)


def _in_child(method: str, function: Callable[..., str], *arguments: object) -> str:
    """Call a function in a process of its own, so that none sees what another one has left."""
    with multiprocessing.get_context(method).Pool(1, _silence) as pool:
        return pool.apply_async(function, arguments).get(_DEADLINE_S)


def _silence() -> None:
    """Have what the libraries print go nowhere."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)


# How a pipeline is kept, recalled and compared ----------------------------------------------------


def _keep(source: Path, dtype: str) -> str:
    """Load a directory so that a later load recalls its pipeline; return how much of it is kept."""
    shmload.load_pipeline(source, dtype=dtype, keep=True, progress=False)
    return [info.kept for info in shmload.segments() if info.kept][-1]


def _compare(source: Path, dtype: str) -> str:
    """Recall a pipeline, load it with diffusers alone, and compare them.

    Raises:
        AssertionError: they differ.
    """
    sys.path.append(str(_SUPPORT))
    import torch
    from comparing import assert_equal, reference

    from shmload._building import attempt

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("nothing was recalled")

    if [info.kept for info in shmload.segments() if info.kept][-1] == _WHOLE:
        attempt.load = refuse
    got = shmload.load_pipeline(source, dtype=dtype, keep=True, progress=False)
    torch.manual_seed(0)  # for weights that are in no file
    wanted = reference(source, getattr(torch, dtype))
    assert_equal(got, wanted)
    return "equal"


# Tiny pipelines -----------------------------------------------------------------------------------


def _prepare(checkout: Path) -> None:
    """Import once what all children need, and have the checkout's tests found by imports."""
    sys.path[:0] = [str(_SUPPORT), str(checkout.resolve())]
    for module in ("parameterized", "requests_mock"):  # the tests import them to run
        sys.modules.setdefault(module, mock.MagicMock())
    from shmload._building.rules import import_libraries

    import_libraries()


def _tests_by_family(checkout: Path) -> dict[str, list[tuple[str, str, str]]]:
    """Return the module, class and class of pipelines of each test; without an import of them."""
    from diffusers.pipelines import _import_structure

    home = {name: family for family, names in _import_structure.items() for name in names}
    found: dict[str, list[tuple[str, str, str]]] = {family: [] for family in home.values()}
    for path in sorted((checkout / "tests/pipelines").glob("*/test_*.py")):
        module = ".".join(path.relative_to(checkout).with_suffix("").parts)
        for test, class_name in _tests(ast.parse(path.read_text())):
            if class_name in home:
                found[home[class_name]].append((module, test, class_name))
    return found


def _tests(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield each class of a test module that names a class of pipelines, and that name."""
    for node in tree.body:
        for each in node.body if isinstance(node, ast.ClassDef) else ():
            match each:
                case ast.Assign(targets=[ast.Name(id="pipeline_class")], value=ast.Name(id=name)):
                    yield node.name, name


def _save_tiny(module: str, test: str, class_name: str, source: Path) -> str:
    """Make a tiny pipeline and save it.

    Raises:
        ValueError: the pipeline has no weights.
        Exception: whatever is raised where components cannot be made, or diffusers cannot load it.
    """
    import diffusers
    import torch
    from comparing import reference

    with _made_here():
        torch.manual_seed(0)
        components = getattr(importlib.import_module(module), test)().get_dummy_components()
    getattr(diffusers, class_name)(**components).save_pretrained(source)
    if not list(source.glob("*/*.safetensors")):
        raise ValueError("it has no weights")
    reference(source)
    return ""


def _made_here() -> Any:
    """Make what tests fetch from the hub: tiny models, configurations, tokenizers, extractors."""
    import contextlib

    import transformers
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
    from transformers.feature_extraction_utils import FeatureExtractionMixin

    def model(cls: Any, source: Any, **kwargs: Any) -> Any:
        import torch

        made = cls(kwargs.get("config") or _config(cls.config_class))
        for parameter in made.parameters():  # some classes leave them as the memory was
            torch.nn.init.normal_(parameter, std=0.02)
        return made

    ordinary = PreTrainedTokenizerBase.from_pretrained.__func__

    def tokenizer(cls: Any, source: Any, **kwargs: Any) -> Any:
        if Path(source).is_dir():
            return ordinary(cls, source, **kwargs)
        return _tokenizer(f"{cls.__name__} {source}")

    def auto_config(source: Any, **kwargs: Any) -> Any:
        is_t5 = "t5" in source.lower()
        return _config(transformers.T5Config if is_t5 else transformers.Qwen2Config)

    stack = contextlib.ExitStack()
    for owner, change in (
        (PreTrainedTokenizerBase, classmethod(tokenizer)),
        (FeatureExtractionMixin, classmethod(lambda cls, source, **kwargs: cls(**kwargs))),
        (PreTrainedModel, classmethod(model)),
        (PretrainedConfig, classmethod(lambda cls, *args, **kwargs: _config(cls))),
        (transformers.AutoConfig, auto_config),
        (transformers.AutoTokenizer, lambda source, **kwargs: _tokenizer(str(source))),
    ):
        stack.enter_context(mock.patch.object(owner, "from_pretrained", change))
    return stack


def _tokenizer(name: str) -> Any:
    import tokenizers_tiny as tiny

    for word, make in (
        ("t5", tiny.t5_tokenizer),
        ("clip", tiny.clip_tokenizer),
        ("gemma", tiny.gemma_tokenizer),
    ):
        if word in name.lower():
            return make()
    return tiny.qwen2_tokenizer()


def _config(config_class: Any) -> Any:
    """Make a tiny configuration, with tiny ones of its parts."""
    has = vars(config_class())
    parts = {
        name: _config(part).to_dict()
        for name, part in getattr(config_class, "sub_configs", {}).items()
        if name in has and hasattr(part, "model_type")
    }
    sizes = {
        name: value
        for name, value in _SIZES.items()
        if name in has and isinstance(has[name], list | tuple) == isinstance(value, list)
    }
    return config_class(**sizes, **parts)


if __name__ == "__main__":
    main()
