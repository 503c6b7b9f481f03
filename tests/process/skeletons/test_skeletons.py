"""Models built from a skeleton equal the models that the libraries build."""

import gc
import json
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
from comparing import assert_loads_equal, reference
from mappings import copied_nbytes
from pipelines import FAMILIES, run

import shmload
from shmload._building.build import Build
from shmload._building.skeletons import skeletons_of

pytestmark = [pytest.mark.usefixtures("skeletons"), pytest.mark.slow]


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, "bf16") for family in FAMILIES),
        *(("stable-diffusion", dtype) for dtype in ("fp16", "none", "dict")),
    ],
)
def test_second_load_is_equal_too(saved, built, skeletons, shm_names, family, dtype):
    source = saved(family)
    for _ in range(2):
        assert_loads_equal(source, dtype)
        assert (len(built), len(skeletons())) == (1, 1)
    assert not shm_names()


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_second_load_of_shards_and_variants_is_equal_too(saved, built, stored):
    variant = "fp16" if stored == "float16" else None
    source = saved("flux", stored, variant, sharded=True)
    for _ in range(2):
        assert_loads_equal(source, "bf16", variant=variant)
    assert len(built) == 1


@pytest.mark.usefixtures("bytes_come_last")
def test_models_are_built_before_their_bytes_are_there(saved, built, monkeypatch):
    def note(self, models=None, **kwargs):
        pipe = from_view(self, models, **kwargs)
        unfinished.append(len(self._load.holdings.unfinished_components()))
        return pipe

    unfinished = []
    from_view = Build._from_view
    monkeypatch.setattr(Build, "_from_view", note)
    source = saved("stable-diffusion")
    for _ in range(2):
        assert_loads_equal(source, "bf16")
    assert len(built) == 1
    assert unfinished == [4, 4]


@pytest.mark.usefixtures("bytes_come_last")
def test_pipeline_that_looks_at_weights_gets_them(large_pipeline, built, monkeypatch):
    def look(self, unet, scheduler):
        plain(self, unet=unet, scheduler=scheduler)
        self.note = sum(p.detach().double().sum().item() for p in unet.parameters())

    shmload.load_pipeline(large_pipeline, torch_dtype=torch.bfloat16)
    plain = diffusers.DDPMPipeline.__init__
    monkeypatch.setattr(diffusers.DDPMPipeline, "__init__", look)
    got = shmload.load_pipeline(large_pipeline, torch_dtype=torch.bfloat16)
    assert got.note == reference(large_pipeline, torch.bfloat16).note != 0


@pytest.mark.parametrize("family", FAMILIES)
def test_random_numbers_go_on_as_after_the_librarys_load(saved, family):
    source = saved(family)
    states = []
    for load in (reference, shmload.load_pipeline, shmload.load_pipeline):
        torch.manual_seed(5)
        load(source, torch_dtype=torch.bfloat16)
        states.append(torch.get_rng_state())
    assert all(torch.equal(state, states[0]) for state in states)


def test_tensors_are_private_and_lie_in_the_segments(saved, built, evicts):
    source = saved("flux")
    for _ in range(2):
        pipe = shmload.load_pipeline(source, torch_dtype=torch.bfloat16, keep=True)
    assert len(built) == 1
    assert copied_nbytes(pipe) == 0
    other = shmload.load_pipeline(source, torch_dtype=torch.bfloat16)
    weight = next(pipe.transformer.parameters())
    before = weight.detach().clone()
    with torch.no_grad():
        weight.add_(1)
    assert torch.equal(next(other.transformer.parameters()), before)


def test_segments_are_leased_as_long_as_the_models_live(saved, built, evicts):
    source = saved("stable-diffusion")
    for _ in range(2):
        pipe = shmload.load_pipeline(source, torch_dtype=torch.bfloat16, keep=True)
    gc.collect()
    assert len(built) == 1
    with pytest.raises(shmload.SegmentBusy):
        shmload.evict(source)
    assert len(shmload.segments()) == 4
    del pipe
    gc.collect()
    assert len(shmload.evict(source)) == 4


# At the lowest priority the judge would wait for the other tests.
_ASK_AND_JUDGE = """
import sys, torch, shmload
from shmload._building import queued
queued.start = lambda *_: None
for source in sys.argv[2:]:
    shmload.load_pipeline(source, torch_dtype=getattr(torch, sys.argv[1]))
print("LOADED", flush=True)
"""


# To look at all objects of the process takes seconds for each request.
_WITHOUT_LOOKING = """
from shmload._building.snapshot import Snapshot
Snapshot._walk = lambda *_: None
"""


def judge(child, new_child, sources, dtype):
    """Load some pipelines in one process, and judge the loads in another one, a new Python."""
    child(_ASK_AND_JUDGE, dtype, *map(str, sources)).expect("LOADED")
    new_child(_WITHOUT_LOOKING + _JUDGE).expect("JUDGED")


# Other processes ----------------------------------------------------------------------------------

# Libraries keep tables of the models they built in a process; this process has built none when its
# pipelines run.
_RUN_AND_COMPARE = """
import sys
sys.path.insert(0, sys.argv[1])
import json
import diffusers
import pipelines
import shmload
import torch
from comparing import assert_equal, reference
from shmload._building.build import Build
diffusers.utils.logging.disable_progress_bar()
build_models = Build._build_models
def build(self, **kwargs):
    # The copy with another configuration of generation may have none.
    assert "qwen" in str(self._source.given), self._root
    return build_models(self, **kwargs)
Build._build_models = build
def load(source):
    return shmload.load_pipeline(source, torch_dtype=torch.bfloat16)
for source in json.loads(sys.argv[2]):
    print("IMAGE", pipelines.run(load(source)).tobytes().hex(), flush=True)
for source in json.loads(sys.argv[2]):
    assert_equal(load(source), reference(source, torch.bfloat16))
    print("EQUAL", source, flush=True)
"""


def test_process_with_other_hashes_that_built_no_model_gets_the_same(
    saved, copied, child, new_child, monkeypatch
):
    # To judge a family takes 3 s; scripts/skeleton_families.py has them all.
    sampled = copied("qwen-image")
    (sampled / "text_encoder" / "generation_config.json").write_text(
        json.dumps({"do_sample": False, "temperature": 0.3})
    )
    sources = [str(saved("stable-diffusion")), str(sampled)]
    judge(child, new_child, sources, "bfloat16")
    monkeypatch.setenv("PYTHONHASHSEED", "77")
    support = Path(__file__).parents[2] / "support"
    other = child(_RUN_AND_COMPARE, support, json.dumps(sources))
    for source in sources:
        wanted = run(reference(source, torch.bfloat16))
        got = np.frombuffer(bytes.fromhex(other.expect("IMAGE")), wanted.dtype)
        assert got.tobytes() == wanted.tobytes()
    for source in sources:
        assert other.expect("EQUAL") == source


_LOAD = """
import sys, torch, shmload
from shmload._building import queued
from shmload._building.build import Build
queued.start = lambda *_: None
build_models = Build._build_models
def say(*args, **kwargs):
    print("BUILDS", flush=True)
    return build_models(*args, **kwargs)
Build._build_models = say
shmload.load_pipeline(sys.argv[1], torch_dtype=torch.bfloat16)
print("LOADED", flush=True)
"""


# At the lowest priority it would wait for the other tests.
_JUDGE = """
from shmload._host.idleness import Load
from shmload._host.descriptors import Lock
from shmload._building import judging, queued
judging.observe = lambda seconds: Load(2, 0.0, 8 << 30)
judging._STAY_S = 0
waiting = queued.queue()
_, work = next(waiting.waiting())
judging.Judge(waiting, Lock.try_take(waiting.lock_path), work.program).run()
print("JUDGED", flush=True)
"""


def test_process_that_loads_once_remembers_for_the_next(saved, child, configure, tmp_path):
    configure(skeletons=1, cache_dir=tmp_path / "own")
    source = saved("stable-diffusion")
    first = child(_LOAD, source)
    first.expect("BUILDS")
    first.expect("LOADED")
    child(_JUDGE).expect("JUDGED")
    (found,) = skeletons_of(str(source))
    assert found.reason == ""
    child(_LOAD, source).expect("LOADED")


# A load that fails --------------------------------------------------------------------------------


def break_scheduler(source):
    (source / "scheduler" / "scheduler_config.json").write_text("{")


def test_failed_load_leaves_nothing_although_its_error_is_kept(copied, shm_names):
    source = copied("stable-diffusion")
    shmload.load_pipeline(source, torch_dtype=torch.bfloat16)
    break_scheduler(source)
    with pytest.raises(OSError, match="scheduler") as caught:
        shmload.load_pipeline(source, torch_dtype=torch.bfloat16, keep=True)
    assert shm_names() == []
    assert caught.value.__traceback__


def test_failed_load_does_not_keep_others_waiting(copied, child):
    source = copied("stable-diffusion")
    shmload.load_pipeline(source, torch_dtype=torch.bfloat16)

    def wait_and_fail(done, total):
        if not waiting:
            other = child(
                "import sys, shmload\n"
                "print('BEGUN', flush=True)\n"
                "shmload.load_state_dict(sys.argv[1], 'bfloat16')\n"
                "print('LOADED', flush=True)",
                source / "vae",
            )
            other.expect("BEGUN")
            waiting.append(other)
        raise ValueError("given up")

    waiting = []
    with pytest.raises(ValueError, match="given up") as caught:
        shmload.load_pipeline(source, torch_dtype=torch.bfloat16, progress=wait_and_fail)
    waiting[0].expect("LOADED")
    assert caught.value.__traceback__
