"""Weights that were on a device and were not changed there lie in their segment again."""

import pytest
import stand_in
from lacking import skip_what_is_lacking

pytestmark = [
    pytest.mark.libraries,
    pytest.mark.skipif(bool(stand_in.why_none()), reason=stand_in.why_none()),
]

# As in `offloading.CALLS`, which a process of its own imports.
CALLS = "to", "modules", "model", "sequential", "accelerate", "manager", "blocks", "leaves"
GROUPS = "blocks", "leaves"
# Each moves weights to the device and back.
MOVES = {
    "submodules": """
for block in pipe.unet.children():
    block.to(o.DEVICE); block.to('cpu')
""",
    "without blocking": "pipe.unet.to(o.DEVICE); pipe.unet.to('cpu', non_blocking=True)",
    "a copy that is asked for": "pipe.unet.to(o.DEVICE); pipe.unet._apply(lambda t: t.cpu())",
    "hooks removed": """
pipe.enable_model_cpu_offload(device=o.DEVICE)
pipe.unet._hf_hook.pre_forward(pipe.unet)
pipe.remove_all_hooks()
pipe.to('cpu')
""",
    "from_pipe": """
import diffusers
other = diffusers.AutoPipelineForImage2Image.from_pipe(pipe)
other.to(o.DEVICE); other.to('cpu')
""",
} | {
    call: f"begin, run = o.CALLS['{call}']; begin(pipe) if not turn else None; run(pipe)"
    for call in CALLS
}
BEGIN = "pipe = o.load(sys.argv[1])\nwanted = o.values(pipe)\n"


@pytest.fixture
def program(offloading, saved):
    """Run a program over a pipeline; it has `pipe`, `wanted` and the module `o`."""
    return lambda code: offloading(saved("stable-diffusion"), f"{BEGIN}{code}")


@pytest.mark.slow
@pytest.mark.parametrize("move", MOVES)
def test_weights_lie_in_their_segments_after_each_run(program, move):
    skip_what_is_lacking(move)
    indented = MOVES[move].replace("\n", "\n    ")
    program(f"""
for turn in range(3):
    before = o.from_device()
    {indented}
    # A group moves what a model holds beside its layers by `data`.
    private = o.nbytes(pipe, o.all_outside(pipe)) / o.nbytes(pipe)
    assert private < (0.1 if {move!r} in {GROUPS} else 1e-9), private
    # The picture, and what the schedulers ask for.
    assert o.from_device() - before < 200_000, o.from_device() - before
o.remove_hooks(pipe)
o.require_equal(pipe, wanted)
""")


def test_function_that_changes_what_it_moves(program):
    program("""
def double(tensor):
    return tensor.mul_(2).cpu()
def detach(tensor):
    return tensor.detach().cpu()
for _ in range(2):
    pipe.unet.to(o.DEVICE)._apply(detach)
    assert not o.outside(pipe.unet)
o.require_equal(pipe, wanted)
pipe.unet.to(o.DEVICE)
with torch.no_grad():
    pipe.unet._apply(double)
found = pipe.unet.state_dict()
assert all(torch.equal(found[key], each * 2) for (name, key), each in wanted.items()
           if name == "unet")
""")


def test_model_that_another_load_is_given(program):
    program("""
other = o.load(sys.argv[1], vae=pipe.vae)
other.to(o.DEVICE); other.to("cpu")
assert not o.all_outside(other)
o.require_equal(other, wanted)
""")


def test_no_descriptor_is_left_for_a_move(program):
    program("""
import os, resource
pipe.unet.to(o.DEVICE)
least = len(os.listdir("/proc/self/fd")) - 1
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (least, hard))
pipe.unet.to("cpu")
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
o.require_equal(pipe, wanted)
""")


def test_copies_move_themselves(program):
    program("""
import copy, pickle
original = pipe.unet.conv_in
for make in (copy.copy, copy.deepcopy, lambda each: copy.deepcopy(copy.copy(each)),
             lambda each: pickle.loads(pickle.dumps(each))):
    copied = make(original)
    assert "_apply" not in vars(copied)
    assert copied.to(torch.float16) is copied
    copied(torch.ones(1, 4, 8, 8, dtype=torch.float16))
    if make is copy.copy:  # it shares the parameters
        original.float()
    assert original.weight.dtype == torch.float32 and original.weight.is_cpu
""")


def test_one_changed_weight_does_not_have_the_others_compared_again(program):
    program("""
from shmload._building import homes
calls = []
digests_of = homes.digests_of
homes.digests_of = lambda tensors, *rest: calls.append(len(tensors)) or digests_of(tensors, *rest)
pipe.unet.to(o.DEVICE); pipe.unet.to("cpu")
calls.clear()
pipe.unet.to(o.DEVICE)
with torch.no_grad():
    pipe.unet.conv_in.weight.add_(1)
pipe.unet.to("cpu")
assert len(calls) == 1 and calls[0] > 50, calls
assert o.outside(pipe.unet) == ["conv_in.weight"]
""")


@pytest.mark.parametrize(("call", "count"), [("streams-leaves", 1), ("streams-little-leaves", 0)])
def test_copies_that_streams_pin_are_said_once(program, call, count):
    skip_what_is_lacking(call)
    program(f"""
import logging
said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("shmload").addHandler(handler)
begin, _ = o.CALLS["{call}"]
begin(pipe)
found = [each for each in said if "pinned memory" in each]
assert len(found) == {count}, said
""")


def test_swapped_parameters_move_as_ever(program):
    program("""
pipe.unet.to(o.DEVICE); pipe.unet.to("cpu")
torch.__future__.set_swap_module_params_on_conversion(True)
pipe.unet.to(o.DEVICE); pipe.unet.to("cpu")
torch.__future__.set_swap_module_params_on_conversion(False)
o.require_equal(pipe, wanted)
""")


CHANGES = {
    "in place": "weight.add_(1)",
    "one element": "weight.view(-1)[-1] += 1",
    "signs of two": "weight.view(-1)[:2].mul_(-1)",
    "two exchanged": "weight.view(-1)[:2] = weight.view(-1)[:2].flip(0).clone()",
    "through data": "weight.data.mul_(2)",
    "other data": "weight.data = weight.data * 2",
    "set_": "weight.set_((weight * 2).detach())",
    "copy_": "weight.copy_(weight * 2)",
    "inference mode": "with torch.inference_mode(): weight.mul_(2)",
    "an optimiser": (
        "weight.grad = torch.ones_like(weight); torch.optim.SGD([weight], lr=1.0).step()"
    ),
    "a compiled function": (
        "torch.compile(lambda it: it.mul_(2), backend='eager', fullgraph=True)(weight)"
    ),
    "a new parameter": "layer.weight = torch.nn.Parameter(weight * 2)",
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weight_comes_back_as_it_is(program, change):
    program(f"""
layer = pipe.unet.conv_in
def move():
    pipe.unet.to(o.DEVICE)
    weight = layer.weight
    with torch.no_grad():
        {CHANGES[change]}
    changed = layer.weight.cpu()
    pipe.unet.to("cpu")
    assert torch.equal(layer.weight, changed) and not torch.equal(changed, first)
    return o.outside(pipe.unet)
first = layer.weight.detach().clone()
assert move() == ["conv_in.weight"]
first = layer.weight.detach().clone()
move()  # what was changed on the host, and again on the device
""")


def test_weight_that_was_changed_on_the_host_stays_changed(program):
    program("""
weight = pipe.unet.conv_in.weight
for _ in range(2):
    with torch.no_grad():
        weight.add_(1)
    changed = weight.detach().clone()
    pipe.unet.to(o.DEVICE)
    pipe.unet.to("cpu")
    assert torch.equal(weight, changed)
""")


def test_what_the_program_kept_of_a_weight_is_not_changed_with_it(program):
    program("""
weight = pipe.unet.conv_in.weight
kept = []
for _ in range(3):
    kept.append(weight.data)
    pipe.unet.to(o.DEVICE)
    pipe.unet.to("cpu")
with torch.no_grad():
    weight.zero_()
assert all(torch.equal(each, wanted["unet", "conv_in.weight"]) for each in kept)
kept[0].add_(1)
assert torch.equal(kept[1], wanted["unet", "conv_in.weight"]) and not weight.any()
""")


def test_another_dtype_or_layout_is_made(program):
    program("""
pipe.unet.to(o.DEVICE)
pipe.unet.to("cpu", memory_format=torch.channels_last)
assert pipe.unet.conv_in.weight.is_contiguous(memory_format=torch.channels_last)
pipe.unet.to(o.DEVICE)
pipe.unet.to("cpu", memory_format=torch.contiguous_format)
pipe.vae.to(o.DEVICE)
pipe.vae.to("cpu", torch.float64)
assert pipe.vae.dtype == torch.float64
pipe.vae.to(torch.float32)
o.require_equal(pipe, wanted)
pipe.text_encoder.to(o.DEVICE)._apply(lambda each: each.cpu() * 2)
weight = pipe.text_encoder.get_input_embeddings().weight
key = next(key for key in wanted if key[0] == "text_encoder" and "token_embedding" in key[1])
assert torch.equal(weight, wanted[key] * 2)
""")


def test_copies_and_pickles_are_ordinary(program):
    program("""
import copy, pickle
pipe.unet.to(o.DEVICE)
pipe.unet.to("cpu")
copied = copy.deepcopy(pipe.unet)
loaded = pickle.loads(pickle.dumps(pipe.unet))
for each in (copied, loaded):
    each.to(o.DEVICE)
    each.to("cpu")
    with torch.no_grad():
        each.conv_in.weight.zero_()
    assert each.conv_in.weight.device.type == "cpu" and not each.conv_in.weight.any()
o.require_equal(pipe, wanted)
assert not o.outside(pipe.unet)
""")


@pytest.mark.parametrize("again", [False, True])
def test_segment_that_was_removed_meanwhile(program, again):
    program(f"""
pipe.unet.to(o.DEVICE)
o.unlink_all()
if {again}:
    o.load(sys.argv[1])
pipe.unet.to("cpu")
found = pipe.unet.state_dict()
assert all(torch.equal(found[key], each) for (name, key), each in wanted.items() if name == "unet")
""")


def test_module_goes_with_its_last_user(program):
    program("""
import copy, gc, weakref
gc.collect(); gc.disable()
unet = o.load(sys.argv[1]).unet
copied, gone = copy.copy(unet.conv_in), weakref.ref(unet)
unet.to(o.DEVICE); unet.to("cpu")
del unet
assert gone() is None
copied.to(o.DEVICE)
assert copied.weight.device.type == "standin"
copied.to("cpu")
assert torch.equal(copied.weight, wanted["unet", "conv_in.weight"])
""")


def test_pipeline_can_be_saved_afterwards(program, tmp_path):
    program(f"""
pipe.to(o.DEVICE); pipe.to("cpu")
pipe.save_pretrained("{tmp_path}")
o.require_equal(o.load("{tmp_path}"), wanted)
""")


def test_private_load_is_not_watched(program):
    program("""
del pipe
o.unlink_all()
pipe = o.load(sys.argv[1], keep=False)
assert all("_apply" not in vars(each) for model in o.models(pipe).values()
           for each in model.modules())
""")


def test_fork_brings_its_weights_home_too(program):
    program("""
import os
pipe.to(o.DEVICE); pipe.to("cpu")
child = os.fork()
if child == 0:
    try:
        pipe.to(o.DEVICE); pipe.to("cpu")
        assert not o.all_outside(pipe)
        o.require_equal(pipe, wanted)
        os._exit(0)
    finally:
        os._exit(1)
assert os.waitpid(child, 0)[1] == 0
pipe.to(o.DEVICE); pipe.to("cpu")
assert not o.all_outside(pipe)
""")
