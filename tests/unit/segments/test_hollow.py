"""A stand-in for a segment tells whether its zeros were read for weights."""

import contextlib
import mmap

from shmload._checkpoints.formats.safetensors import SAFETENSORS, build_header
from shmload._checkpoints.header import TensorSpec
from shmload._host.memory import PAGE_NBYTES
from shmload._segments.layout import lay_out
from shmload._segments.metadata import Metadata
from shmload._segments.part import Hollow

_NBYTES = 40 * PAGE_NBYTES


def test_first_bytes_of_tensors_are_no_read(tmp_path):
    specs = (
        TensorSpec("a", "F32", (_NBYTES // 4,), 0, _NBYTES),
        TensorSpec("b", "F32", (_NBYTES // 4,), _NBYTES, 2 * _NBYTES),
    )
    path = tmp_path / "model.safetensors"
    path.write_bytes(build_header(specs, {}, PAGE_NBYTES))
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size + 2 * _NBYTES)
        layout = lay_out(
            SAFETENSORS.read_header(file.fileno(), path), lambda t: t.dtype, Metadata()
        )
    with contextlib.closing(Hollow("stand-in")) as hollow:
        hollow.prepare(layout)
        assert not hollow.was_read
        with mmap.mmap(hollow.fd, 0, access=mmap.ACCESS_COPY) as mapped:
            data = len(layout.header)
            mapped[data], mapped[data + _NBYTES]
            assert not hollow.was_read
            mapped[data + _NBYTES // 2]
            assert hollow.was_read
