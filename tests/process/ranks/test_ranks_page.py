"""The sharding programs on the page about ranks run as printed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import shmload

pytestmark = pytest.mark.libraries

_PAGE = Path(__file__).parents[3] / "docs" / "ranks.md"
# The output of two ranks together, without line ends, which may come late.
_PRINTS = {"fsdp": "", "zero": "torch.Size([16, 32])" * 2}


@pytest.mark.parametrize("module", _PRINTS)
def test_program_runs(saved, tmp_path, monkeypatch, shm_names, module):
    programs = re.findall(r"^```python\n(# torchrun .*?)^```", _PAGE.read_text(), re.M | re.S)
    (program,) = [each for each in programs if f"import {module}\n" in each]
    assert "path/to/flux" in program
    path = tmp_path / "program.py"
    path.write_text(program.replace("path/to/flux", str(saved("flux"))))
    monkeypatch.setenv("PYTHONPATH", str(Path(shmload.__file__).parents[1]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # two ranks need two devices, or the CPU
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ended = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", path],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.replace("\n", "") == _PRINTS[module]
    assert shm_names() == []
