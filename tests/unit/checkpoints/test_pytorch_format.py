"""PyTorch's files: what is read, and that all else is refused and nothing is called."""

import io
import os
import pickle
import struct
import zipfile
from collections import OrderedDict

import pytest
import torch

from shmload._checkpoints.formats.pytorch import PYTORCH, read_header
from shmload._checkpoints.formats.tensor_pickle import UnknownPickle, read_pickle
from shmload._checkpoints.resolve import resolve
from shmload._checkpoints.wanted import Wanted
from shmload.errors import CheckpointError, PickleUnread, ShardTruncated, WrongFormat


@pytest.fixture
def header_of(tmp_path):
    """Return the header of a file with a given content, or of one that torch writes."""

    def read(content, name="model.bin"):
        path = tmp_path / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            torch.save(content, path)
        with path.open("rb") as file:
            return read_header(file.fileno(), path)

    return read


def archive(members, compression=zipfile.ZIP_STORED):
    """Return a zip archive of pairs of a name and a content."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", compression) as file:
        for name, raw in members:
            file.writestr(name, raw)
    return content.getvalue()


def parts(tensors):
    """Return the members of the file that torch writes, by name."""
    content = io.BytesIO()
    torch.save(tensors, content)
    with zipfile.ZipFile(content) as file:
        return {name: file.read(name) for name in file.namelist()}


# What is read -------------------------------------------------------------------------------------


def test_every_dtype_and_kind_of_place_is_read(header_of):
    base = torch.arange(12).reshape(3, 4)
    tensors = OrderedDict(
        {str(dtype): base.to(dtype) for dtype in (torch.float64, torch.bfloat16, torch.bool)},
        fp8=base.float().to(torch.float8_e4m3fn),
        unsigned=base.to(torch.uint16),
        row=base[1],
        element=base[2, 3],
        empty=base[:, :0],
        column=base[:, :1].t()[:, :1],
    )
    tensors._metadata = OrderedDict({"": {"version": 1}})
    found = {spec.name: spec for spec in header_of(tensors).tensors}
    assert found.keys() == tensors.keys()
    assert [found[name].shape for name in tensors] == [tuple(t.shape) for t in tensors.values()]
    assert (found["fp8"].dtype, found["unsigned"].dtype) == ("F8_E4M3", "U16")
    assert found["element"].begin - found["row"].begin == (11 - 4) * 8


def test_state_dict_of_a_whole_file_is_found_and_that_of_a_model_is_not(header_of):
    nested = {"epoch": 3, "state_dict": {"a": torch.ones(2)}}
    assert [spec.name for spec in header_of(nested, "sd.ckpt").tensors] == ["a"]
    with pytest.raises(PickleUnread, match="'epoch' is no tensor"):
        header_of(nested, "pytorch_model.bin")


def test_parameters_and_tensors_that_need_a_gradient_are_tensors(header_of):
    tensors = {
        "a": torch.ones(2, 3, requires_grad=True),
        "b": torch.nn.Parameter(torch.ones(4, dtype=torch.float16)),
        "c": torch.nn.Parameter(torch.ones(5), requires_grad=False),
    }
    found = header_of(tensors).tensors
    assert [(each.name, each.dtype, each.shape) for each in found] == [
        ("a", "F32", (2, 3)),
        ("b", "F16", (4,)),
        ("c", "F32", (5,)),
    ]
    integers = torch.nn.Parameter(torch.ones(2, dtype=torch.int32), requires_grad=False)
    assert header_of({"a": integers}).tensors[0].dtype == "I32"
    hooked = torch.nn.Parameter(torch.ones(2))
    hooked.note = 3
    with pytest.raises(PickleUnread, match="_rebuild_parameter_with_state"):
        header_of({"a": hooked})


def test_two_state_dicts_of_an_ip_adapter_are_one_as_in_safetensors(header_of):
    parts = {"image_proj": {"a.weight": torch.ones(2)}, "ip_adapter": {"1.b": torch.ones(3)}}
    found = header_of(parts, "ip-adapter.bin").tensors
    assert [spec.name for spec in found] == ["image_proj.a.weight", "ip_adapter.1.b"]
    for other in ({"a": {"b": torch.ones(1)}}, torch.ones(1), {3: torch.ones(1)}):
        with pytest.raises(PickleUnread, match=r"'ip_adapter' is no dict|is no tensor"):
            header_of(parts | {"ip_adapter": other}, "ip-adapter.bin")
    with pytest.raises(PickleUnread, match="'image_proj' is no tensor"):
        header_of(parts | {"more": torch.ones(1)}, "ip-adapter.bin")


_LARGE = torch.zeros(1 << 20)  # 4 MiB
_SHARING = {
    "many names": lambda: {str(number): _LARGE for number in range(3000)},
    "overlapping views": lambda: {str(each): _LARGE[each : (3 << 18) + each] for each in range(99)},
}


@pytest.mark.parametrize("how", _SHARING)
def test_file_that_needs_far_more_than_its_bytes_is_left_to_the_libraries(tmp_path, how):
    path = tmp_path / "model.bin"
    torch.save(_SHARING[how](), path)
    with path.open("rb") as file, pytest.raises(PickleUnread, match=r"share bytes, .* apart; let"):
        PYTORCH.read_header(file.fileno(), path)


def test_tied_tensors_of_a_few_names_are_read(header_of):
    weight = torch.zeros(5 << 20)
    assert header_of(dict.fromkeys("abcd", weight)).data_nbytes == 4 * weight.nbytes


@pytest.mark.parametrize("name", ["a", "pytorch_model-00001-of-00002", "n" * 200])
def test_file_is_recognised_whatever_name_its_archive_has(tmp_path, name):
    path = tmp_path / f"{name}.bin"
    torch.save({"a": torch.ones(2)}, path)
    assert PYTORCH.recognises(path.read_bytes()[:512])


def test_another_file_in_the_same_place_is_read_anew(header_of):
    for count in (2, 3):
        (spec,) = header_of({"a": torch.ones(count)}).tensors
        assert spec.shape == (count,)


# What is left to the libraries --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({"a": torch.ones(3, 2).t()}, "do not lie next to each other"),
        ({"a": torch.ones(2).expand(3, 2)}, "do not lie next to each other"),
        ({"a": torch.ones(2).to_sparse()}, "names torch.serialization._get_layout"),
        ({"a": 1}, "'a' is no tensor"),
        ({1: torch.ones(2)}, "1 is no tensor with a name"),
        ({"__metadata__": torch.ones(2)}, "'__metadata__' is no tensor"),
        ({(1,): torch.ones(2)}, "keys are no texts"),
        ([torch.ones(2)], "no dict"),
        ({"a": {torch.ones(2)}}, "opcode|names"),
    ],
)
def test_what_is_not_read_is_said(header_of, content, why):
    with pytest.raises(PickleUnread, match=why) as caught:
        header_of(content)
    assert caught.value.why in str(caught.value)
    assert "let the library load it" in str(caught.value)


def test_older_file_is_said_to_be_one_without_an_archive(tmp_path):
    path = tmp_path / "model.bin"
    torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    with path.open("rb") as file, pytest.raises(PickleUnread, match="does not end with a zip"):
        read_header(file.fileno(), path)


def test_file_that_is_cut_short_is_not_left_to_the_libraries(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.ones(200_000)}, path)
    os.truncate(path, 700_000)
    (tmp_path / "config.json").write_text('{"architectures": ["A"]}')
    with pytest.raises(
        ShardTruncated, match="its end is missing, 700000 bytes are there; download"
    ):
        resolve(Wanted(source=tmp_path), tmp_path)


def test_archive_with_something_behind_its_end_is_left_to_the_libraries(header_of):
    content = archive(parts({"a": torch.ones(2)}).items())
    with pytest.raises(PickleUnread, match="does not end with a zip"):
        header_of(content + b"more")


# Hostile archives ---------------------------------------------------------------------------------


def test_compressed_members_are_refused(header_of):
    with pytest.raises(WrongFormat, match="compressed"):
        header_of(archive(parts({"a": torch.zeros(1 << 20)}).items(), zipfile.ZIP_DEFLATED))


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_members_of_one_name_are_refused(header_of):
    members = [*parts({"a": torch.ones(2)}).items()]
    with pytest.raises(PickleUnread, match="twice"):
        header_of(archive([*members, members[0]]))
    with pytest.raises(PickleUnread, match="'archive/DATA/0' twice"):
        header_of(archive([*members, ("archive/DATA/0", b"12345678")]))


def test_member_that_is_said_to_be_a_folder_is_refused(header_of):
    content = bytearray(archive(parts({"a": torch.ones(2)}).items()))
    entry = content.index(b"archive/data/0", content.index(b"PK\1\2")) - 46
    content[entry + 38] |= 0x10
    with pytest.raises(PickleUnread, match="'archive/data/0' is a folder"):
        header_of(bytes(content))


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("archive/data/0", b"", "storage of 'a' is missing, or has another size"),
        ("archive/byteorder", b"big", "big-endian"),
        ("archive/data.pkl", b"", "damaged at byte"),
        ("archive/data.pkl", b"\x80\x04.", "protocol 4"),
        ("archive/version", b"three", "its '/version' is no number"),
        ("archive/.storage_alignment", b"6a", "its '/.storage_alignment' is no number"),
        ("archive/.data/serialization_id", b"12\xff", "is no text"),
        ("other/data/0", b"", "in several folders"),
    ],
)
def test_lying_member_is_refused(header_of, name, content, why):
    members = parts({"a": torch.ones(2)}) | {name: content}
    with pytest.raises(PickleUnread, match=why):
        header_of(archive(members.items()))


@pytest.mark.parametrize(
    ("offset", "value", "why"),
    [(46 + 8, b"\xff", "name is no text"), (34, b"\1\0", "in another part")],
)
def test_lying_entry_of_the_directory_is_refused(header_of, offset, value, why):
    content = bytearray(archive(parts({"a": torch.ones(2)}).items()))
    entry = content.index(b"archive/data/0", content.index(b"PK\1\2")) - 46
    content[entry + offset : entry + offset + len(value)] = value
    with pytest.raises(PickleUnread, match=why):
        header_of(bytes(content))


@pytest.mark.parametrize(
    ("record", "offset"), [(b"PK\6\7", 4), (b"PK\6\7", 16), (b"PK\6\6", 16), (b"PK\6\6", 20)]
)
def test_archive_of_several_parts_is_refused(header_of, record, offset):
    file = io.BytesIO()
    torch.save({"a": torch.ones(2)}, file)
    content = bytearray(file.getvalue())
    assert header_of(bytes(content)).tensors
    content[content.index(record) + offset] = 2
    with pytest.raises(PickleUnread, match="several parts"):
        header_of(bytes(content))


def test_missing_members_are_refused(header_of):
    for name in ("archive/data.pkl", "archive/data/0", "archive/version"):
        members = parts({"a": torch.ones(2)})
        del members[name]
        with pytest.raises(CheckpointError):
            header_of(archive(members.items()))


@pytest.mark.parametrize("field", range(1, 7))
@pytest.mark.parametrize("value", [0, 1, 0x7FFF, 0xFFFF])
def test_lying_end_of_an_archive_is_refused_or_changes_nothing(header_of, field, value):
    content = archive(parts({"a": torch.ones(2)}).items())
    end = list(struct.unpack("<4s4H2LH", content[-22:]))
    wanted = header_of(content)
    end[field] = value
    try:
        assert header_of(content[:-22] + struct.pack("<4s4H2LH", *end)) == wanted
    except CheckpointError:
        return


# Hostile pickles ----------------------------------------------------------------------------------

_OS = b"cos\nsystem\n"
_CALLS = {
    "REDUCE": _OS + b"X\x02\0\0\0ls\x85R.",
    "INST": b"(X\x02\0\0\0lsios\nsystem\n.",
    "OBJ": b"(" + _OS + b"X\x02\0\0\0lso.",
    "NEWOBJ": _OS + b")\x81.",
    "NEWOBJ_EX": _OS + b")}\x92.",
    "STACK_GLOBAL": b"\x8c\x02os\x8c\x06system\x93.",
    "EXT1": b"\x82\x01.",
    "BUILD of a class": _OS + b"}b.",
    "BUILD of other attributes": b"}X\x01\0\0\0a}sb}X\x03\0\0\0foo}sb.",
    "PERSID": b"P0\n.",
    "text persistent id": b"X\x01\0\0\0aQ.",
    "persistent id of another class": b"(X\x07\0\0\0storage"
    + _OS
    + b"X\x01\0\0\x000X\0\0\0\0K\1tQ.",
    "OrderedDict of something": b"ccollections\nOrderedDict\n](]ee\x85R.",
    "tensor of no storage": b"ctorch._utils\n_rebuild_tensor_v2\n(K\1K\0)" + b")\x89}tR.",
}


@pytest.mark.parametrize("raw", _CALLS.values(), ids=_CALLS)
def test_no_opcode_calls_anything(raw):
    with pytest.raises(UnknownPickle):
        read_pickle(b"\x80\x02" + raw)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b".",
        b"(.",
        b"X\xff\xff\xff\xffa.",
        b"X\x01\0\0\0\xff.",
        b"h\x05.",
        b"t.",
        b"]K\1K\2s.",
        b"}K\1e.",
        b"}(K\1u.",
        b"\x8a\xff.",
        b"cno end",
        b"G12.",
        b"K\1K\2a.",
    ],
)
def test_damaged_pickle_is_refused(raw):
    with pytest.raises(UnknownPickle, match=r"damaged|no dict"):
        read_pickle(b"\x80\x02" + raw)


def test_dict_in_itself_ends(header_of):
    inside = b"\x80\x02}q\0X\x0a\0\0\0state_dicth\0s."
    with pytest.raises(PickleUnread, match="'state_dict' is no tensor"):
        header_of(archive([("a/data.pkl", inside)]), "model.ckpt")


def test_tuples_in_tuples_take_no_time_as_keys():
    raw = b")q\0"
    for index in range(60):
        raw += b"h%ch%c\x86q%c" % (index, index, index + 1)
    with pytest.raises(UnknownPickle, match="keys are no texts"):
        read_pickle(b"\x80\x02" + raw + b"}h\x3cK\1s.")


def test_numbers_of_one_hash_are_no_keys():
    keys = b"".join(pickle.dumps(n * ((1 << 61) - 1), 2)[2:-1] + b"N" for n in range(1, 99))
    with pytest.raises(UnknownPickle, match="keys are no texts"):
        read_pickle(b"\x80\x02}(" + keys + b"u.")


def text(of):
    """Return the opcode that puts a text on the stack."""
    return b"X" + struct.pack("<I", len(of)) + of


def test_error_names_the_beginning_of_a_long_name(header_of):
    name = text(b"n" * 100_000)
    for inside in (
        b"}(" + name + b"N" + name + b"Nu.",
        b"}}" + name + b"Nsb.",
        b"}" + name + FOUR_FLOATS + b"s.",
    ):
        with pytest.raises(PickleUnread) as caught:
            header_of(archive([("a/data.pkl", b"\x80\x02" + inside)]))
        assert "nnn" in caught.value.why
        assert len(str(caught.value)) < 1000


def tensor_over(storage, offset, shape, strides):
    """Return the opcodes that make a tensor over a storage."""
    sizes = b"".join(pickle.dumps(each, 2)[2:-1] for each in (offset, shape, strides))
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + sizes + b"\x89)tR"


def storage_of(kind, count):
    """Return the opcodes that describe the storage 0."""
    return b"(X\x07\0\0\0storagectorch\n%s\nX\x01\0\0\x000X\x03\0\0\0cpuK%ctQ" % (kind, count)


FOUR_FLOATS = tensor_over(storage_of(b"FloatStorage", 4), 0, (4,), (1,))


def test_storage_of_two_dtypes_is_refused():
    halves = tensor_over(storage_of(b"HalfStorage", 8), 0, (8,), (1,))
    with pytest.raises(UnknownPickle, match="storage '0' in two ways"):
        read_pickle(b"\x80\x02}(" + text(b"a") + FOUR_FLOATS + text(b"b") + halves + b"u.")


def described(offset, shape, strides):
    """Return the pickle of a dict with a tensor over a storage of four floats."""
    tensor = tensor_over(storage_of(b"FloatStorage", 4), offset, shape, strides)
    return b"\x80\x02}X\x01\0\0\0a" + tensor + b"s."


@pytest.mark.parametrize(
    ("offset", "shape", "strides"),
    [
        (0, (1 << 61, 1 << 61), (1 << 61, 1)),
        (1 << 60, (1,), (1,)),
        (1, (4,), (1,)),
        (-1, (1,), (1,)),
        (0, (-1,), (1,)),
        (0, (5,), (1,)),
        (0, (2, 2), (2,)),
        (0, (1,) * 65, (1,) * 65),
        (0, "ab", (1, 1)),
        (0, (0, 1 << 31, 1 << 31), (1 << 62, 1 << 31, 1)),
    ],
)
def test_absurd_sizes_are_refused(offset, shape, strides):
    assert read_pickle(described(1, (1, 3), (3, 1)))["a"].nbytes == 12
    with pytest.raises(UnknownPickle):
        read_pickle(described(offset, shape, strides))
