"""Pipelines that are loaded ahead: what a program gets is what it would load itself."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest
import stand_in

import shmload

# What is loaded ahead has the lowest priority: beside other tests it may wait for minutes.
pytestmark = [pytest.mark.libraries, pytest.mark.timeout(600), pytest.mark.slow]
_DEADLINE_S = 60.0
_LOADED_S = 300.0
_MAX_RUNS = 4
# What a program sees of a pipeline, and of the process that has loaded it.
_PROGRAM = """
import hashlib, json, logging, os, sys
import shmload
said = []
class Keep(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())
logging.getLogger("shmload").addHandler(Keep())
logging.getLogger("shmload").setLevel(logging.INFO)
{before}
pipe = shmload.load_pipeline({source!r}, dtype="bfloat16", keep=True)
import torch
def digest(model):
    found = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        found.update(name.encode())
        found.update(bytes(tensor.contiguous().view(torch.uint8).flatten().tolist()))
    return found.hexdigest()
models = dict((n, c) for n, c in pipe.components.items() if isinstance(c, torch.nn.Module))
sees = dict(
    models=dict((name, digest(model)) for name, model in models.items()),
    kinds=dict((name, str(type(part))) for name, part in pipe.components.items()),
    config=repr(pipe.config), path=getattr(pipe, "name_or_path", None),
    configs=dict((name, repr(model.config)) for name, model in models.items()),
    requires_grad=[p.requires_grad for m in models.values() for p in m.parameters()],
    training=[m.training for m in models.values()],
    tokens=pipe.tokenizer("a horse").input_ids,
    modules=sorted(n for n in sys.modules if n.startswith(("diffusers.", "transformers."))),
    attributes=sorted(
        n for n, m in sys.modules.items()
        if "." in n and n.split(".")[0] in ("diffusers", "torch", "transformers")
        and vars(sys.modules[n.rpartition(".")[0]]).get(n.rpartition(".")[2]) is m
    ),
    loggers=sorted(
        (n, each.level, each.propagate, len(each.handlers))
        for n, each in logging.root.manager.loggerDict.items()
        if n.startswith(("diffusers", "torch", "transformers"))
        and isinstance(each, logging.Logger)
    ),
    cwd=os.getcwd(), drawn=torch.rand(4).tolist(),
)
{after}
with torch.no_grad():
    for model in models.values():
        next(model.parameters()).add_(1)  # private to this process
print(json.dumps(dict(
    prepared=any("prepared before" in text for text in said),
    why=[text for text in said if "not as it was prepared" in text],
    sees=sees,
)))
"""


@pytest.fixture(scope="module")
def source(saved, tmp_path_factory):
    """A pipeline that tests may change."""
    return shutil.copytree(saved("stable-diffusion"), tmp_path_factory.mktemp("it") / "pipeline")


@pytest.fixture(scope="module")
def program(running, source):
    """Return what runs a program that loads the source, and gives what it has printed."""
    running.environment["SHMLOAD_CACHE_DIR"] = str(running.folder / "cache")
    running.environment |= {"HF_HUB_OFFLINE": "1", "SHMLOAD_REMEMBER": "0"}
    running.shmload("template", "warm")
    path = running.work / "app.py"

    def run(*options, before="", after="", at=source):
        path.write_text(_PROGRAM.format(before=before, after=after, source=str(at)))
        done = running.shmload("run", "-v", *options, str(path))
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1]) | {"stderr": done.stderr}

    run.running = running
    return run


@pytest.fixture(autouse=True)
def segments(running):
    """Remove what the programs have made resident, once nothing is loading ahead."""
    yield
    wait_until_loaded(running)
    evict_all()


def evict_all():
    """Remove all segments, as soon as no branch is loading."""
    deadline = time.monotonic() + _DEADLINE_S
    for info in shmload.segments():
        while True:
            try:
                shmload.evict(info.name)
                break
            except shmload.SegmentBusy:
                assert time.monotonic() < deadline


def wait_until_loaded(running):
    """Wait until all pipelines that programs have loaded are loaded ahead; return the template."""

    def is_loaded(found):
        states = [branch.state for branch in found[0].branches]
        return states and "loading" not in states

    return running.wait_for_templates(is_loaded, _LOADED_S)[0]


def run_until(holds, program, **given):
    """Run a program until what it has printed holds, each time with what is loaded ahead."""
    for _ in range(_MAX_RUNS):
        if holds(found := program(**given)):
            return found
        wait_until_loaded(program.running)
    raise AssertionError(found["why"] or found["stderr"])


def test_prepared_pipeline_is_the_one_that_the_program_would_load(program):
    seed = "import torch; torch.manual_seed(1)"
    prepared = run_until(lambda found: found["prepared"], program, before=seed)
    own = program("--no-prepare", before=seed)
    assert not own["prepared"]
    for what, seen in own["sees"].items():
        assert prepared["sees"][what] == seen, what
    assert "Loading pipeline components" in prepared["stderr"]


@pytest.mark.skipif(bool(stand_in.why_none()), reason=stand_in.why_none())
def test_weights_of_a_prepared_pipeline_come_home(program):
    support = Path(stand_in.__file__).parents[1]
    stand_in.build()
    after = f"""
sys.path.append({str(support)!r})
import offloading as o
begin, generate = o.CALLS["model"]
begin(pipe)
for _ in range(3):
    generate(pipe)
sees["outside"] = o.all_outside(pipe)
"""
    found = run_until(lambda found: found["prepared"], program, after=after)
    assert found["sees"]["outside"] == []


def test_second_run_has_it_loaded_ahead(running, program, source):
    app = running.work / "other.py"

    def run(*options):
        app.write_text((running.work / "app.py").read_text())
        done = running.shmload("run", *options, str(app))
        return json.loads(done.stdout.splitlines()[-1])["prepared"]

    program("--no-prepare")
    assert not run()
    assert str(source) in wait_until_loaded(running).ahead
    # A busy machine may take longer than a program waits; then Python runs it.
    assert any(run() for _ in range(5))
    assert any(run() for _ in range(5))


def test_patched_tokenizer_is_noticed(program):
    before = (
        "from transformers import CLIPTokenizer as T; made = T.__init__\n"
        "T.__init__ = lambda *args, **kwargs: made(*args, **kwargs)"
    )
    patched = run_until(lambda found: found["why"], program, before=before)
    assert "CLIPTokenizer.__init__ was replaced" in patched["why"][0]


def test_patched_library_and_changed_source_are_noticed(program, source):
    before = "from diffusers import UNet2DConditionModel as U; U.forward = lambda *a: None"
    patched = run_until(lambda found: found["why"], program, before=before)
    assert "UNet2DConditionModel.forward was replaced" in patched["why"][0]
    config = source / "scheduler" / "scheduler_config.json"

    def notices_a_change(found):
        content = json.loads(config.read_text())
        config.write_text(json.dumps(content | {"beta_start": content["beta_start"] / 2}))
        return any("has changed" in text for text in found["why"])

    run_until(notices_a_change, program)


def test_weights_behind_a_linked_folder_are_noticed(program, source, tmp_path):
    unet = source / "unet"
    shutil.move(unet, tmp_path / "unet")
    unet.symlink_to(tmp_path / "unet")
    (weights,) = unet.glob("*.safetensors")
    try:
        before = run_until(lambda found: found["prepared"], program)
        content, times = weights.read_bytes(), weights.stat()
        weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))  # as `rsync -a` does
        after = run_until(lambda found: found["why"], program)
    finally:
        unet.unlink()
        shutil.move(tmp_path / "unet", unet)
    assert "has changed" in after["why"][0]
    assert after["sees"]["models"]["unet"] != before["sees"]["models"]["unet"]


def test_waiting_pipeline_holds_no_segment(program):
    run_until(lambda found: found["prepared"], program)
    evict_all()
    found = run_until(lambda found: found["why"], program)
    assert "was removed" in found["why"][0]


def test_modular_pipeline_is_prepared_too(program, saved, tmp_path):
    diffusers = pytest.importorskip("diffusers", minversion="0.42")
    pipe = diffusers.ModularPipeline.from_pretrained(str(saved("flux")))
    pipe.load_components()
    pipe.save_pretrained(str(tmp_path / "modular"), overwrite_modular_index=True)
    given = {"before": "import torch; torch.manual_seed(1)", "at": tmp_path / "modular"}
    prepared = run_until(lambda found: found["prepared"], program, **given)
    own = program("--no-prepare", **given)
    assert own["sees"]["models"].keys() == {"text_encoder", "text_encoder_2", "transformer", "vae"}
    assert prepared["sees"] == own["sees"]
