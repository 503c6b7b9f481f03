"""Reads the pickle in which `torch.save` describes the tensors of a state dict, and runs nothing.

Only the opcodes are known that such a pickle has, and only a few of Python's names. Whatever else
occurs is an error that names it, so no file can make this call anything. The opcodes are those of
pickletools.py in CPython, protocol 2; the meaning of the persistent ids and of `_rebuild_tensor_v2`
and `_v3` is that of torch/serialization.py and torch/_utils.py.
"""

import itertools
import struct
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from shmload._checkpoints.dtypes import NBITS, TORCH_NAMES
from shmload._checkpoints.header import TensorSpec

# A whole pipeline in one file has its tensors under this key; diffusers looks there, too.
_NESTED = "state_dict"
_MAX_DEPTH = 4
# An IP-Adapter has two state dicts. Its loader in diffusers joins these names and those of the
# tensors with a dot, if the file is in safetensors.
_IP_ADAPTER = {"image_proj", "ip_adapter"}
# In a segment's header that name means something else.
_METADATA = "__metadata__"
# Letters of a name that an error repeats.
_MAX_SHOWN = 200


class UnknownPickle(Exception):
    """The pickle has something that is not read here."""


class NoTensors(UnknownPickle):
    """The pickle is damaged, or has what is no tensor with a name, whoever unpickles it."""


def shorten(name: object) -> str:
    """Return what an error shows of a name, which may have millions of letters."""
    return f"{name!r:.{_MAX_SHOWN}}"


def find_tensors(found: Any, kind: type, *, may_be_nested: bool) -> dict[str, Any]:
    """Return the tensors of a state dict by the names that they have in safetensors.

    Args:
        found: what the pickle has.
        kind: the class of tensors.
        may_be_nested: the file may have a whole pipeline, not one model alone.

    Raises:
        NoTensors: it is no dict, or something in it is no tensor with a name.
    """
    if not isinstance(found, dict):
        raise NoTensors("it holds no dict of tensors")
    tensors: dict[Any, Any] = found
    for _ in range(_MAX_DEPTH):  # a dict may be in itself
        if may_be_nested and isinstance(tensors.get(_NESTED), dict):
            tensors = tensors[_NESTED]
    if tensors.keys() == _IP_ADAPTER:
        parts = [_with_prefix(prefix, part) for prefix, part in tensors.items()]
        tensors = dict(itertools.chain.from_iterable(parts))
    for name, tensor in tensors.items():
        if not isinstance(name, str) or name == _METADATA or not isinstance(tensor, kind):
            raise NoTensors(f"its {shorten(name)} is no tensor with a name")
    return tensors


def _with_prefix(prefix: str, part: object) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a state dict in another, with the names that they have in one."""
    if not isinstance(part, dict) or not all(isinstance(name, str) for name in part):
        raise NoTensors(f"its {prefix!r} is no dict of tensors with names")
    for name, tensor in part.items():
        yield f"{prefix}.{name}", tensor


_MAX_RANK = 64
_MAX_SIZE = 1 << 62
# Larger ones may all have one hash: it is that of the remainder by 2**61 - 1.
_MAX_KEY = 1 << 60
_PROTOCOL = 2
_BY_TORCH_NAME = {name: dtype for dtype, name in TORCH_NAMES.items()}
_BY_STORAGE = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
    "ComplexFloatStorage": "C64",
}
_ORDERED_DICT = "collections.OrderedDict"
_V2, _V3 = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"
_PARAMETER = "torch._utils._rebuild_parameter"
_UNTYPED = "torch.storage.UntypedStorage"
# Of no others does torch's restricted unpickler know a name.
_KNOWN_TO_TORCH = ("torch", "collections", "_codecs")
# In a pickle of protocol 2 they have the names of Python 2.
_BUILTINS_OF_TORCH = ("bytearray", "complex", "set")
_MARK = object()


class Storage(msgspec.Struct, frozen=True, gc=False):
    """A storage that tensors refer to."""

    dtype: str
    """Safetensors name; empty if each tensor has its own."""
    key: str
    """Name of the archive's member that has its bytes."""
    count: int
    """Elements; bytes where `dtype` is empty."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.count * NBITS[self.dtype] // 8 if self.dtype else self.count


class StoredTensor(msgspec.Struct, frozen=True, gc=False):
    """A tensor in a storage; its elements lie next to each other."""

    storage: Storage
    dtype: str
    shape: tuple[int, ...]
    begin: int
    """Offset of its first byte in the storage, in bytes."""
    nbytes: int

    def placed(self, name: str, base: int) -> TensorSpec:
        """Return its place in a file whose storage starts at an offset."""
        first = base + self.begin
        return TensorSpec(name, self.dtype, self.shape, first, first + self.nbytes)


class _Global(msgspec.Struct, frozen=True, gc=False):
    name: str


def read_pickle(raw: bytes) -> dict[str, Any]:
    """Return the dict that a pickle has, with a `StoredTensor` for each tensor.

    Raises:
        NoTensors: it is damaged or no dict, or names what torch's unpickler does not know either.
        UnknownPickle: it has anything else than tensors, texts, numbers, lists and dicts of these;
            or a tensor that is transposed or leaves its storage.
    """
    machine = _Machine(raw)
    try:
        found = machine.run()
    except (IndexError, TypeError, ValueError, KeyError, struct.error) as exc:
        # A stack that is empty, an operand of another kind, a text that is not UTF-8.
        raise NoTensors(f"its pickle is damaged at byte {machine.position}") from exc
    if not isinstance(found, dict):
        raise NoTensors("it holds no dict of tensors")
    return found


class _Machine:
    """The stack machine of a pickle."""

    def __init__(self, raw: bytes) -> None:
        self.position = 0
        self._raw = raw
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._storages: dict[str, Storage] = {}

    def run(self) -> Any:
        raw, operations = self._raw, _OPERATIONS
        while True:
            code = raw[self.position]
            self.position += 1
            if code == _STOP:
                return self._stack.pop()
            operation = operations.get(code)
            if operation is None:
                raise UnknownPickle(f"its pickle has the opcode 0x{code:02x}")
            operation(self)

    def _take(self, nbytes: int) -> bytes:
        begin, self.position = self.position, self.position + nbytes
        if self.position > len(self._raw):
            raise IndexError
        return self._raw[begin : self.position]

    def _unsigned(self, nbytes: int) -> int:
        return int.from_bytes(self._take(nbytes), "little")

    def _line(self) -> str:
        end = self._raw.index(b"\n", self.position)
        return self._take(end + 1 - self.position)[:-1].decode()

    def _pop_mark(self) -> list[Any]:
        index = len(self._stack) - 1
        while self._stack[index] is not _MARK:
            index -= 1
            if index < 0:
                raise IndexError
        items = self._stack[index + 1 :]
        del self._stack[index:]
        return items

    # Values ---------------------------------------------------------------------------------------

    def protocol(self) -> None:
        found = self._unsigned(1)
        if found != _PROTOCOL:
            raise NoTensors(f"its pickle has protocol {found}")

    def mark(self) -> None:
        self._stack.append(_MARK)

    def text(self) -> None:
        self._stack.append(self._take(self._unsigned(4)).decode())

    def byte(self) -> None:
        self._stack.append(self._unsigned(1))

    def short(self) -> None:
        self._stack.append(self._unsigned(2))

    def integer(self) -> None:
        self._stack.append(int.from_bytes(self._take(4), "little", signed=True))

    def long(self) -> None:
        self._stack.append(int.from_bytes(self._take(self._unsigned(1)), "little", signed=True))

    def double(self) -> None:
        self._stack.append(struct.unpack(">d", self._take(8))[0])

    def put(self) -> None:
        self._memo[self._unsigned(1)] = self._stack[-1]

    def long_put(self) -> None:
        self._memo[self._unsigned(4)] = self._stack[-1]

    def get(self) -> None:
        self._stack.append(self._memo[self._unsigned(1)])

    def long_get(self) -> None:
        self._stack.append(self._memo[self._unsigned(4)])

    def name(self) -> None:
        self._stack.append(_Global(f"{self._line()}.{self._line()}"))

    # Containers -----------------------------------------------------------------------------------

    def tuple(self) -> None:
        self._stack.append(tuple(self._pop_mark()))

    def append(self) -> None:
        self._extend([self._stack.pop()])

    def appends(self) -> None:
        self._extend(self._pop_mark())

    def set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._update([key, value])

    def set_items(self) -> None:
        self._update(self._pop_mark())

    def _extend(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, list):
            raise TypeError
        target += items

    def _update(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, dict):
            raise TypeError
        for key, value in zip(items[::2], items[1::2], strict=True):
            # The hashes of others may take for ever, or be equal so that each look-up does.
            if not (isinstance(key, str) or (isinstance(key, int) and abs(key) < _MAX_KEY)):
                raise UnknownPickle("its pickle has a dict whose keys are no texts")
            if key in target:
                raise UnknownPickle(f"it has {shorten(key)} twice")
            target[key] = value

    # Tensors --------------------------------------------------------------------------------------

    def persistent(self) -> None:
        kind, storage, key, _, count = self._stack.pop()
        if kind != "storage" or not isinstance(key, str) or not isinstance(storage, _Global):
            raise TypeError
        module, _, name = storage.name.rpartition(".")
        dtype = "" if storage.name == _UNTYPED else _BY_STORAGE.get(name)
        if dtype is None or module not in ("torch", "torch.storage"):
            raise _refuse_name(storage)
        found = Storage(dtype, key, _size(count))
        # torch takes what it meets first.
        if self._storages.setdefault(key, found) != found:
            raise UnknownPickle(f"it describes the storage {shorten(key)} in two ways")
        self._stack.append(found)

    def call(self) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        if not isinstance(function, _Global):
            raise TypeError
        if function.name == _ORDERED_DICT and arguments == ():
            self._stack.append({})
        elif function.name in (_V2, _V3):
            self._stack.append(_rebuild(function.name, arguments))
        elif function.name == _PARAMETER:
            self._stack.append(_unwrapped(arguments))
        else:
            raise _refuse_name(function)

    def build(self) -> None:
        # A state dict has the versions of its modules as an attribute, and no other.
        state = self._stack.pop()
        if not (isinstance(state, dict) and isinstance(self._stack[-1], dict)):
            raise TypeError
        if state.keys() - {"_metadata"}:
            raise UnknownPickle(f"its dict has the attributes {shorten([*state])}")


def _rebuild(function: str, arguments: Any) -> StoredTensor:
    """Return the tensor that torch's function of that name would make."""
    # Whether it needs a gradient is the model's business, as of a tensor in safetensors.
    storage, offset, shape, strides, needs_grad, hooks, *others = arguments
    if not isinstance(storage, Storage):
        raise TypeError
    dtype = _dtype(others.pop(0)) if function == _V3 else storage.dtype
    if hooks or any(others) or not dtype:
        raise UnknownPickle("it has a tensor with hooks or attributes")
    _require_fit(needs_grad, dtype)
    shape = tuple(map(_size, shape))
    count = _count(shape, strides, NBITS[dtype])
    begin, nbytes = _size(offset) * NBITS[dtype] // 8, count * NBITS[dtype] // 8
    if not count:
        begin = 0
    elif begin + nbytes > storage.nbytes:
        raise NoTensors("it has a tensor that is larger than its storage")
    return StoredTensor(storage, dtype, shape, begin, nbytes)


def _count(shape: tuple[int, ...], strides: Any, nbits: int) -> int:
    """Return how many elements a tensor has, which must lie next to each other."""
    if len(shape) > _MAX_RANK or len(strides) != len(shape):
        raise ValueError
    count, is_dense, widest = 1, True, 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        is_dense &= size == 1 or stride == count
        count *= size
        widest *= max(1, size)
    if widest * nbits // 8 > _MAX_SIZE:  # also without elements: torch computes the strides
        raise ValueError
    if count and not is_dense:
        raise UnknownPickle("it has a tensor whose elements do not lie next to each other")
    return count


def _unwrapped(arguments: Any) -> StoredTensor:
    """Return the tensor that a parameter consists of."""
    tensor, needs_grad, hooks = arguments
    if not isinstance(tensor, StoredTensor):
        raise TypeError
    if hooks:
        raise UnknownPickle("it has a parameter with hooks")
    _require_fit(needs_grad, tensor.dtype)
    return tensor


def _require_fit(needs_grad: Any, dtype: str) -> None:
    """Refuse what torch refuses: a gradient of integers."""
    if type(needs_grad) is not bool:
        raise TypeError
    if needs_grad and not dtype.startswith(("F", "BF", "C")):
        raise NoTensors(f"it has a tensor of {dtype} that needs a gradient")


def _dtype(found: Any) -> str:
    dtype = (
        _BY_TORCH_NAME.get(found.name.removeprefix("torch.")) if type(found) is _Global else None
    )
    if dtype is None or NBITS[dtype] < 8:
        raise _refuse_name(found)
    return dtype


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MAX_SIZE:
        raise ValueError
    return value


def _refuse_name(found: Any) -> UnknownPickle:
    if type(found) is not _Global:
        raise TypeError
    module, _, name = found.name.partition(".")
    is_builtin = module in ("__builtin__", "builtins") and name in _BUILTINS_OF_TORCH
    kind = UnknownPickle if is_builtin or module in _KNOWN_TO_TORCH else NoTensors
    return kind(f"its pickle names {shorten(found.name)[1:-1]}")


def _push(make: Callable[[], Any]) -> Callable[[_Machine], None]:
    return lambda machine: machine._stack.append(make())


def _push_tuple(count: int) -> Callable[[_Machine], None]:
    def operation(machine: _Machine) -> None:
        stack = machine._stack
        if len(stack) < count:
            raise IndexError
        items = tuple(stack[-count:])
        del stack[-count:]
        stack.append(items)

    return operation


_STOP = ord(".")
_OPERATIONS: dict[int, Callable[[_Machine], None]] = {
    0x80: _Machine.protocol,
    ord("("): _Machine.mark,
    ord("X"): _Machine.text,
    ord("K"): _Machine.byte,
    ord("M"): _Machine.short,
    ord("J"): _Machine.integer,
    0x8A: _Machine.long,
    ord("G"): _Machine.double,
    ord("N"): _push(lambda: None),
    0x88: _push(lambda: True),
    0x89: _push(lambda: False),
    ord("q"): _Machine.put,
    ord("r"): _Machine.long_put,
    ord("h"): _Machine.get,
    ord("j"): _Machine.long_get,
    ord("c"): _Machine.name,
    ord(")"): _push(tuple),
    ord("]"): _push(list),
    ord("}"): _push(dict),
    ord("t"): _Machine.tuple,
    0x85: _push_tuple(1),
    0x86: _push_tuple(2),
    0x87: _push_tuple(3),
    ord("a"): _Machine.append,
    ord("e"): _Machine.appends,
    ord("s"): _Machine.set_item,
    ord("u"): _Machine.set_items,
    ord("Q"): _Machine.persistent,
    ord("R"): _Machine.call,
    ord("b"): _Machine.build,
}
