"""PyTorch's files: which tensors are read where, and what is left to the libraries."""

import io
import zipfile
from collections import OrderedDict

import pytest
import torch

from shmload._checkpoints.formats.described import Unread
from shmload._checkpoints.formats.pytorch import describe


@pytest.fixture
def described(tmp_path):
    """Return what is said of a file with a given content, or of one that torch writes."""

    def describe_content(content):
        path = tmp_path / "model.bin"
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            torch.save(content, path)
        return list(describe(str(path)))

    return describe_content


def parts(tensors):
    """Return the members of the file that torch writes, by name."""
    content = io.BytesIO()
    torch.save(tensors, content)
    with zipfile.ZipFile(content) as file:
        return {name: file.read(name) for name in file.namelist()}


def archive(members, compression=zipfile.ZIP_STORED):
    """Return a zip archive of members by name, as another program than torch writes it."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", compression) as file:
        for name, raw in members.items():
            file.writestr(name, raw)
    return content.getvalue()


# What is read -------------------------------------------------------------------------------------


def test_every_dtype_and_kind_of_place_is_read(tmp_path, described):
    base = torch.arange(12).reshape(3, 4)
    tensors = OrderedDict(
        {str(dtype): base.to(dtype) for dtype in (torch.float64, torch.bfloat16, torch.bool)},
        fp8=base.float().to(torch.float8_e4m3fn),
        unsigned=base.to(torch.uint16),
        row=base[1],
        element=base[2, 3],
        empty=base[:, :0],
        column=base[:, :1].t()[:, :1],
        parameter=torch.nn.Parameter(base.float()),
        gradient=torch.ones(2, 3, requires_grad=True),
    )
    tensors._metadata = OrderedDict({"": {"version": 1}})
    found = described(tensors)
    assert [spec.name for spec in found] == list(tensors)
    content = (tmp_path / "model.bin").read_bytes()
    for spec, tensor in zip(found, tensors.values(), strict=True):
        assert spec.shape == tuple(tensor.shape)
        if spec.nbytes:
            raw = bytearray(content[spec.begin : spec.end])
            got = torch.frombuffer(raw, dtype=tensor.dtype).view(tensor.shape)
            assert torch.equal(got, tensor), spec.name


def test_state_dict_of_a_whole_pipeline_is_found(described):
    nested = {"epoch": 3, "state_dict": {"a": torch.ones(2)}}
    assert [spec.name for spec in described(nested)] == ["a"]


# What is left to the libraries --------------------------------------------------------------------


class _Calls:
    def __reduce__(self):
        return print, ("called",)


def _noted():
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.note = 3
    return parameter


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({"a": torch.ones(3, 2).t()}, "do not lie next to each other"),
        ({"a": torch.ones(2).expand(3, 2)}, "do not lie next to each other"),
        ({"a": torch.ones(2).to_sparse()}, "no plain tensor"),
        ({"a": torch.ones(2, dtype=torch.complex64).conj()}, "no plain tensor"),
        ({"a": _noted()}, "no plain tensor"),
        ({"a": 1}, "'a' is no tensor"),
        ({1: torch.ones(2)}, "1 is no text"),
        ([torch.ones(2)], "no dict"),
        ({"a": torch.ones(2), "b": _Calls()}, r"does not unpickle \S*print"),
    ],
)
def test_what_is_not_read_is_said(described, content, why, capfd):
    with pytest.raises(Unread, match=why):
        described(content)
    assert "called" not in capfd.readouterr().out


def test_archive_of_another_program(described):
    members = parts({"a": torch.arange(4.0), "b": torch.zeros(1 << 10)})
    with pytest.raises(Unread, match="compressed"):
        described(archive(members, zipfile.ZIP_DEFLATED))
    with pytest.raises(Unread, match="big-endian"):
        described(archive({**members, "archive/byteorder": b"big"}))
    # torch computes places as its own writer would have chosen them.
    backwards = dict(reversed(members.items()))
    with pytest.raises(Unread, match="does not say where its 'b' lies"):
        described(archive({"archive/data.pkl": members["archive/data.pkl"], **backwards}))
