"""Shards: the unit in which a folder of results is computed, written and taken up again.

    shard-00000.safetensors  the arrays of its items that have a result
    shard-00000.json         the keys of its items, and the errors of those that failed

Guarantee: a shard counts once both files exist and the list is whole. The arrays are on the disk
before the list gets its name. The same results in the same order give the same bytes, with the same
versions of the libraries.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import msgspec

from shmload._host.files import replacing
from shmload._wording import encodable
from shmload.errors import JobError, ResultsError
from shmload.integrations.dataprep.crossing import bytes_of, describe_error, dump_whole

Arrays = Mapping[str, Any]
"""The result of an item: contiguous arrays by name, of dtypes that safetensors has."""

Stored = Sequence[tuple[int, str, Arrays]]
"""Items that have a result, in their order: number, key and arrays."""

_ERROR_LENGTH = 1000
_DTYPES = {
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz"),
}


class Row(NamedTuple):
    """An item that is to be computed."""

    number: int
    item: bytes
    """Pickled."""
    key: str = ""
    refusal: str = ""
    """Why it is given up; empty if it is not."""
    endings: tuple[str, ...] = ()
    """How processes have ended at it."""

    @classmethod
    def of(cls, number: int, item: object, key: str = "") -> Self:
        """Return the row of an item, which is given up if it cannot be pickled."""
        try:
            return cls(number, dump_whole(item), key)
        except Exception as exc:
            refusal = f"it cannot be sent to another process: {describe_error(exc)}"
            return cls(number, b"", key, refusal)


class Listed(msgspec.Struct):
    """What the list of a shard has."""

    keys: list[str]
    """The keys of its items, in their order."""
    errors: dict[str, str]
    """Why items failed, by their keys."""


class Task(NamedTuple):
    """Items whose results are returned, or written as a shard."""

    rows: list[Row]
    """In the order in which they are computed."""
    path: str = ""
    """The path of the shard's files, without their suffixes; empty if results are returned."""
    format: str = ""
    """The format of the shard."""


def write_shard(task: Task, call: Callable[[Row], Any]) -> dict[str, str]:
    """Compute and write a shard; return the errors of its items that failed, by key.

    Args:
        task: the shard.
        call: computes an item.

    Raises:
        ResultsError: the file system refuses the files.
        Exception: the format's library refuses the results.
    """
    results: dict[int, Arrays] = {}
    errors: dict[int, str] = {}
    for row in task.rows:
        try:
            results[row.number] = arrays_of(call(row))
        except (Exception, SystemExit) as exc:
            errors[row.number] = encodable(describe_error(exc))[:_ERROR_LENGTH]
    rows = sorted(task.rows)
    failed = {row.key: errors[row.number] for row in rows if row.number in errors}
    stored = [(row.number, row.key, results[row.number]) for row in rows if row.number in results]
    suffix, _, write = FORMATS[task.format]

    # Durable, since the list may count without it.
    write_whole(task.path + suffix, lambda file: write(file, stored), durable=True)
    listed = Listed([row.key for row in rows], failed)
    write_whole(task.path + ".json", lambda file: file.write(msgspec.json.encode(listed)))
    return failed


def write_whole(
    path: str | Path, write: Callable[[BinaryIO], object], *, durable: bool = False
) -> None:
    """Write a file whole or not at all.

    Args:
        path: of the file.
        write: writes its content.
        durable: return once it survives a loss of power.

    Raises:
        ResultsError: the file system refuses it.
    """
    with refusing(path), replacing(path, durable=durable) as file:
        write(file)


@contextlib.contextmanager
def refusing(path: str | Path) -> Iterator[None]:
    """Raise a `ResultsError` about a file of results, or their folder, if the file system refuses.

    Args:
        path: of the file or folder.
    """
    try:
        yield
    except ResultsError:  # an OSError, too
        raise
    except OSError as exc:
        raise refused(path, exc) from exc


def results_error(path: str | Path, reason: str) -> ResultsError:
    """Return the error of a folder of results, or of a file in it."""
    return ResultsError(f"{path} {reason}", folder=str(path))


def refused(path: str | Path, error: Exception) -> ResultsError:
    """Return the error of a file of results that cannot be written or read."""
    why = getattr(error, "strerror", None) or error
    remedy = "see to its disk and permissions, then run the job again: it does what is missing"
    return results_error(path, f"cannot be written or read: {why}; {remedy}")


def arrays_of(result: Any) -> Arrays:
    """Return what a job's function has returned as arrays.

    Args:
        result: a dict of tensors or numpy arrays by name.

    Raises:
        TypeError: it is something else, or has a name or dtype that cannot be stored.
    """
    if not isinstance(result, Mapping):
        raise TypeError(
            f"the function returned a {type(result).__name__}; give tensors or arrays in a dict"
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
    cell = pa.struct({"dtype": pa.string(), "shape": pa.list_(pa.int64()), "data": pa.binary()})
    columns = {name: cell for _, _, arrays in items for name in arrays}
    if "key" in columns:
        raise JobError("no array may be called 'key', which is the column of the keys")

    def cell_of(array: Any) -> dict[str, Any]:
        return {"dtype": array.dtype.name, "shape": array.shape, "data": array.tobytes()}

    rows = [
        {"key": key} | {name: cell_of(array) for name, array in arrays.items()}
        for _, key, arrays in items
    ]
    schema = pa.schema({"key": pa.string()} | dict(sorted(columns.items())))
    parquet.write_table(pa.Table.from_pylist(rows, schema), file, compression="none")


def _write_webdataset(file: BinaryIO, items: Stored) -> None:
    from safetensors.numpy import save
    from webdataset import TarWriter

    with TarWriter(file, encoder=False, mtime=0, user="", group="") as writer:
        for number, key, arrays in items:
            # webdataset ends a sample's own key at its first dot, so that is the number.
            sample = {"json": msgspec.json.encode({"key": key}), "safetensors": save(dict(arrays))}
            writer.write({"__key__": f"{number:08}"} | sample)


FORMATS = {
    "safetensors": (".safetensors", "safetensors", _write_safetensors),
    "parquet": (".parquet", "pyarrow", _write_parquet),
    "webdataset": (".tar", "webdataset", _write_webdataset),
}
"""The formats by name: the suffix of a shard, the library that writes it, and how."""
