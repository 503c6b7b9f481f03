"""Values and errors that cross between a job's processes arrive unchanged."""

import numpy as np
import pytest
import torch

import shmload
from shmload._jobs import payload as payload_module
from shmload._jobs.payload import dump, dump_error, load


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64]
)
@pytest.mark.parametrize("shape", [(3, 4), (), (0, 5), (2, 3, 4)])
def test_tensors_arrive_as_they_are(dtype, shape):
    tensor = torch.randint(0, 2, shape).to(dtype)
    got = load(dump({"a": [tensor]}))["a"][0]
    assert (got.dtype, got.shape) == (dtype, tensor.shape)
    assert bytes(got.reshape(-1).view(torch.uint8)) == bytes(tensor.reshape(-1).view(torch.uint8))


def test_of_a_view_only_what_it_shows_crosses():
    weights = torch.zeros(1 << 20)
    payload = dump([weights[10:20], weights.reshape(1024, 1024)[:, 3]])
    assert payload.nbytes < 8192
    first, second = load(payload)
    assert (first.shape, second.shape) == ((10,), (1024,))


def test_what_arrives_can_be_written_to():
    tensor, array = load(dump((torch.zeros(3), np.zeros(3))))
    tensor += 1
    array += 1
    assert (tensor.sum(), array.sum()) == (3, 3)


def test_gradients_stay_behind():
    weight = torch.nn.Parameter(torch.ones(2))
    got = load(dump(weight * 2))
    assert not got.requires_grad
    assert got.grad_fn is None
    assert torch.equal(got, torch.full((2,), 2.0))


def test_one_tensor_named_twice_arrives_once():
    tensor = torch.arange(1000)
    payload = dump([tensor, tensor])
    assert payload.nbytes < 8500
    first, second = load(payload)
    assert first is second


def test_other_layouts_cross_the_way_that_torch_pickles_them():
    tensor = torch.eye(3).to_sparse()
    assert torch.equal(load(dump(tensor)).to_dense(), torch.eye(3))


def test_functions_of_main_go_by_value():
    add, scope = 5, {"__name__": "__main__"}
    exec("def increase(number, by=2):\n    return number + by", scope)
    got = load(dump((scope["increase"], lambda number: number + add)))
    assert [each(1) for each in got] == [3, 6]


def test_what_is_too_large_is_an_error_that_says_how_large(monkeypatch):
    monkeypatch.setattr(payload_module, "MAX_NBYTES", 10_000)
    dump(torch.zeros(2000))
    with pytest.raises(shmload.ArgumentError, match=r"a Tensor of 11\.\d+ KiB cannot cross"):
        dump(torch.zeros(3000))


def test_conjugates_and_negatives_are_what_they_show():
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    assert torch.equal(load(dump(tensor.conj())), torch.tensor([1 - 2j, 3 + 4j]))
    assert torch.equal(load(dump(tensor.conj().imag)), torch.tensor([-2.0, 4.0]))


class TwoParts(LookupError):
    """An exception with its own message."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")
        self.two = two


class OneWay(Exception):
    """Can be pickled but not unpickled."""

    def __reduce__(self):
        return TwoParts, ("one",)


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ValueError("plain"), ValueError, "plain"),
        (TwoParts(1, 2), TwoParts, "1 and 2"),
        (OneWay("only"), RuntimeError, "OneWay: only"),
        (OSError(2, "not there", "a.png"), FileNotFoundError, "not there: 'a.png'"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no"), UnicodeDecodeError, "position 0: no"),
        (shmload.UnknownDtype("a", ["b"]), shmload.UnknownDtype, "unknown dtype 'a'; use one of b"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_error_arrives_as_itself_or_as_its_text(error, kind, text):
    got = load(dump_error(error))
    assert type(got) is kind
    assert str(got).endswith(text)
    if kind is not RuntimeError:
        assert vars(got) == vars(error)
