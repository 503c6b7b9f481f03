"""Names of stored tensors make the tree that the class has, as far as names tell."""

import pytest
from placing import blocks, flux, leaf, model

from shmload._placement.device_map import expand, parse_device_map
from shmload._placement.inventory import parse_inventory
from shmload._placement.modules import Module, component_from_names
from shmload.errors import DeviceMapMalformed, UnknownModule


def names_of(component):
    """Name one tensor for each module without children."""

    def walk(module, path):
        if not module.children:
            yield f"{path}weight", module.nbytes
        for child in module.children:
            yield from walk(child, f"{path}{child.name}.")

    return list(walk(component.module, ""))


def test_tree_of_blocks_is_that_of_the_class():
    wanted = model("transformer", leaf("x_embedder"), blocks("blocks", 12), leaf("proj_out"))
    found = component_from_names("transformer", names_of(wanted))
    assert found.module == wanted.module
    assert found.nbytes == wanted.nbytes


def test_tensor_beside_modules_has_a_place_of_its_own():
    found = component_from_names("", [("table", 3), ("x.weight", 4), ("x.bias", 1)])
    assert found.module.children == (Module(name="table", nbytes=3), Module(name="x", nbytes=5))


def test_only_the_outer_of_nested_numbers_is_whole():
    found = component_from_names("", [("layer.0.inner.1.weight", 2), ("layer.0.inner.0.weight", 1)])
    assert [path for path, _ in found.module.units()] == ["layer.0"]


@pytest.mark.parametrize(
    ("device_map", "error"),
    [
        ({"": 0, "transformer.nothing": 1}, UnknownModule),
        ({"transformer.x_embedder": 0}, DeviceMapMalformed),
        ({"": 0, "transformer.transformer_blocks.0.attn": 1}, DeviceMapMalformed),
    ],
)
def test_what_the_class_refuses_the_names_refuse(device_map, error):
    by_names = [component_from_names(each.name, names_of(each)) for each in flux()]
    chosen = parse_device_map(device_map, parse_inventory("2x1GiB"))
    for components in (flux(), by_names):
        with pytest.raises(error):
            expand(chosen, components)
