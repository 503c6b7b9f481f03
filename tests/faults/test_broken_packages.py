"""A package that is installed and broken: its own error arrives, and no guess in its place."""

import importlib
import sys

import pytest

import shmload
from shmload._checkpoints import objects
from shmload._checkpoints.header import TensorSpec
from shmload._checkpoints.quantised import require_dequantised
from shmload._checkpoints.rule import Rule
from shmload.integrations.dataprep.folder import Folder

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
