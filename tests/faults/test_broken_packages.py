"""A package that is installed and broken: its own error arrives, and no guess in its place."""

import ast
import importlib
import sys
from pathlib import Path

import pytest

import shmload
from shmload._checkpoints import objects
from shmload._checkpoints.header import TensorSpec
from shmload._checkpoints.quantised import require_dequantised
from shmload._checkpoints.rule import Rule
from shmload.integrations.dataprep.folder import Folder

_ROOT = Path(__file__).parents[2]
# What these catch may have many causes; the handler must look which one it is.
_BROAD = {
    *("AttributeError", "BaseException", "Exception", "ImportError", "ModuleNotFoundError"),
    *("OSError", "PermissionsError", "RuntimeError"),
}
# Whatever is wrong with the socket, another template is started.
_ALLOWED = {"shmload/_templates/caller.py: raise Doubt('', is_replaceable=True) from exc"}

ATTEMPTS = """
import sys
import shmload
out, sys.stdout = sys.stdout, sys.stderr  # the libraries print, too
if sys.argv[2]:
    sys.path.insert(0, sys.argv[2])
def attempt(call):
    try:
        call()
    except Exception as exc:
        print("GOT", type(exc).__name__, sys.argv[3] in str(exc), file=out, flush=True)
def ordinary():
    from diffusers import DiffusionPipeline
    DiffusionPipeline.from_pretrained(sys.argv[1])
for _ in range(2):
    attempt(lambda: shmload.load_pipeline(sys.argv[1], dtype="bfloat16"))
attempt(ordinary)
attempt(lambda: shmload.load_pipeline(sys.argv[1], dtype="bfloat16"))
"""


@pytest.mark.slow
@pytest.mark.libraries
def test_load_with_a_broken_package_raises_what_the_library_raises(
    saved, new_child, configure, tmp_path
):
    configure(cache_dir=tmp_path / "no rules")
    (tmp_path / "peft").mkdir()
    (tmp_path / "peft/__init__.py").write_text("raise AttributeError('it does not fit')")
    process = new_child(ATTEMPTS, saved("flux"), tmp_path, "it does not fit")
    assert [process.expect("GOT") for _ in range(4)] == ["RuntimeError True"] * 4


def _dequantise():
    require_dequantised("a.gguf", [TensorSpec("w", "Q8_0", (32,), 0, 34)], Rule(target="F32"))


NEEDED = {
    "gguf": _dequantise,
    "obstore": objects._obstore.__wrapped__,
    "pyarrow": lambda: Folder("results", {}, "parquet", 1),
    "ray": lambda: importlib.import_module("shmload.integrations.ray"),
}


@pytest.mark.parametrize("package", NEEDED)
def test_package_that_cannot_be_imported_raises_its_own_error(package, tmp_path, monkeypatch):
    for name in list(sys.modules):
        if name.partition(".")[0] == package or name == "shmload.integrations.ray":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("import a_module_that_it_lacks")
    with pytest.raises(ModuleNotFoundError, match="a_module_that_it_lacks") as caught:
        NEEDED[package]()
    assert not isinstance(caught.value, shmload.ShmloadError)


def test_error_at_hand_is_looked_at_before_another_is_raised():
    found = {
        f"{path.relative_to(_ROOT)}: {line}"
        for path in (_ROOT / "shmload").rglob("*.py")
        for line in blind_handlers(path.read_text())
    }
    assert found == _ALLOWED


def test_handler_that_does_not_look_is_found():
    code = "try:\n    import x\nexcept {} as exc:\n    {}raise Missing({}) from exc"
    assert blind_handlers(code.format("ImportError", "", "'x'")) == ["raise Missing('x') from exc"]
    assert not blind_handlers(code.format("ImportError", "", "exc"))
    assert not blind_handlers(code.format("ImportError", "if exc.name: ", "'x'"))
    assert not blind_handlers(code.format("KeyError", "", "'x'"))


def blind_handlers(code):
    """Return the first raise of each handler that turns any error of a broad type into another."""
    found = []
    for handler in ast.walk(ast.parse(code)):
        if not isinstance(handler, ast.ExceptHandler) or not _types(handler) & _BROAD:
            continue
        raised = [each for each in ast.walk(handler) if isinstance(each, ast.Raise) and each.exc]
        causes = {id(each.cause) for each in raised}
        looks = any(
            isinstance(each, ast.Name) and each.id == handler.name and id(each) not in causes
            for each in ast.walk(handler)
        )
        if raised and not looks:
            found.append(ast.unparse(raised[0]))
    return found


def _types(handler):
    named = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return {ast.unparse(each).rpartition(".")[2] if each else "BaseException" for each in named}
