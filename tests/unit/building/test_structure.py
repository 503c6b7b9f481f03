"""What is taken apart comes back, also where tensors have no bytes."""

import pytest
import torch
from sameness import differences
from torch.nn.utils import weight_norm

from shmload._building import structure, tensor_parts

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")


def comes_back(thing):
    apart = structure.take_apart(thing)
    storages = [tensor.untyped_storage() for tensor in apart.kept if tensor.numel()]
    assert len(storages) == len(apart.regions)
    by_address = {each.data_ptr(): each for each in storages}
    return structure.put_together(
        apart.structure, lambda number: by_address[apart.regions[number].address]
    )


def normed_layer():
    """Make a layer as libraries load it: without memory at first, then with weights of a file."""
    with torch.device("meta"):
        layer = weight_norm(torch.nn.Conv1d(3, 4, 5, dtype=torch.bfloat16), dim=2)
    weights = {
        name: torch.randn(each.shape).bfloat16() for name, each in layer.state_dict().items()
    }
    layer.load_state_dict(weights, assign=True)
    return layer


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_normed_layer_before_its_first_call(mode):
    layer = normed_layer()
    assert layer.weight.is_meta
    with mode():
        got = comes_back(layer)
    assert not differences(got, layer)
    given = torch.randn(1, 3, 9).bfloat16()
    assert torch.equal(got(given), layer(given))


def test_normed_layer_after_a_call():
    layer = normed_layer()
    with torch.no_grad():
        layer(torch.randn(1, 3, 9).bfloat16())
    assert not layer.weight.is_meta
    assert not differences(comes_back(layer), layer)


def test_other_tensors_without_bytes_are_refused():
    layer = normed_layer()
    layer.weight = layer.weight * 2
    with pytest.raises(tensor_parts.CannotKeep, match="weight: a tensor without bytes"):
        structure.take_apart(layer)
