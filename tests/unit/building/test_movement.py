"""`Movement` tells moves of a file's tensors from computations with them."""

import pytest
import torch
from movement import Movement
from safetensors.torch import load_file, save_file


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.rand(6, 4), "b": torch.rand(6, 4), "ids": torch.arange(9)}, path)
    return path


MOVES = {
    "view": lambda a, b: a.view(-1)[3:9].unsqueeze(0),
    "transposed": lambda a, b: a.T.contiguous(),
    "split": lambda a, b: [part.clone() for part in a.chunk(3)],
    "joined": lambda a, b: torch.cat([a, b]),
    "stacked": lambda a, b: torch.stack((a, b)),
    "joined in another order": lambda a, b: torch.cat(list(reversed(a.chunk(2)))),
    "copied in": lambda a, b: torch.empty(6, 4).copy_(a),
    "cast to the dtype": lambda a, b: a.to(torch.bfloat16),
    "shape alone": lambda a, b: torch.zeros_like(a) * 2,
    "its own constant": lambda a, b: torch.eye(4) * 2,
    "nothing of it": lambda a, b: torch.arange(0, 8, 2).float() / 3,
    "parameter": lambda a, b: torch.nn.Parameter(a).data,
}
COMPUTATIONS = {
    "scaled": (lambda a, b: a * 2, "mul"),
    "added in place": (lambda a, b: a.add_(1), "add_"),
    "summed after a move": (lambda a, b: torch.cat([a, b]).sum(), "sum"),
    "of a copy": (lambda a, b: torch.empty(6, 4).copy_(a) + 1, "add"),
    "looked at": (lambda a, b: a[0, 0].item(), "_local_scalar_dense"),
    "compared": (lambda a, b: torch.equal(a, b), "equal"),
    "given by name": (lambda a, b: torch.mul(input=torch.ones(4), other=a), "mul"),
    "cast to less": (lambda a, b: a.half(), "a cast to torch.float16"),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_moves(path, move):
    with Movement(path, torch.bfloat16) as movement:
        tensors = load_file(path)
        move(tensors["a"], tensors["b"])
    assert movement.computed == ""


@pytest.mark.parametrize(("compute", "name"), COMPUTATIONS.values(), ids=COMPUTATIONS)
def test_computations_are_named(path, compute, name):
    with Movement(path, torch.bfloat16) as movement:
        tensors = load_file(path)
        compute(tensors["a"], tensors["b"])
        tensors["a"].cos()
    assert movement.computed == name


def test_numbers_that_are_no_floats_may_be_computed_with(path):
    with Movement(path, torch.bfloat16) as movement:
        load_file(path)["ids"].add_(1)
    assert movement.computed == ""
