"""Pipelines that run on a device share their copies, and are never read back."""

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
def test_shared_weights_are_copied_once_and_none_is_read_back(program):
    program("""
with switcher() as s:
    before = o.stand_in.counts()
    for turn in range(3):
        for name in models:
            with s.use(name) as pipe:
                assert pipe.device.type == "standin"
    after = o.stand_in.counts()
    assert after.from_device == before.from_device
    copied = after.to_device - before.to_device
    # Besides the base only what differs; and buffers that lie in no segment.
    counted = s.figures.copied_nbytes
    assert size <= counted < size + 2 * changed + 50_000, (size, changed, counted)
    assert counted <= copied < counted * 1.1, (counted, copied)  # small ones with gaps
    for name in models:
        with s.use(name) as pipe:
            require_on_device(pipe, name)
""")


@pytest.mark.slow
def test_copies_go_for_others_and_weights_are_in_their_segments_again(program):
    program("""
models = {"base": sys.argv[1], "half": {"source": sys.argv[1], "dtype": "float16"}}
half = o.values(o.load(sys.argv[1], dtype="float16"))
with switcher(device_budget=800_000) as s:
    kept = {}
    for turn in range(2):
        for name in models:
            before = o.stand_in.counts()
            with s.use(name) as pipe:
                after = o.stand_in.counts()
                assert after.from_device == before.from_device
                assert after.held <= 1_300_000, (after, size)  # both would take two slabs of 1 MiB
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
    except shmload.NoRoom as exc:
        assert exc.most == size // 2 and "device" in str(exc)
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
done = shmload.update(pipe, "shm:y")
assert {name: each for name, each in pipe.unet.named_parameters()} == weights
assert pipe.device.type == "standin"
o.require_equal(pipe, values["y"])
assert shmload.update(pipe, "shm:y").tensors <= 4  # buffers that lie in no segment
pipe.to("cpu")
outside = o.all_outside(pipe)
assert not outside, outside
o.require_equal(pipe, values["y"])
""")


@pytest.mark.slow
def test_weights_that_a_process_has_changed_are_no_copies_of_others(program):
    program("""
with switcher() as s:
    with s.use("x"):
        pass
    host = o.load(sys.argv[1])
    with torch.no_grad():
        host.unet.conv_in.weight.zero_()  # on the host, at the place of the base's
    brought, _ = s._shelf._copies.bring({"unet": host.unet})
    assert not host.unet.conv_in.weight.cpu().any()
    with s.use("base") as pipe:
        require_on_device(pipe, "base")
""")


def test_tensors_made_of_others_come_back_as_they_were(program):
    program("""
from torch.testing._internal.two_tensor import TwoTensor
model = torch.nn.Linear(4, 4)
halves = torch.ones(4, 4), torch.zeros(4, 4)
model.weight = torch.nn.Parameter(TwoTensor(*halves), requires_grad=False)
shmload.publish(model, "two")
with shmload.Switcher({"two": "shm:two"}, "1GiB", device=o.DEVICE) as s:
    with s.use("two") as two:
        assert two.weight.a.device.type == "standin"
        assert isinstance(two.weight, torch.nn.Parameter)
        weight = s._entries["two"].brought.slots[0].tensor
    s._shelf._leave_device(s._entries["two"])
    assert two.weight is weight and two.weight.a.is_cpu
    assert torch.equal(two.weight.a, halves[0]) and torch.equal(two.weight.b, halves[1])
""")


def test_tensors_without_elements_are_not_taken_for_tied_ones(program):
    program("""
model = torch.nn.Linear(4, 4)
for name in "ab":
    model.register_buffer(name, torch.empty(0))
reader = shmload.publish(model, "empties").load().to(o.DEVICE)
with torch.no_grad():
    model.weight.add_(1)
shmload.update(reader, shmload.publish(model, "empties"))
assert torch.equal(reader.weight.cpu(), model.weight)
""")
