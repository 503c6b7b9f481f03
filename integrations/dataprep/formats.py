"""Results as arrays, and the files of a shard as other tools read them.

Guarantee: the same results in the same order give the same bytes, with the same versions of the
libraries.
"""

import importlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from shmload.errors import ArgumentError
from shmload.errors.sources import needing
from shmload.integrations.dataprep.crossing import bytes_of

if TYPE_CHECKING:
    import numpy as np

Arrays = Mapping[str, "np.ndarray[Any, Any]"]
"""The result of an item: contiguous arrays by name, of dtypes that safetensors has."""

Stored = Sequence[tuple[int, str, Arrays]]
"""Items that have a result, in their order: number, key and arrays."""

_DTYPES = {
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz"),
}


def arrays_of(result: Any) -> Arrays:
    """Return what a job's function has returned as arrays.

    Args:
        result: a dict of tensors or numpy arrays by name.

    Raises:
        TypeError: it is something else, or has a name or dtype that cannot be stored.
    """
    if not isinstance(result, Mapping):
        raise TypeError(
            f"the function returned a {type(result).__name__}; to be stored, a result must be a "
            "dict of tensors or arrays by name"
        )
    return {name: _array_of(name, result[name]) for name in sorted(result)}


def _array_of(name: Any, value: Any) -> Any:
    import ml_dtypes  # makes numpy know bfloat16 and the float8 kinds
    import numpy as np

    if not isinstance(name, str) or not name or "/" in name:
        raise TypeError(f"{name!r} cannot be the name of an array; give text without a slash")
    dtype = str(getattr(value, "dtype", None)).removeprefix("torch.")
    torch = sys.modules.get("torch")  # without it there are no tensors
    is_tensor = torch is not None and isinstance(value, torch.Tensor)
    if dtype not in _DTYPES or (is_tensor and str(value.layout) != "torch.strided"):
        raise TypeError(
            f"{name!r} is a {type(value).__name__} of {dtype}; it must be a dense tensor or a "
            "numpy array of a dtype that safetensors has"
        )
    if is_tensor:
        content = bytes_of(value).view(getattr(ml_dtypes, dtype, dtype))
        return content.reshape(tuple(value.shape))
    return np.ascontiguousarray(value).reshape(value.shape)


def _write_safetensors(file: BinaryIO, items: Stored) -> None:
    from safetensors.numpy import save

    named = {f"{key}/{name}": array for _, key, arrays in items for name, array in arrays.items()}
    file.write(save(named))


def _write_parquet(file: BinaryIO, items: Stored) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    # Parquet has neither bfloat16 nor several dimensions, so an array is its bytes.
    kind = pa.struct({"dtype": pa.string(), "shape": pa.list_(pa.int64()), "data": pa.binary()})
    columns = {"key": pa.array([key for _, key, _ in items], pa.string())}
    for name in sorted({name for _, _, arrays in items for name in arrays}):
        if name in columns:
            raise ValueError("no array may be called 'key', which is the column of the keys")
        found = [arrays.get(name) for _, _, arrays in items]
        cells = [
            array is not None
            and {"dtype": array.dtype.name, "shape": array.shape, "data": array.tobytes()}
            for array in found
        ]
        columns[name] = pa.array([cell or None for cell in cells], kind)
    parquet.write_table(pa.table(columns), file, compression="none")


def _write_webdataset(file: BinaryIO, items: Stored) -> None:
    from safetensors.numpy import save
    from webdataset import TarWriter

    with TarWriter(file, encoder=False, mtime=0, user="", group="") as writer:
        for number, key, arrays in items:
            # webdataset ends a sample's own key at its first dot, so that is the number.
            sample = {"json": json.dumps({"key": key}).encode(), "safetensors": save(dict(arrays))}
            writer.write({"__key__": f"{number:08}"} | sample)


class Format(NamedTuple):
    """How a shard is written."""

    suffix: str
    library: str
    """The module that writes it."""
    write: Callable[[BinaryIO, Stored], object]


FORMATS = {
    "safetensors": Format(".safetensors", "safetensors", _write_safetensors),
    "parquet": Format(".parquet", "pyarrow", _write_parquet),
    "webdataset": Format(".tar", "webdataset", _write_webdataset),
}
"""The formats by name."""


def require_format(name: str) -> None:
    """Check that there is such a format here.

    Raises:
        ArgumentError: there is none.
        LibraryMissing: its library is not installed.
    """
    if name not in FORMATS:
        raise ArgumentError(f"format is {name!r}; it must be one of {', '.join(FORMATS)}")
    library = FORMATS[name].library
    with needing(library, f"the format {name!r}", f"'shmload[{name}]'"):
        importlib.import_module(library)
