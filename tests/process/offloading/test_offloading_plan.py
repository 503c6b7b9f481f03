"""A plan says what the libraries' offloading calls keep on a device."""

import pytest
import stand_in
from lacking import skip_what_is_lacking

pytestmark = [
    pytest.mark.libraries,
    pytest.mark.skipif(bool(stand_in.why_none()), reason=stand_in.why_none()),
]

# The calls by their place in the plan.
CALLS = {"model": 0, "blocks": 3, "leaves": 4, "sequential": 5}


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
def test_weights_on_the_device_are_what_the_plan_says(offloading, saved, call):
    skip_what_is_lacking(call)
    # Buffers are not sampled, and autoencoders name blocks of their own: it may be less.
    source = saved("stable-diffusion")
    offloading(
        source,
        f"""
import shmload
most = 0
def sampled(forward):
    def run(*args, **kwargs):
        global most
        here = {{
            id(each): each.nbytes
            for model in o.models(pipe).values()
            for each in model.parameters()
            if each.device.type == "standin"
        }}
        most = max(most, sum(here.values()))
        return forward(*args, **kwargs)
    return run
for layer in (torch.nn.Linear, torch.nn.Conv2d, torch.nn.Embedding):
    layer.forward = sampled(layer.forward)
source = sys.argv[1]
use = shmload.plan(source, inventory="1GiB").placement.offloading[{CALLS[call]}]
pipe = o.load(source)
begin, run = o.CALLS["{call}"]
begin(pipe)
run(pipe)
assert 0.8 * use.nbytes <= most <= use.nbytes, (most, use)
""",
    )
