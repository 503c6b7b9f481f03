"""What the import contracts do not see: modules in no layer, and imports by a string."""

import ast
import tomllib
from pathlib import Path

_ROOT = Path(__file__).parents[2]
# The package's `__init__` imports on first use; `library` is the core's door to model libraries.
_ALLOWED = {"shmload/__init__.py", "shmload/_checkpoints/library.py"}
_MODULES = sorted(
    path.relative_to(_ROOT)
    for folder in ("shmload", "workers", "integrations")
    for path in (_ROOT / folder).rglob("*.py")
)


def test_each_module_has_its_floor():
    contracts = tomllib.loads((_ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    floors = {name for row in contracts["contracts"][0]["layers"] for name in row.split(" | ")}
    names = {".".join(["shmload", *path.with_suffix("").parts]) for path in _MODULES}
    names = {
        name.replace("shmload.shmload.", "shmload.").removesuffix(".__init__") for name in names
    }
    doors = {"shmload", "shmload.shmload", "shmload.integrations"}
    missing = {
        name
        for name in names - doors
        if not any(name == floor or name.startswith(f"{floor}.") for floor in floors)
    }
    assert not missing


def test_the_allowed_are_modules():
    assert {*map(Path, _ALLOWED)} <= {*_MODULES}


def test_no_module_imports_another_by_a_string():
    found = {str(path) for path in _MODULES if hidden_imports((_ROOT / path).read_text())}
    assert found <= _ALLOWED


def test_import_by_a_string_is_found():
    code = "import importlib as i\nfrom importlib import import_module\n{}('shmload._cli')"
    for call in ("i.import_module", "import_module", "__import__"):
        assert hidden_imports(code.format(call)) == [3]


def hidden_imports(code):
    """Return the lines that import a module of shmload by a string."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).rpartition(".")[2] in ("import_module", "__import__")
        and any(
            isinstance(part, ast.Constant) and str(part.value).startswith(("shmload", "."))
            for argument in node.args
            for part in ast.walk(argument)
        )
    ]
