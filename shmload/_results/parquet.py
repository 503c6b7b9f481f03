"""Results files in the Parquet format, by pyarrow.

A row for each item that has a result, in item order. The column `key` has its key; each array has a
column of its name, a struct of `dtype` (torch's name), `shape` and `data`, the array's bytes.
Parquet has no bfloat16 and no arrays of several dimensions, so the bytes are stored as they are.
The metadata of the schema describes the file, as `describe` says; errors are there and nowhere
else. Nothing is compressed. The items, the facts and pyarrow's version decide every byte.
"""

import bisect
import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

from shmload._checkpoints.dtypes import TORCH_NAMES
from shmload._host.files import plain_only, replacing
from shmload._results.format import (
    AGAIN,
    Contents,
    Item,
    Path,
    Place,
    ResultsFormat,
    Stored,
    describe,
    import_library,
    read_description,
)
from shmload._wording import format_nbytes
from shmload.errors import ArgumentError, ResultsCorrupt

_KEY = "key"
# To read one item, its row group is read: small enough for that, large enough for pyarrow.
_GROUP_NBYTES = 1 << 20
# A value, its page's header included, must stay below 2 GiB.
_MAX_ARRAY_NBYTES = (1 << 31) - (1 << 20)
# Of the metadata; pyarrow's own limit, 100 MB, is less than the keys may take in base64.
_MAX_TEXT_NBYTES = 1 << 29
_SAFETENSORS_NAMES = {name: dtype for dtype, name in TORCH_NAMES.items()}


class ParquetFile:
    """An open results file; owns its descriptor.

    `Place.offset` is the array's row, multiplied by the number of arrays' names, plus its name's
    number.

    Args:
        path: of the file.

    Raises:
        ResultsCorrupt: it is no Parquet file.
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        parquet = import_library("pyarrow.parquet", "parquet")
        self.path = path
        self._file = open(path, "rb", opener=plain_only)  # noqa: SIM115 closed by __exit__
        try:
            with _reading(path):
                self._parquet = parquet.ParquetFile(
                    self._file,
                    pre_buffer=False,
                    thrift_string_size_limit=_MAX_TEXT_NBYTES,
                )
                self._names = [name for name in self._parquet.schema_arrow.names if name != _KEY]
                groups = map(self._parquet.metadata.row_group, range(self._parquet.num_row_groups))
                self._first_rows = [0, *itertools.accumulate(group.num_rows for group in groups)]
        except BaseException:
            self._file.close()
            raise
        self._read: tuple[int, dict[str, Any]] = (-1, {})
        """The row group read last, and its columns that were needed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._file.close()

    def contents(self) -> Contents:
        """See `ResultsFile`."""
        with _reading(self.path):
            texts = self._parquet.schema_arrow.metadata or {}
            return read_description({name.decode(): text.decode() for name, text in texts.items()})

    def items(self) -> list[Item]:
        """See `ResultsFile`."""
        contents = self.contents()
        parts = [f"{name}.{part}" for name in self._names for part in ("dtype", "shape")]
        with _reading(self.path):
            table = self._parquet.read(columns=[_KEY, *parts], use_threads=False)
            rows = enumerate(table.to_pylist())
            found = []
            for index, key in enumerate(contents.keys, contents.first):
                if index in contents.errors:
                    found.append(Item(key, error=contents.errors[index]))
                    continue
                number, row = next(rows, (-1, {_KEY: None}))
                if row[_KEY] != key:
                    raise ValueError(f"it has no row for {key!r}")
                found.append(Item(key, arrays=self._places(number, row)))
            if next(rows, None):
                raise ValueError("it has more rows than items")
        return found

    def read(self, place: Place) -> bytes:
        """See `Source`."""
        row, number = divmod(place.offset, len(self._names))
        name = self._names[number]
        with _reading(self.path):
            group = bisect.bisect_right(self._first_rows, row) - 1
            if self._read[0] != group:
                self._read = (group, {})
            columns = self._read[1]
            if name not in columns:
                table = self._parquet.read_row_group(
                    group, columns=[f"{name}.data"], use_threads=False
                )
                columns[name] = table.column(name).combine_chunks().field("data")
            data = columns[name][row - self._first_rows[group]].as_buffer()
        if len(data) != place.nbytes:
            raise ResultsCorrupt(self.path, f"an array has {len(data)} bytes", AGAIN)
        return bytes(data)

    def _places(self, number: int, row: Mapping[str, Any]) -> dict[str, Place]:
        """Return where the arrays of a row are, in the order of their names."""
        return {
            name: Place(
                _SAFETENSORS_NAMES.get(row[name]["dtype"], row[name]["dtype"]),
                tuple(row[name]["shape"]),
                offset,
            )
            for offset, name in enumerate(self._names, number * len(self._names))
            if row[name] is not None
        }


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raise what pyarrow says of a file's content as `ResultsCorrupt`."""
    try:
        yield
    except (KeyError, ValueError, TypeError) as exc:  # pyarrow's own are among them
        raise ResultsCorrupt(path, str(exc), AGAIN) from exc
    except OSError as exc:
        if exc.errno is not None:
            raise
        raise ResultsCorrupt(path, str(exc), AGAIN) from exc  # pyarrow's decoder


def _write(path: Path, first: int, stored: Sequence[Stored], facts: Mapping[str, str]) -> None:
    parquet = import_library("pyarrow.parquet", "parquet")
    import pyarrow

    array_type = pyarrow.struct(
        [
            ("dtype", pyarrow.string()),
            ("shape", pyarrow.list_(pyarrow.int64())),
            ("data", pyarrow.large_binary()),
        ]
    )
    names = sorted({name for item, _ in stored for name in item.arrays or ()})
    schema = pyarrow.schema(
        [(_KEY, pyarrow.string()), *((name, array_type) for name in names)],
        metadata=describe(first, [item for item, _ in stored], facts),
    )
    options = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    with (
        replacing(path, durable=True) as file,
        parquet.ParquetWriter(file, schema, **options) as writer,
    ):
        for rows in _groups(stored):
            writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))


def _groups(stored: Sequence[Stored]) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of each row group."""
    rows: list[dict[str, Any]] = []
    nbytes = 0
    for item, source in stored:
        if item.error is not None:
            continue
        row: dict[str, Any] = {_KEY: item.key}
        for name, place in (item.arrays or {}).items():
            dtype = TORCH_NAMES.get(place.dtype, place.dtype)
            data = bytes(source.read(place))
            row[name] = {"dtype": dtype, "shape": place.shape, "data": data}
            nbytes += len(data)
        rows.append(row)
        if nbytes >= _GROUP_NBYTES:
            yield rows
            rows, nbytes = [], 0
    if rows:
        yield rows


def _check_item(index: int, item: Item) -> None:
    """Raise ArgumentError if an array cannot stand in a Parquet file."""
    for name, place in (item.arrays or {}).items():
        if name == _KEY:
            raise ArgumentError(
                f"item {index} has an array {_KEY!r}, which is the column of the items' keys "
                "in a Parquet file; give it another name"
            )
        if place.nbytes > _MAX_ARRAY_NBYTES:
            raise ArgumentError(
                f"item {index}: the array {name!r} has {format_nbytes(place.nbytes)}, "
                "more than a value in a Parquet file can have; use another format"
            )


PARQUET = ResultsFormat(
    name="parquet",
    version="parquet 1",
    suffix=".parquet",
    library="pyarrow",
    check_item=_check_item,
    write=_write,
    open=ParquetFile,
)
