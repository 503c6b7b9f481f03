"""What the header of a checkpoint file says, in whatever format the file is."""

import msgspec


class TensorSpec(msgspec.Struct, frozen=True, gc=False):
    """Where one tensor's bytes lie in its file, and what they are."""

    name: str
    dtype: str
    """Safetensors name, such as `BF16`."""
    shape: tuple[int, ...]
    begin: int
    """Offset of the first byte from `Header.data_offset`, in bytes."""
    end: int
    """Offset behind the last byte, in bytes."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.end - self.begin


class Header(msgspec.Struct, frozen=True, kw_only=True, weakref=True):
    """A parsed header.

    Its format's reader has checked it: every tensor lies inside the file and has as many bytes as
    its dtype and shape say. Tensors may come in any order, with gaps between them, and may share
    bytes, unless the format is stricter.
    """

    tensors: tuple[TensorSpec, ...]
    metadata: dict[str, str] | None
    """What the file says beside its tensors; None if it has no place for that."""
    data_offset: int
    """What tensors' offsets count from, in bytes of the file."""
    is_unpickled: bool = False
    """Whether offsets are those of a file that torch unpickles this one to (`_loading.unpacking`).
    """

    @property
    def data_nbytes(self) -> int:
        """Size of all tensors together, in bytes."""
        return sum(tensor.end - tensor.begin for tensor in self.tensors)
