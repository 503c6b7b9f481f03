"""Pipelines of a switcher that run on a device, and updates of pipelines there."""

import pytest
import stand_in

pytestmark = [
    pytest.mark.libraries,
    pytest.mark.skipif(bool(stand_in.why_none()), reason=stand_in.why_none()),
]

# A base, and two publications that share most of it.
BEGIN = """
import shmload
pipe = o.load(sys.argv[1])
size = o.nbytes(pipe)
for name in "xy":
    with torch.no_grad():
        pipe.unet.conv_in.weight.add_(1)
    shmload.publish(pipe, name)
changed = pipe.unet.conv_in.weight.nbytes
values = {"base": o.values(o.load(sys.argv[1])), "x": o.values(o.load("shm:x", keep=False))}
values["y"] = o.values(pipe)
models = {"base": sys.argv[1], "x": "shm:x", "y": "shm:y"}

def switcher(**given):
    return shmload.Switcher(models, "1GiB", device=o.DEVICE, **given)

def require_on_device(pipe, name):
    assert {p.device.type for m in o.models(pipe).values() for p in m.parameters()} == {"standin"}
    o.require_equal(pipe, values[name])
"""


@pytest.fixture
def program(offloading, saved):
    return lambda code: offloading(saved("stable-diffusion"), f"{BEGIN}{code}")


@pytest.mark.slow
def test_others_leave_the_device_and_weights_are_in_their_segments_again(program):
    program("""
models = {"base": sys.argv[1], "half": {"source": sys.argv[1], "dtype": "float16"}}
half = o.values(o.load(sys.argv[1], dtype="float16"))
with switcher(device_budget=size + 100_000) as s:
    kept = {}
    for turn in range(2):
        for name in models:
            with s.use(name) as pipe:
                assert pipe.device.type == "standin"
                kept[name] = pipe
                o.require_equal(pipe, half if name == "half" else values["base"])
    assert s.figures.loads == 2
    assert kept["base"].device.type == "cpu"
    assert not o.all_outside(kept["base"])
    o.require_equal(kept["base"], values["base"])
""")


def test_what_does_not_fit_on_the_device_is_refused_before_anything_moves(program):
    program("""
with switcher(device_budget=size // 2) as s:
    before = o.stand_in.counts()
    try:
        with s.use("base"):
            pass
    except shmload.DoesNotFit as exc:
        assert exc.available == size // 2 and "device" in str(exc)
    else:
        raise AssertionError
    assert o.stand_in.counts().to_device == before.to_device
""")


@pytest.mark.slow
def test_pipeline_on_a_device_is_updated(program):
    program("""
pipe = o.load("shm:x", keep=False)
pipe.to(o.DEVICE)
weights = {name: each for name, each in pipe.unet.named_parameters()}
before = o.stand_in.counts()
places = {name: each.data_ptr() for name, each in weights.items()}
shmload.update(pipe, "shm:y")
assert {name: each.data_ptr() for name, each in weights.items()} == places
assert {name: each for name, each in pipe.unet.named_parameters()} == weights
assert pipe.device.type == "standin"
o.require_equal(pipe, values["y"])
pipe.to("cpu")
outside = o.all_outside(pipe)
assert not outside, outside
o.require_equal(pipe, values["y"])
""")
