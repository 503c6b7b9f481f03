"""The rules for imports hold for every module and room of the core."""

import tomllib
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def test_every_room_of_the_core_is_under_contract():
    config = tomllib.loads((_ROOT / "pyproject.toml").read_text())
    *_, core = config["tool"]["importlinter"]["contracts"]
    rooms = {path.parent.name for path in (_ROOT / "shmload").glob("*/__init__.py")}
    modules = {path.stem for path in (_ROOT / "shmload").glob("_[!_]*.py")}
    others = {"integrations", "workers"}
    assert set(core["source_modules"]) == {f"shmload.{name}" for name in (rooms | modules) - others}
