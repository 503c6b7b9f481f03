"""`shmload run --redirect`: on before the program begins, cold and warm, and in its children."""

import os
import sys
from pathlib import Path

import example_training
import pytest
from children import run_to_end

_CLASS = """
class DiffusionPipeline:
    @classmethod
    def from_pretrained(cls, path, **kwargs):
        return path
"""
_LOOK = """
import sys
sees = [bool([each for each in sys.meta_path if "_redirecting" in type(each).__module__])]
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
sees.append("_redirecting" in DiffusionPipeline.from_pretrained.__func__.__code__.co_filename)
"""
_LOOKING = f"""
def look():
    {_LOOK.strip().replace(chr(10), chr(10) + "    ")}
    return sees
"""
_SHOW = _LOOK + "print(*sees)"
_CHILDREN = """
import multiprocessing, os, subprocess, sys
sys.path.insert(0, ".")
from looking import look
if __name__ == "__main__":
    print(*subprocess.run([sys.executable, "-c", "from looking import look; print(*look())"],
                          capture_output=True, text=True).stdout.split())
    for method in ("spawn", "fork", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(*pool.apply(look))
"""


@pytest.fixture(scope="module")
def redirected(running):
    """A stand-in for diffusers, on the path of templates and programs; run programs redirected."""
    folder = running.folder / "fakes" / "diffusers" / "pipelines"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("")
    (folder / "__init__.py").write_text("")
    (folder / "pipeline_utils.py").write_text(_CLASS)
    (running.work / "show.py").write_text(_SHOW)
    (running.work / "looking.py").write_text(_LOOKING)
    (running.work / "children.py").write_text(_CHILDREN)
    before = running.environment
    running.environment = before | {"PYTHONPATH": str(running.folder / "fakes")}
    yield lambda *program: running.shmload("run", "--redirect", *program)
    running.environment = before


@pytest.fixture(params=["cold", "warm"])
def way(request, running, redirected):
    """Without a template, and with one, whose programs are all redirected."""
    if request.param == "cold":
        running.environment["SHMLOAD_RUN_IMPORTS"] = "no_such_module"
        return
    running.kill_templates()
    running.environment["SHMLOAD_RUN_IMPORTS"] = "diffusers.pipelines.pipeline_utils"
    redirected("-c", "pass")
    running.wait_for_templates(lambda found: [each.state for each in found] == ["ready"])


@pytest.mark.usefixtures("way")
def test_it_is_on_from_the_first_line(running, redirected):
    for program in (["show.py"], ["-m", "show"], ["-c", _SHOW]):
        ended = redirected(*program)
        assert (ended.stdout, ended.stderr, ended.returncode) == ("True True\n", "", 0), program
    assert running.shmload("run", "show.py").stdout == "False False\n"


@pytest.mark.usefixtures("way")
def test_it_is_on_in_children(redirected):
    ended = redirected("children.py")
    assert ended.stdout == "True True\n" * 4, ended.stderr


def test_sitecustomize_of_the_user_runs(running, redirected):
    other = running.folder / "fakes" / "sitecustomize.py"
    other.write_text("import sys; sys.was_customized = __name__, __file__\n")
    try:
        code = "import sys; print(sys.was_customized, 'sitecustomize' in sys.modules)"
        ended = redirected("-c", code)
    finally:
        other.unlink()
    assert ended.stdout == f"{('sitecustomize', str(other))} True\n"


@pytest.mark.slow
def test_verbose_says_each_way(redirected):
    code = "from diffusers.pipelines.pipeline_utils import DiffusionPipeline as pipeline\n"
    code += "pipeline.from_pretrained(1)"
    ended = redirected("-v", "-c", code)
    assert "shmload: DiffusionPipeline.from_pretrained(1): by the library: " in ended.stderr


def test_options_that_turn_variables_off_are_refused(running):
    ended = run_to_end(
        [sys.executable, "-I", "-m", "shmload", "run", "--redirect", "-c", "pass"], cwd=running.work
    )
    assert ended.returncode == 2
    assert "--redirect needs PYTHONPATH" in ended.stderr


@pytest.mark.slow
@pytest.mark.libraries
@pytest.mark.usefixtures("evicts")
def test_unchanged_program_gives_the_same(running, saved, tmp_path, warm_python):
    script, source = Path(example_training.__file__), saved("stable-diffusion")
    names = ("HF_HUB_OFFLINE", "OMP_WAIT_POLICY", "SHMLOAD_REMEMBER", "XDG_CACHE_HOME")
    environment = {name: running.environment[name] for name in ("PATH", "HOME", "XDG_RUNTIME_DIR")}
    environment |= {name: os.environ[name] for name in names}
    # There can be no such template: the program is run in the ordinary way.
    environment["SHMLOAD_RUN_IMPORTS"] = "no_such_module"
    options = ["-v", "--redirect"]
    plain = warm_python.run(script, source, tmp_path / "plain")
    redirected = running.shmload(
        "run", *options, str(script), str(source), str(tmp_path / "other"), environment=environment
    )
    assert redirected.returncode == 0, redirected.stderr
    assert redirected.stdout == plain.stdout
    assert redirected.stderr.count("through shmload") == 5, redirected.stderr
