"""The plain tensors that quantised weights are made of."""

import torch
from comparing import describe


def parts_of(name, tensor):
    """Yield the plain tensors that a tensor is made of, and what else it has."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, rest = tensor.__tensor_flatten__()
        yield name, repr(rest)
        for each in names:
            yield from parts_of(f"{name}.{each}", getattr(tensor, each))
        return
    yield name, tensor.detach()
    state = getattr(tensor, "quant_state", None)  # of four bits, by bitsandbytes
    if state:
        for key, value in state.as_dict(packed=False).items():
            yield f"{name}.{key}", value
    if getattr(tensor, "SCB", None) is not None:  # of eight
        yield f"{name}.SCB", tensor.SCB


def parts_of_model(model):
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [part for name, tensor in tensors for part in parts_of(name, tensor)]


def assert_same_parts(got, wanted):
    for (name, mine), (other_name, theirs) in zip(got, wanted, strict=True):
        assert name == other_name
        if isinstance(theirs, torch.Tensor):
            assert describe(mine) == describe(theirs), name
            assert torch.equal(
                mine.contiguous().view(-1).view(torch.uint8),
                theirs.contiguous().view(-1).view(torch.uint8),
            ), name
        else:
            assert mine == theirs, name
