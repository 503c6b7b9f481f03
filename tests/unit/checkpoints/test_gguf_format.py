"""Headers of GGUF files are those of the gguf package."""

import struct

import gguf
import numpy as np
import pytest
from gguf_files import KINDS, front, random_blocks

from shmload._checkpoints.dtypes import BLOCKS
from shmload._checkpoints.formats.described import Unread
from shmload._checkpoints.formats.gguf import describe
from shmload._checkpoints.header import TensorSpec, wrong_in


def test_file_of_the_package_is_read_as_by_the_package(tmp_path):
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "flux")
    writer.add_description("a description")
    writer.add_array("texts", ["a", "", "bcd"])
    writer.add_custom_alignment(64)
    writer.add_tensor("plain", np.arange(35, dtype=np.float32).reshape(5, 7))
    writer.add_tensor("half", np.ones((3, 2, 2), np.float16))
    writer.add_tensor("alone", np.float32([4]))
    for kind in BLOCKS:
        writer.add_tensor(f"blocks.{kind}", random_blocks(kind, (3, 512)), raw_dtype=KINDS[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found, whole = list(describe(str(path))), path.read_bytes()
    wanted = gguf.GGUFReader(path).tensors
    assert [spec.name for spec in found] == [each.name for each in wanted]
    for spec, each in zip(found, wanted, strict=True):
        assert spec.shape == tuple(map(int, reversed(each.shape)))
        assert whole[spec.begin : spec.end] == each.data.tobytes()
        assert wrong_in(spec) == ""


@pytest.mark.parametrize(
    ("raw", "error", "message"),
    [
        (b"GGML" + front(1)[4:] + bytes(99), ValueError, "magic"),
        (
            b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(99),
            Unread,
            "big-endian: convert it with `gguf-convert-endian`",
        ),
    ],
)
def test_bad_file_is_refused(tmp_path, raw, error, message):
    path = tmp_path / "model.gguf"
    path.write_bytes(raw)
    with pytest.raises(error, match=message):
        list(describe(str(path)))


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes", "why"),
    [
        ("Q4_0", (2, 48), 54, "not one of whole Q4_0 blocks"),
        ("Q4_0", (), 18, "not one of whole Q4_0 blocks"),
        ("F32", (3,), 8, "does not have 8 bytes"),
        ("Q9_9", (3,), 8, "unknown dtype"),
        ("F32", (1,) * 65, 4, "has 65 dimensions"),
        ("F32", (0, 1 << 40, 1 << 40), 0, "has the shape"),
    ],
)
def test_tensor_that_cannot_be_is_found(dtype, shape, nbytes, why):
    assert why in wrong_in(TensorSpec("a", dtype, shape, 0, nbytes))
    assert wrong_in(TensorSpec("__metadata__", "F32", (1,), 0, 4))
