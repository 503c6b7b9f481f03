"""The public names are listed, sorted and importable, and importing shmload is light."""

import ast
import sys
import traceback
from pathlib import Path

import pytest
from children import run_to_end

import shmload
from shmload import errors


def test_all_names_each_public_name_once():
    assert sorted(shmload.__all__) == sorted({*shmload._HOMES, *errors.__all__})


@pytest.mark.parametrize("names", [list(shmload._HOMES), errors.__all__], ids=["face", "errors"])
def test_names_are_listed_in_order(names):
    assert names == sorted(names)


def test_type_checkers_see_the_same_names():
    statements = ast.parse(Path(shmload.__file__).read_text()).body
    (unseen,) = (node for node in statements if isinstance(node, ast.If))
    found = {
        name.name: statement.module
        for statement in unseen.body
        if isinstance(statement, ast.ImportFrom)
        and statement.module not in ("typing", "shmload", "shmload.errors")
        for name in statement.names
    }
    assert found == shmload._HOMES


@pytest.mark.parametrize("name", shmload.__all__)
def test_public_name_belongs_to_the_package(name):
    assert getattr(shmload, name).__module__ == "shmload"
    assert getattr(shmload, name).__doc__
    assert name in dir(shmload)


def test_error_outside_the_tree_does_not_exist():
    for name in shmload.__all__:
        value = getattr(shmload, name)
        if isinstance(value, type) and issubclass(value, BaseException):
            assert issubclass(value, shmload.ShmloadError)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("rm", "; did you mean 'evict'?"),
        ("ls", "; did you mean 'models'?"),
        ("load_pipline", "; did you mean 'load_pipeline'?"),
        ("doctor", "; it is a command: `shmload doctor`"),
        ("_ipython_display_", ""),
    ],
)
def test_unknown_name_is_told_what_may_be_meant(name, hint):
    with pytest.raises(AttributeError) as caught:
        getattr(shmload, name)
    assert str(caught.value) == f"module 'shmload' has no attribute {name!r}{hint}"
    shown = "".join(traceback.format_exception(caught.value))
    assert shown.lower().count("did you mean") == hint.count("did you mean")  # Python adds none


def test_import_takes_little_of_the_standard_library():
    """`shmload run` imports this before each program: typing and errors take longer than it may."""
    code = "import sys; before = set(sys.modules); import shmload; print(set(sys.modules) - before)"
    done = run_to_end(
        [sys.executable, "-S", "-c", code],
        check=True,
        cwd=Path(shmload.__file__).parents[1],
        env={"PYTHONPATH": str(Path(shmload.__file__).parents[1])},
    )
    assert ast.literal_eval(done.stdout) == {"shmload"}


@pytest.mark.parametrize("name", ["shmload", "shmload.workers.main"])
def test_import_is_light(name):
    heavy = ["torch", "diffusers", "transformers", "numpy", "safetensors", "huggingface_hub"]
    code = f"import sys, {name}; print(sorted({{*{heavy}}} & {{*sys.modules}}))"
    # -P keeps the tests' directory off the path.
    done = run_to_end([sys.executable, "-P", "-c", code], check=True)
    assert done.stdout.strip() == "[]"


def test_dir_lists_public_names_only():
    shown = [name for name in dir(shmload) if not name.startswith("__")]
    assert set(shmload.__all__) <= set(shown)
    assert not {"Any", "TYPE_CHECKING", "importlib", "sys", "_HOMES"}.intersection(shown)
