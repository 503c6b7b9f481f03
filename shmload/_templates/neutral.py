"""Whether an import leaves all else as it was: other modules, their classes, and the settings.

A template hides the modules that it has imported, and with them what `recorder` has a record of:
filters of warnings, paths, variables, loggers, functions to call at exit. What is compared here
cannot be hidden, and another program would notice it.

Not seen is what C code keeps to itself, but for the settings that are read here.
"""

import contextlib
import gc
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

# What a library keeps to be quicker the next time, what is looked up on first use, what each import
# of `typing_extensions` adds to `typing`, and what a thread that runs keeps of itself.
_MEMOS = re.compile(
    r"cache|__warningregistry__|__slotnames__|__annotations__|__dynamo_disable|^inspect\._|^re\._|"
    r"^inspect\.modulesbyfile|_overload_registry|_value2member_map_|^concurrent\.futures\.\w+Executor$|"
    r"pythonapi\.Py|^threading\._(threading_atexits|active\[\d+\]\.)|"
    r"^typing\._(check_generic|cleanups|collect_param)"
)
# `recorder` and `stash` see to these, or they change with every import.
_RECORDED = {
    "_warnings.filters", "_warnings._onceregistry", "logging._handlers", "logging._handlerList",
    "logging.root", "os.environ", "os.environb", "posix.environ", "sys.meta_path", "sys.modules",
    "sys.path", "sys.path_hooks", "tempfile.tempdir", "warnings.filters", "warnings.onceregistry",
    "weakref.finalize._dirty", "weakref.finalize._registered_with_atexit",
    "weakref.finalize._registry",
}  # fmt: skip
# In these, diffusers, transformers and shmload list the names that they import on first use.
LAZY_TABLES = ("_class_to_module", "_HOMES")
_PLAIN = (str, bytes, int, float, complex, bool, type(None), ModuleType)
_CONTAINERS = (dict, list, set)
# Their insides are compared if a module or class has them.
_CODE: dict[type, tuple[str, ...]] = {
    FunctionType: ("__code__", "__defaults__", "__kwdefaults__"),
    classmethod: ("__func__",),
    staticmethod: ("__func__",),
    property: ("fget", "fset", "fdel"),
}
_OF_PROGRAMS = ("__main__", "__mp_main__", "shmload")
# Larger ones are tables of data.
_MAX_ITEMS = 10_000


class Snapshot:
    """How all modules, their classes and the settings are now.

    It replaces the functions that register codecs by ones that note it, so it is for a copy of a
    process that ends soon.
    """

    def __init__(self) -> None:
        self._modules = {
            name: module
            for name, module in list(sys.modules.items())
            if isinstance(module, ModuleType) and name.partition(".")[0] not in _OF_PROGRAMS
        }
        self._called = _watch_codecs()
        # By id: how it is reached, and what it holds, which keeps all of that alive.
        self._known: dict[int, tuple[str, Any, dict[Any, Any]]] = {}
        self._settings = settings()
        with _undisturbed():
            for name, module in self._modules.items():
                self._note(name, module)

    def changes(self) -> list[str]:
        """Return a line for each thing that is not as it was, sorted."""
        now = settings()
        found = {f"{name} changed" for name, was in self._settings.items() if now.get(name) != was}
        with _undisturbed():
            return sorted(found | set(self._changes()))

    def _changes(self) -> Iterator[str]:
        for name, module in self._modules.items():
            if sys.modules.get(name, module) is not module:
                yield f"{name} was replaced"
        for name in self._called:
            yield f"codecs.{name} was called"
        for path, owner, before in self._known.values():
            if path not in _RECORDED:
                yield from self._differences(path, owner, before)

    def _note(self, path: str, owner: Any) -> None:
        """Note what an object holds, and of a module, class or container also what is in that."""
        if id(owner) in self._known:
            return
        held = _content(owner)
        self._known[id(owner)] = (path, owner, held)
        if path in _RECORDED:
            return
        if not issubclass(type(owner), (ModuleType, type, *_CONTAINERS)):
            return
        for key, value in held.items():
            kind = type(value)
            if issubclass(kind, type):
                if value.__module__ in self._modules:
                    self._note(f"{value.__module__}.{value.__qualname__}", value)
            elif issubclass(kind, _CONTAINERS):
                if len(value) <= _MAX_ITEMS:
                    self._note(_path(path, key), value)
            elif not issubclass(kind, _PLAIN) and (
                issubclass(kind, (*_CODE,)) or _attributes(value)
            ):
                self._note(_path(path, key), value)

    def _differences(self, path: str, owner: Any, before: dict[Any, Any]) -> Iterator[str]:
        now = _content(owner)
        lazy = _lazy_names(now) if isinstance(owner, ModuleType) else ()
        changed = [key for key in now if key not in before or before[key] is not now[key]]
        for key in (*changed, *(before.keys() - now.keys())):
            where = _path(path, key)
            if where in _RECORDED or key in lazy or _MEMOS.search(where):
                continue
            if key not in now:
                yield f"{where} was removed"
            elif key not in before:
                if not self._is_of_new(key) and not _is_submodule(where, now[key]):
                    yield f"{where} was added"
            elif not _is_equal(before[key], now[key]):
                yield f"{where} was replaced"

    def _is_of_new(self, key: object) -> bool:
        """Tell whether a key of a table is a class or function of a module that is new."""
        return isinstance(key, type | FunctionType) and key.__module__ not in self._modules


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Have nothing warn, as some objects do that are asked for their class; collect nothing."""
    is_on = gc.isenabled()
    gc.disable()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    if is_on:
        gc.enable()


def _content(value: Any) -> dict[Any, Any]:
    """Return what an object holds, by key; a set's items are their own."""
    if isinstance(value, ModuleType | type):
        return dict(vars(value))
    if isinstance(value, dict):
        return dict(dict.items(value))
    if isinstance(value, list):
        return dict(enumerate(value))
    if isinstance(value, set):
        return dict.fromkeys(value)
    names = next((names for kind, names in _CODE.items() if isinstance(value, kind)), None)
    return {name: getattr(value, name) for name in names} if names else dict(_attributes(value))


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object that is no module, class or container."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError, RuntimeError):
        return {}
    is_logger = type(value).__module__ == "logging"
    return found if type(found) is dict and not is_logger else {}


def _path(path: str, key: object) -> str:
    return f"{path}.{key}" if isinstance(key, str) else f"{path}[{_name(key)}]"


def _name(key: object) -> str:
    return str(getattr(key, "__qualname__", "")) or f"{key!r:.60}"


def _is_equal(one: object, other: object) -> bool:
    """Tell whether two objects are plain values, and the same."""
    plain = (str, bytes, int, float, complex)
    return type(one) is type(other) and isinstance(one, plain) and one == other


def _lazy_names(held: dict[Any, Any]) -> set[str]:
    tables = [held.get(name) for name in LAZY_TABLES]
    return {name for table in tables if isinstance(table, dict) for name in table}


def _is_submodule(where: str, value: object) -> bool:
    """Tell whether the import system has put a module there."""
    return isinstance(value, ModuleType) and sys.modules.get(where) is value


def settings() -> dict[str, object]:
    """Return what the interpreter, torch and numpy keep beside their modules' attributes."""
    found = {}
    for name, (home, read) in _SETTINGS.items():
        module = sys.modules.get(home)
        # Another version may lack something, and so does a module that is half imported.
        with contextlib.suppress(AttributeError, RuntimeError, ValueError):
            if module is not None:
                found[name] = read(module)
    return found


def _torch_hooks(module: Any) -> list[Any]:
    return [(name, dict(held)) for name, held in vars(module).items() if name[:8] == "_global_"
            and isinstance(held, dict)]  # fmt: skip


# By what it is called: the module that it belongs to, and how it is read.
_SETTINGS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "the recursion limit": ("sys", lambda m: m.getrecursionlimit()),
    "the switch interval": ("sys", lambda m: m.getswitchinterval()),
    "the limit of digits of a number": ("sys", lambda m: m.get_int_max_str_digits()),
    "the hooks of tracing": ("sys", lambda m: (m.gettrace(), m.getprofile())),
    "the hooks of coroutines": ("sys", lambda m: (m.get_asyncgen_hooks(),
                                                  m.get_coroutine_origin_tracking_depth())),
    "the handlers of signals": ("_signal", lambda m: [m.getsignal(n) for n in m.valid_signals()]),
    "the timers": ("_signal", lambda m: [m.getitimer(n)[1] for n in range(3)]),
    "the garbage collector": ("gc", lambda m: (m.isenabled(), m.get_threshold(), m.get_debug(),
                                               list(m.callbacks))),
    "the locale": ("_locale", lambda m: m.setlocale(m.LC_ALL)),
    "the context of decimal": ("decimal", lambda m: repr(m.getcontext())),
    "the timeout of sockets": ("_socket", lambda m: m.getdefaulttimeout()),
    "the hooks of threads": ("threading", lambda m: (m.excepthook, m.gettrace(), m.getprofile(),
                                                     m.stack_size())),
    "the working directory": ("posix", lambda m: m.getcwd()),
    "the umask": ("posix", lambda m: m.umask(m.umask(0o077))),
    "the priority": ("posix", lambda m: (m.getpriority(0, 0), m.sched_getaffinity(0))),
    "the limits": ("resource", lambda m: [m.getrlimit(n) for n in range(16)]),
    "the level of logging": ("logging", lambda m: (m.root.manager.disable, m.getLoggerClass(),
                                                   m.getLogRecordFactory())),
    "the way that processes start": ("multiprocessing", lambda m: m.get_start_method(True)),
    "the dialects of csv": ("csv", lambda m: m.list_dialects()),
    "the state of random": ("random", lambda m: m.getstate()),
    "numpy's handling of errors": ("numpy", lambda m: (m.geterr(), m.geterrcall(), m.getbufsize())),
    "numpy's way to print": ("numpy", lambda m: repr(m.get_printoptions())),
    "numpy's random state": ("numpy.random", lambda m: repr(m.get_state(legacy=False))),
    "torch's default dtype": ("torch", lambda m: m.get_default_dtype()),
    "torch's default device": ("torch", lambda m: str(m.get_default_device())),
    "torch's gradients": ("torch", lambda m: (m.is_grad_enabled(), m.is_inference_mode_enabled(),
                                              m.is_anomaly_enabled())),
    "torch's threads": ("torch", lambda m: m.get_num_threads()),
    "torch's determinism": ("torch", lambda m: (m.are_deterministic_algorithms_enabled(),
                                                m.is_deterministic_algorithms_warn_only_enabled())),
    "torch's precision": ("torch", lambda m: (m.get_float32_matmul_precision(),
                                              m.backends.cuda.matmul.allow_tf32,
                                              m.backends.cudnn.allow_tf32,
                                              m.backends.cudnn.benchmark,
                                              m.backends.mkldnn.enabled)),
    "torch's autocast": ("torch", lambda m: [
        (m.is_autocast_enabled(kind), m.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]),
    "torch's modes": ("torch", lambda m: (m._C._len_torch_function_stack(),
                                          m._C._len_torch_dispatch_stack())),
    "torch's attention": ("torch", lambda m: (m._C._get_flash_sdp_enabled(),
                                              m._C._get_math_sdp_enabled(),
                                              m._C._get_mem_efficient_sdp_enabled())),
    "torch's conversion of modules": ("torch.__future__", lambda m: (
        m.get_overwrite_module_params_on_conversion(), m.get_swap_module_params_on_conversion())),
    "torch's random state": ("torch", lambda m: m.get_rng_state().tolist()),
    "torch's hooks of modules": ("torch.nn.modules.module", _torch_hooks),
}  # fmt: skip


def _watch_codecs() -> list[str]:
    """Have calls that register a codec or a handler of errors noted in the list returned."""
    called: list[str] = []
    module: Any = sys.modules["codecs"]
    for name in ("register", "register_error"):
        function = getattr(module, name)

        def noting(*args: Any, name: str = name, function: Any = function) -> Any:
            called.append(name)
            return function(*args)

        setattr(module, name, noting)
    return called
