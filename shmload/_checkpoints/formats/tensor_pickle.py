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
    """The pickle is damaged, or holds other things than named tensors: torch cannot help."""


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
    """The stack machine of a pickle; each operation gets the number behind its opcode."""

    def __init__(self, raw: bytes) -> None:
        self.position = 0
        self.stack: list[Any] = []
        self._raw = raw
        self._memo: dict[int, Any] = {}
        self._storages: dict[str, Storage] = {}

    def run(self) -> Any:
        raw, operations = self._raw, _OPERATIONS
        while True:
            code = raw[self.position]  # raises if the last number was cut short
            if code == _STOP:
                return self.stack.pop()
            operation, nbytes = operations.get(code, (None, 0))
            if operation is None:
                raise UnknownPickle(f"its pickle has the opcode 0x{code:02x}")
            begin = self.position + 1
            self.position = begin + nbytes
            operation(self, int.from_bytes(raw[begin : self.position], "little") if nbytes else 0)

    def _take(self, nbytes: int) -> bytes:
        begin, self.position = self.position, self.position + nbytes
        if self.position > len(self._raw):
            raise IndexError
        return self._raw[begin : self.position]

    def _line(self) -> str:
        end = self._raw.index(b"\n", self.position)
        return self._take(end + 1 - self.position)[:-1].decode()

    # Values ---------------------------------------------------------------------------------------

    def protocol(self, found: int) -> None:
        if found != _PROTOCOL:
            raise NoTensors(f"its pickle has protocol {found}")

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def text(self, nbytes: int) -> None:
        self.stack.append(self._take(nbytes).decode())

    def signed(self, _: int) -> None:
        self.stack.append(int.from_bytes(self._take(4), "little", signed=True))

    def long(self, nbytes: int) -> None:
        self.stack.append(int.from_bytes(self._take(nbytes), "little", signed=True))

    def double(self, _: int) -> None:
        self.stack.append(struct.unpack(">d", self._take(8))[0])

    def name(self, _: int) -> None:
        self.stack.append(_Global(f"{self._line()}.{self._line()}"))

    def put(self, place: int) -> None:
        self._memo[place] = self.stack[-1]

    def get(self, place: int) -> None:
        self.stack.append(self._memo[place])

    # Containers -----------------------------------------------------------------------------------

    def tuple(self, _: int) -> None:
        self.stack.append(tuple(self._pop_mark()))

    def append(self, _: int) -> None:
        self._extend([self.stack.pop()])

    def appends(self, _: int) -> None:
        self._extend(self._pop_mark())

    def set_item(self, _: int) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._update([key, value])

    def set_items(self, _: int) -> None:
        self._update(self._pop_mark())

    def pop(self, count: int) -> list[Any]:
        """Take the last items from the stack."""
        if len(self.stack) < count:
            raise IndexError
        items = self.stack[-count:]
        del self.stack[-count:]
        return items

    def _pop_mark(self) -> list[Any]:
        index = len(self.stack) - 1
        while self.stack[index] is not _MARK:
            index -= 1
            if index < 0:
                raise IndexError
        items = self.stack[index + 1 :]
        del self.stack[index:]
        return items

    def _extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, list):
            raise TypeError
        target += items

    def _update(self, items: list[Any]) -> None:
        target = self.stack[-1]
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

    def persistent(self, _: int) -> None:
        kind, storage, key, _device, count = self.stack.pop()
        if kind != "storage" or not isinstance(key, str) or not isinstance(storage, _Global):
            raise TypeError
        module, name = storage.name.rsplit(".", 1)
        dtype = "" if storage.name == _UNTYPED else _BY_STORAGE.get(name)
        if dtype is None or module not in ("torch", "torch.storage"):
            raise _refuse_name(storage)
        found = Storage(dtype, key, _size(count))
        # torch takes what it meets first.
        if self._storages.setdefault(key, found) != found:
            raise UnknownPickle(f"it describes the storage {shorten(key)} in two ways")
        self.stack.append(found)

    def call(self, _: int) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, _Global):
            raise TypeError
        if function.name == _ORDERED_DICT and arguments == ():
            self.stack.append({})
        elif function.name in (_V2, _V3):
            self.stack.append(_rebuild(function.name, arguments))
        elif function.name == _PARAMETER:
            self.stack.append(_unwrapped(arguments))
        else:
            raise _refuse_name(function)

    def build(self, _: int) -> None:
        # A state dict has the versions of its modules as an attribute, and no other.
        state = self.stack.pop()
        if not (isinstance(state, dict) and isinstance(self.stack[-1], dict)):
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


def _require_fit(needs_grad: Any, dtype: str) -> None:
    """Refuse what torch refuses: a gradient of integers."""
    if type(needs_grad) is not bool:
        raise TypeError
    if needs_grad and not dtype.startswith(("F", "BF", "C")):
        raise NoTensors(f"it has a tensor of {dtype} that needs a gradient")


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


_Operation = Callable[[_Machine, int], None]


def _make(kind: Callable[[], Any]) -> _Operation:
    return lambda machine, _: machine.push(kind())


def _make_tuple(count: int) -> _Operation:
    return lambda machine, _: machine.push(tuple(machine.pop(count)))


_STOP = ord(".")
# With the size of the number behind the opcode, in bytes.
_OPERATIONS: dict[int, tuple[_Operation, int]] = {
    0x80: (_Machine.protocol, 1),
    ord("("): (_make(lambda: _MARK), 0),
    ord("X"): (_Machine.text, 4),
    ord("K"): (_Machine.push, 1),
    ord("M"): (_Machine.push, 2),
    ord("J"): (_Machine.signed, 0),
    0x8A: (_Machine.long, 1),
    ord("G"): (_Machine.double, 0),
    ord("N"): (_make(lambda: None), 0),
    0x88: (_make(lambda: True), 0),
    0x89: (_make(lambda: False), 0),
    ord("q"): (_Machine.put, 1),
    ord("r"): (_Machine.put, 4),
    ord("h"): (_Machine.get, 1),
    ord("j"): (_Machine.get, 4),
    ord("c"): (_Machine.name, 0),
    ord(")"): (_make(tuple), 0),
    ord("]"): (_make(list), 0),
    ord("}"): (_make(dict), 0),
    ord("t"): (_Machine.tuple, 0),
    0x85: (_make_tuple(1), 0),
    0x86: (_make_tuple(2), 0),
    0x87: (_make_tuple(3), 0),
    ord("a"): (_Machine.append, 0),
    ord("e"): (_Machine.appends, 0),
    ord("s"): (_Machine.set_item, 0),
    ord("u"): (_Machine.set_items, 0),
    ord("Q"): (_Machine.persistent, 0),
    ord("R"): (_Machine.call, 0),
    ord("b"): (_Machine.build, 0),
}
