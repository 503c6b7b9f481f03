"""The shell completes the names and ids of resident models."""

import os
import sys

import pytest
from children import run_to_end
from safetensors.torch import save_file
from warming import TENSORS

import shmload
from shmload._cli.main import main


@pytest.fixture
def resident(tmp_path, evicts):
    """Two models whose names begin alike."""
    for name in ("style-one.safetensors", "style-two.safetensors"):
        save_file(TENSORS, tmp_path / name)
        shmload.warm(tmp_path / name, dtype="bfloat16")
    return tmp_path


def test_ids_are_completed_and_other_words_are_paths(resident, monkeypatch, capsys):
    def complete(*words):
        monkeypatch.setenv("_SHMLOAD_COMPLETE", "bash_complete")
        monkeypatch.setenv("COMP_WORDS", " ".join(("shmload", *words)))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        with pytest.raises(SystemExit):
            main(prog_name="shmload")
        return capsys.readouterr().out.split("\n")[:-1]

    model = shmload.models()[0]
    assert f"plain,{model.id}" in complete("rm", model.id[:3])
    assert complete("rm", "./sty") == ["file,./sty"]


def test_completion_in_bash(resident, tmp_path):
    script = tmp_path / "bin" / "shmload"
    script.parent.mkdir()
    script.write_text(f"#!{sys.executable}\nfrom shmload.__main__ import run\nrun()\n")
    script.chmod(0o755)
    code = "\n".join(
        (
            'eval "$(_SHMLOAD_COMPLETE=bash_source shmload)"',
            "COMP_WORDS=(shmload rm sty) COMP_CWORD=2",
            "_shmload_completion shmload sty rm",
            'echo "${COMPREPLY[@]}"',
        )
    )
    done = run_to_end(
        ["bash", "--norc", "-c", code],
        env=os.environ | {"PATH": f"{script.parent}:{os.environ['PATH']}"},
        check=True,
    )
    assert done.stdout.split() == ["style-one.safetensors", "style-two.safetensors"]
