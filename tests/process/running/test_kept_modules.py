"""A template imports the modules of what loads have kept, so that a recall imports none."""

import time

import pytest

pytestmark = [
    pytest.mark.libraries,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("evicts"),
]
_DEADLINE_S = 60.0
_MODULE = "pipeline_stable_diffusion.py"
_PROGRAM = """
import sys
ran = []
def hook(event, arguments):
    if event == "exec" and arguments[0].co_filename.endswith({module!r}):
        ran.append(arguments[0])
sys.addaudithook(hook)
import shmload
pipe = shmload.load_pipeline({source!r}, dtype="bfloat16", keep=True)
print(type(pipe).__name__, len(ran))
"""


@pytest.mark.slow
def test_template_imports_the_modules_of_what_a_load_has_kept(running, saved):
    running.environment |= {
        "SHMLOAD_CACHE_DIR": str(running.folder / "cache"),
        "HF_HUB_OFFLINE": "1",
    }
    running.start_template()
    path = running.work / "app.py"
    path.write_text(_PROGRAM.format(module=_MODULE, source=str(saved("stable-diffusion"))))

    def run():
        done = running.shmload("run", "-v", str(path))
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert run() == "StableDiffusionPipeline 1"
    deadline = time.monotonic() + _DEADLINE_S
    while run() != "StableDiffusionPipeline 0":  # the template looks every 5 s
        assert time.monotonic() < deadline
