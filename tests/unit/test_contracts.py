"""The rules for imports hold for every module of the core."""

import tomllib
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def test_every_module_of_the_core_is_under_contract():
    config = tomllib.loads((_ROOT / "pyproject.toml").read_text())
    *_, core = config["tool"]["importlinter"]["contracts"]
    modules = {f"shmload.{path.stem}" for path in (_ROOT / "shmload").glob("_[!_]*.py")}
    assert set(core["source_modules"]) == modules
