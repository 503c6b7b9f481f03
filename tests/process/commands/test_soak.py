"""A few seconds of `scripts/soak` give no findings."""

import json
import subprocess
import sys
from pathlib import Path

_SOAK = Path(__file__).parents[3] / "scripts" / "soak"


def test_soak_finds_nothing(tmp_path):
    result = tmp_path / "result.json"
    options = ["--seed", "1", "--seconds", "3", "--processes", "2", "--json", str(result)]
    run = subprocess.run(
        [sys.executable, str(_SOAK), *options],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads(result.read_text())
    assert found["findings"] == []
    assert any(name.startswith("load: ok") for name in found["operations"])
    assert found["faults"]
