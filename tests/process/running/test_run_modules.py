"""`shmload run -m`: a module that the template has imported is run in the ordinary way."""

import sys

import pytest

_FILES = {
    "pack/__init__.py": "import sys; print('init', sorted(n for n in sys.modules if 'pack' in n))",
    "pack/__main__.py": "from pack import part; print(__name__, __package__, part.VALUE)",
    "pack/part.py": "VALUE = 5\nprint(__name__)",
    "pack/alone.py": "import sys; print(__name__, 'pack.alone' in sys.modules)",
    "single.py": "print(__name__, __spec__.name, __file__)",
}


@pytest.fixture(scope="module")
def site(running):
    folder = running.folder / "site"
    for name, text in _FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    running.environment |= {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    running.start_template(["pack.__main__", "pack.alone", "single"])


@pytest.mark.parametrize("name", ["pack", "pack.alone", "single"])
@pytest.mark.usefixtures("site")
def test_module_of_the_template_runs_as_with_python(running, name):
    seen = running.shmload("run", "-v", "-m", name)
    wanted = running.run([sys.executable, "-m", name], check=True)
    lines = seen.stderr.splitlines()
    ordinary = [line for line in lines if line.startswith("shmload run:")]
    anew = {"pack": "pack.__main__"}.get(name, name)
    why = f"the template has imported {anew}"
    assert ordinary == [f"shmload run: in the ordinary way: {why}"]
    rest = [line for line in lines if line not in ordinary]
    assert (seen.stdout, rest) == (wanted.stdout, wanted.stderr.splitlines())
