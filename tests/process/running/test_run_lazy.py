"""`shmload run`: packages that import their names on first use, as diffusers does."""

_PACKAGE = """
import importlib
_class_to_module = {"Model": "models"}
def __getattr__(name):
    if name not in _class_to_module:
        raise AttributeError(name)
    value = getattr(importlib.import_module(f"{__name__}.{_class_to_module[name]}"), name)
    globals()[name] = value
    return value
"""
_PROGRAM = """
import sys
import lazy
print("lazy.models" in sys.modules)
kind = lazy.Model
print(sys.modules[kind.__module__].Model is kind)
"""


def test_module_of_a_lazy_name_is_there_with_it(running):
    """The template has used the name, so the package has kept it."""
    package = running.folder / "site" / "lazy"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(_PACKAGE)
    (package / "models.py").write_text("class Model:\n    pass\n")
    (package.parent / "user.py").write_text("from lazy import Model\n")
    running.environment["PYTHONPATH"] = str(package.parent)
    running.start_template(["user"])
    done = running.shmload("run", "-v", "-c", _PROGRAM)
    assert (done.stdout, done.stderr) == ("False\nTrue\n", "")
