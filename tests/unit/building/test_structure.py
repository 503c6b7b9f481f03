"""What cannot be taken apart is refused with its path."""

import pytest
import torch
from torch.nn.utils import weight_norm

from shmload._building import parts, structure

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")


def normed_layer():
    """Make a layer as libraries load it: without memory at first, then with weights of a file."""
    with torch.device("meta"):
        layer = weight_norm(torch.nn.Conv1d(3, 4, 5, dtype=torch.bfloat16), dim=2)
    weights = {
        name: torch.randn(each.shape).bfloat16() for name, each in layer.state_dict().items()
    }
    layer.load_state_dict(weights, assign=True)
    return layer


class Wrapper(torch.Tensor):
    """A tensor that keeps its weights in another, and does not say so."""

    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (2, 2))

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return args[0]


def test_wrapper_that_does_not_say_where_its_bytes_are_is_refused():
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(Wrapper(), requires_grad=False)
    with pytest.raises(parts.CannotKeep, match=r"weight: a .* without bytes of its own"):
        structure.take_apart(module)


def test_tensor_without_bytes_is_refused():
    with pytest.raises(parts.CannotKeep, match="weight: a tensor without bytes"):
        structure.take_apart(normed_layer())
