"""What the process that unpickles writes, and what it refuses; without a process."""

import contextlib
import os
import warnings

import pytest
import torch

from shmload._checkpoints.formats import safetensors
from shmload._checkpoints.formats.unpickled import Answer, Unpickle, Wish
from shmload._loading.state_dict import wrap
from shmload.workers import unpickle as program
from shmload.workers.unpickle import unpickle_to

_ANY = Wish(may_be_nested=True, may_be_strided=True, may_be_odd=True)
_FORMS = [True, False]
each_form = pytest.mark.parametrize("is_archive", _FORMS, ids=["archive", "older form"])


@pytest.fixture
def target():
    fd = os.memfd_create("target")
    yield fd
    os.close(fd)


@pytest.fixture
def answer_to(tmp_path, target):
    """Return the answer to a wish for a file with some content."""

    def ask(content, *, is_archive=True, wish=_ANY, has_data=True):
        path = tmp_path / "model.pt"
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            torch.save(content, path, _use_new_zipfile_serialization=is_archive)
        with path.open("rb") as file:
            return unpickle_to(target, file.fileno(), Unpickle(wish, has_data))

    return ask


def as_bytes(tensor):
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return tensor.dtype, tensor.shape, plain.reshape(-1).view(torch.uint8).tolist()


@each_form
def test_every_tensor_has_the_bytes_of_torch(answer_to, target, tmp_path, is_archive):
    base = torch.arange(24.0).reshape(4, 6)
    base[0, 0] = torch.nan
    tensors = {
        "transposed": base.t(),
        "sliced": base[::2, 1:5:2],
        "rows": base[1:3],
        "all": base,
        "tied": base,
        "element": base[1, 2],
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "empty transposed": torch.empty(3, 0).t(),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "bfloat16": base.bfloat16().t(),
        "bool": (base > 3).t(),
        "integers": base.nan_to_num().to(torch.int16).t(),
        "complex": torch.complex(base, base).t(),
        "conjugate": torch.complex(base, base).conj(),
        "parameter": torch.nn.Parameter(base.t().clone()),
    }
    if is_archive:  # torch itself reads no others in the older form
        tensors["float8"] = base.to(torch.float8_e4m3fn).t()
        tensors["unsigned"] = base.nan_to_num().to(torch.uint16).t()
    assert answer_to(tensors, is_archive=is_archive) == Answer()
    found = wrap(target, "found")
    wanted = torch.load(tmp_path / "model.pt", weights_only=True)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert as_bytes(found[name]) == as_bytes(tensor), name


def test_header_alone_has_the_length_of_all(answer_to, target):
    tensors = {"a": torch.ones(1 << 20), "b": torch.ones(3, 5).t()}
    assert answer_to(tensors, has_data=False) == Answer()
    header = safetensors.read_header(target, "found")
    assert [each.shape for each in header.tensors] == [(1 << 20,), (5, 3)]
    assert os.fstat(target).st_blocks * 512 < 1 << 16
    assert answer_to(tensors) == Answer()
    assert safetensors.read_header(target, "found") == header


def test_state_dict_in_a_file_is_found_where_diffusers_finds_it(answer_to, target):
    nested = {"epoch": 3, "state_dict": {"a": torch.ones(2, 3).t()}}
    assert answer_to(nested, is_archive=False) == Answer()
    assert wrap(target, "found").keys() == {"a"}
    adapter = {"image_proj": {"a": torch.ones(2)}, "ip_adapter": {"1.b": torch.ones(3)}}
    os.ftruncate(target, 0)
    assert answer_to(adapter, is_archive=False) == Answer()
    assert wrap(target, "found").keys() == {"image_proj.a", "ip_adapter.1.b"}
    of_model = Wish(may_be_nested=False, may_be_strided=True, may_be_odd=False)
    assert answer_to(nested, wish=of_model) == Answer(
        refusal="its 'epoch' is no tensor with a name"
    )


class _Calls:
    def __reduce__(self):
        return os.system, ("echo called",)


class _Evaluates:
    def __reduce__(self):
        return eval, ("print('called')",)


class _Downloads:
    def __reduce__(self):
        return torch.hub.load, ("somebody/model", "model")


def _noted():
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.note = 3
    return parameter


def _quantised():
    with warnings.catch_warnings(action="ignore"):
        return torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)


@each_form
@pytest.mark.filterwarnings("ignore")  # torch is about to give up quantised tensors
@pytest.mark.parametrize(
    ("content", "why"),
    [
        (_Calls(), "torch refuses the name posix.system in it"),
        (_Evaluates(), "torch refuses the name eval in it"),
        (_Downloads(), "torch refuses the name torch.hub.load in it"),
        (3, "'a' is no tensor"),
        (torch.ones(2).to_sparse(), "'a' has no plain bytes"),
        (_quantised(), "has no plain bytes"),
        (torch.ones(2, device="meta"), "has no plain bytes"),
        (torch.ones(1).expand(9), "elements that lie in the same place"),
        (_noted(), "more than its elements"),
        (torch.ones(2, dtype=torch.complex128), "dtype torch.complex128"),
    ],
)
def test_what_is_no_tensor_of_plain_bytes_is_refused(
    answer_to, target, capfd, is_archive, content, why
):
    answer = answer_to({"a": content}, is_archive=is_archive)
    assert answer.refusal
    assert why in answer.refusal
    assert os.fstat(target).st_size == 0
    assert "called" not in capfd.readouterr().out


def test_transposed_tensor_of_transformers_is_refused(answer_to):
    wish = Wish(may_be_nested=False, may_be_strided=False, may_be_odd=False)
    assert answer_to({"a": torch.ones(2, 3)}, wish=wish, is_archive=False) == Answer()
    answer = answer_to({"a": torch.ones(2, 3).t()}, wish=wish)
    assert answer == Answer(refusal="its 'a' is transposed, and transformers keeps it so")
    odd = torch.ones(1, 1, 2, 2).to(memory_format=torch.channels_last)
    assert odd.is_contiguous()
    assert answer_to({"a": odd}, is_archive=False) == Answer()
    answer = answer_to({"a": odd}, wish=wish, is_archive=False)
    assert answer == Answer(refusal="its 'a' has odd strides, and the libraries keep them")


@pytest.mark.parametrize("content", [b"", b"\x80\x02.", b"PK\3\4", b"\x80\x02\x8a\nl\xfc\x9cF"])
def test_damaged_file_is_refused(answer_to, content):
    answer = answer_to(content)
    assert answer.refusal
    assert answer.refusal.startswith("torch refuses it: ")


def test_file_of_the_older_form_is_whole_or_refused(answer_to, tmp_path, target):
    plain = torch.arange(6.0).reshape(2, 3)
    tensors = {"a": plain.t(), "tied": plain, "b": torch.ones(7), "empty": torch.empty(0)}
    kept = {"state_dict": tensors, "optimizer": [{"moments": (torch.ones(5),)}]}
    for each in ({}, tensors, kept):
        assert answer_to(each, is_archive=False, has_data=False) == Answer()
    content = (tmp_path / "model.pt").read_bytes()
    ours = str(tensors["b"].untyped_storage()._cdata).encode()
    assert content.count(ours) == 2  # where it is used, and in the list of what follows
    other = content.replace(ours, b"7" * len(ours), 1)
    tied = content.replace(ours, str(plain.untyped_storage()._cdata).encode(), 1)
    for damaged in (content[:-1], content + b"more", tied):
        answer = answer_to(damaged, has_data=False)
        assert "bytes of tensors" in answer.refusal
    answer = answer_to(other)  # which only the list tells
    assert "not found" in answer.refusal
    answer = answer_to(content + b"more")
    assert answer == Answer(refusal="4 bytes of tensors are there, and not 0")


def test_torch_that_cannot_skip_data_reads_it(answer_to, monkeypatch, target):
    monkeypatch.setattr(program, "_skip_data", contextlib.nullcontext)
    assert answer_to({"a": torch.ones(3, 2).t()}, is_archive=False, has_data=False) == Answer()
    assert safetensors.read_header(target, "found").tensors[0].shape == (2, 3)


def test_memory_that_runs_out_is_said(answer_to, monkeypatch):
    monkeypatch.setattr(torch, "load", _raise_memory_error)
    answer = answer_to({"a": torch.ones(2)})
    assert answer.failure
    assert answer.lacks_memory


def _raise_memory_error(*args, **kwargs):
    raise MemoryError
