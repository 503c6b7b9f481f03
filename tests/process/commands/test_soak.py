"""A few seconds of `scripts/soak` give no findings."""

import json
import sys
from pathlib import Path

import pytest
from children import run_to_end

pytestmark = pytest.mark.slow

_SOAK = Path(__file__).parents[3] / "scripts" / "soak"


def test_soak_finds_nothing(tmp_path):
    result = tmp_path / "result.json"
    options = ["--seed", "1", "--seconds", "3", "--processes", "2", "--json", str(result)]
    run = run_to_end([sys.executable, str(_SOAK), *options])
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads(result.read_text())
    assert found["findings"] == []
    assert any(name.startswith("load: ok") for name in found["operations"])
    assert found["faults"]
