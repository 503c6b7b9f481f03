"""`shmload run -m`: a module that the template has imported runs anew, from its file."""

import sys
from pathlib import Path

import pytest

_FILES = {
    "pack/__init__.py": "import sys; print('init', sorted(n for n in sys.modules if 'pack' in n))",
    "pack/__main__.py": "from pack import part; print(__name__, __package__, part.VALUE)",
    "pack/part.py": "VALUE = 5\nprint(__name__)",
    "pack/alone.py": "import sys; print(__name__, 'pack.alone' in sys.modules)",
    "eager/__init__.py": "import eager.part",
    "eager/part.py": "print(__name__)",
    "single.py": "print(__name__, __spec__.name, __file__)",
}


@pytest.fixture(scope="module")
def site(running):
    folder = running.folder / "site"
    for name, text in _FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    running.environment |= {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    running.start_template(["pack.__main__", "pack.alone", "single", "eager"])


def test_option_of_python_has_nothing_imported_from_the_current_folder(running):
    """Another user may write there, and the script may lie elsewhere."""
    folder = running.work / "open"
    folder.mkdir()
    for name in ("shmload", "json"):
        (folder / f"{name}.py").write_text("print('planted')\n")
    script = running.work / "hello.py"
    script.write_text("print('hello')\n")
    done = running.run(
        [Path(sys.executable).with_name("shmload"), "run", "-X", "dev", script], cwd=folder
    )
    assert (done.stdout, done.returncode) == ("hello\n", 0), done.stderr


@pytest.mark.parametrize("name", ["pack", "pack.alone", "pack.part", "single", "eager.part"])
@pytest.mark.usefixtures("site")
def test_module_of_the_template_runs_as_with_python(running, name):
    seen = running.shmload("run", "-v", "-m", name)
    wanted = running.run([sys.executable, "-m", name], check=True)
    lines = seen.stderr.splitlines()
    ordinary = [line for line in lines if line.startswith("shmload run:")]
    why = "the template has imported pack.part, and others need it"
    assert ordinary == [f"shmload run: in the ordinary way: {why}"] * (name == "pack.part")
    rest = [line for line in lines if line not in ordinary]
    assert (seen.stdout, rest) == (wanted.stdout, wanted.stderr.splitlines())
