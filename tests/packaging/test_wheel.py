"""The wheel installs the package and nothing else."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from children import run_to_end

pytestmark = pytest.mark.slow

_ROOT = Path(__file__).parents[2]
_FOLDERS = {
    "shmload": "shmload",
    "workers": "shmload/workers",
    "integrations": "shmload/integrations",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from the sdist as an installer would, without this tree."""
    # Copy the tracked files only, without a left-over build/ folder.
    copy = tmp_path_factory.mktemp("source")
    names = _git_files(".")
    for name in names:
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (_ROOT / name).is_symlink():
            target.symlink_to((_ROOT / name).readlink())
        else:
            target.write_bytes((_ROOT / name).read_bytes())
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(copy)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    return next(out.glob("*.whl"))


def test_wheel_holds_exactly_the_tracked_modules(wheel):
    with zipfile.ZipFile(wheel) as archive:
        found = {n for n in archive.namelist() if ".dist-info/" not in n}
    wanted = {
        f"{target}/{Path(name).relative_to(folder)}"
        for folder, target in _FOLDERS.items()
        for name in _git_files(folder)
        if name.endswith((".py", "py.typed"))
    }
    assert found == wanted


def _git_files(folder):
    listed = run_to_end(["git", "ls-files", "--", folder], cwd=_ROOT, check=True)
    return listed.stdout.splitlines()
