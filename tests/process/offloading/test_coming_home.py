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


# In place, through other memory, and by what torch does not count.
CHANGES = (
    "weight.add_(1)",
    "weight.view(-1)[-1] += 1",
    "weight.view(-1)[:2].mul_(-1)",
    "weight.view(-1)[:2] = weight.view(-1)[:2].flip(0).clone()",
    "weight.data = weight.data * 2",
    "weight.set_((weight * 2).detach())",
    "with torch.inference_mode(): weight.mul_(2)",
    "torch.compile(lambda it: it.mul_(2), backend='eager', fullgraph=True)(weight)",
    "layer.weight = torch.nn.Parameter(weight * 2)",
)


def test_changed_weight_comes_back_as_it_is(program):
    program(f"""
layer = pipe.unet.conv_in
for change in {CHANGES}:
    first = layer.weight.detach().clone()
    pipe.unet.to(o.DEVICE)
    with torch.no_grad():
        exec(change, dict(globals(), weight=layer.weight))
    changed = layer.weight.cpu()
    pipe.unet.to("cpu")
    assert torch.equal(layer.weight, changed) and not torch.equal(changed, first), change
    assert o.outside(pipe.unet) == ["conv_in.weight"], change
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
for copied in (copy.deepcopy(pipe.unet), pickle.loads(pickle.dumps(pipe.unet))):
    assert copied.to(o.DEVICE).to("cpu") is copied
    with torch.no_grad():
        copied.conv_in.weight.zero_()
    assert copied.conv_in.weight.is_cpu and not copied.conv_in.weight.any()
o.require_equal(pipe, wanted)
assert not o.outside(pipe.unet)
copied = copy.copy(pipe.unet.conv_in)  # it shares the parameters
copied.to(o.DEVICE)
pipe.unet.to("cpu")
assert copied.weight.is_cpu and not o.outside(pipe.unet)
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
