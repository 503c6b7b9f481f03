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


@pytest.fixture
def complete(monkeypatch, capsys):
    """Ask as a shell does for what completes the last of some words."""

    def complete(shell, *words):
        monkeypatch.setenv("_SHMLOAD_COMPLETE", f"{shell}_complete")
        monkeypatch.setenv("COMP_WORDS", " ".join(("shmload", *words)))
        monkeypatch.setenv("COMP_CWORD", words[-1] if shell == "fish" else str(len(words)))
        with pytest.raises(SystemExit):
            main(prog_name="shmload")
        return capsys.readouterr().out.split("\n")[:-1]

    return complete


@pytest.mark.parametrize("command", ["rm", "verify"])
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_names_are_completed(resident, complete, shell, command):
    lines = complete(shell, command, "style-t")
    assert "style-two.safetensors" in "\n".join(lines)
    assert "style-one" not in "\n".join(lines)
    if shell != "bash":  # bash shows no explanations
        assert "(bfloat16), 28" in "\n".join(lines)


def test_ids_are_completed_and_other_words_are_paths(resident, complete):
    model = shmload.models()[0]
    assert f"plain,{model.id}" in complete("bash", "rm", model.id[:3])
    assert complete("bash", "rm", "./sty") == ["file,./sty"]


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


def test_completion_imports_nothing_heavy(resident):
    code = (
        "import sys\n"
        "from shmload._cli.main import main\n"
        "try:\n"
        "    main(prog_name='shmload')\n"
        "finally:\n"
        "    heavy = {'torch', 'numpy', 'diffusers', 'transformers', 'huggingface_hub'}\n"
        "    print(sorted(heavy & set(sys.modules)))"
    )
    asked = {
        "_SHMLOAD_COMPLETE": "bash_complete",
        "COMP_WORDS": "shmload rm sty",
        "COMP_CWORD": "2",
    }
    done = run_to_end([sys.executable, "-P", "-c", code], env=os.environ | asked, check=True)
    assert "style-one" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
