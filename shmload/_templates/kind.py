"""What makes two programs need different templates.

A template serves a program only if everything here is the same for both: the interpreter and its
flags, the packages, the variables that libraries read on import, the cores, and what the kernel
lets the process do. The template itself compares the rest.
"""

import os
import resource
import sys
import zlib

from shmload._templates import inherited, place, rights
from shmload._templates.messages import VERSION
from shmload._templates.redirecting import without_redirect
from shmload._version import __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

# Variables that are read when Python starts or when libraries are imported. The C libraries among
# them cannot be watched while they read; what Python code reads is, see `recorder`.
_FAMILIES = (
    "ACCELERATE_", "BLIS_", "COVERAGE_", "CUBLAS_", "CUDA_", "DIFFUSERS_", "FORCE_COLOR", "GOMP_",
    "GOTO_", "HF_", "HOME", "HUGGINGFACE_", "KMP_", "LANG", "LC_", "LD_", "MALLOC_", "MKL_",
    "NCCL_", "NO_COLOR", "NUMEXPR_", "NVIDIA_", "OMP_", "OPENBLAS_", "OPENSSL_", "PYTHON",
    "PYTORCH_", "RAYON_", "SAFETENSORS_", "SHMLOAD_", "SSL_", "TMPDIR", "TOKENIZERS_", "TORCH",
    "TRANSFORMERS_", "TZ", "USE_", "VECLIB_", "VIRTUAL_ENV", "XDG_",
)  # fmt: skip

_NAMES = frozenset({"LNAME", "LOGNAME", "TEMP", "TMP", "USER", "USERNAME"})

# Read when a model is loaded: shmload sets it for that time.
_READ_LATER = ("HF_DEACTIVATE_ASYNC_LOAD",)
_NOTE = ("imports", "variables")
"""A note of all templates: the names of other variables that imports have read."""


def facts_of_this_process(name: str, environment: "dict[str, str] | None" = None) -> str:
    """Return everything that a template for this process's program must have in common with it.

    Args:
        name: of the template, as the user gave it.
        environment: the variables that imports shall find; None for this process's first ones.
    """
    session, terminal = session_and_terminal()
    return repr(
        (
            (__version__, VERSION, name),
            _interpreter(),
            sorted(read_on_import(environment or first_environment()).items()),
            # Libraries choose the size of their thread pools when they are loaded.
            sorted(os.sched_getaffinity(0)),
            # Of the first thread the kernel sets it up at exec, and never again.
            resource.getrlimit(resource.RLIMIT_STACK),
            sorted(inherited.said_of_this_process().items()),
            None if rights.can_enter_cgroup() else _read("cgroup"),
            rights.rights_of(),
            session if terminal else None,
        )
    )


def _interpreter() -> tuple[object, ...]:
    """Return what this interpreter is, with its flags and packages."""
    entries = sys.path if sys.flags.safe_path else sys.path[1:]
    return (
        (sys.executable, sys.prefix, sys.version),
        (tuple(sys.flags), sorted(sys._xoptions.items()), sys.warnoptions, _is_unbuffered()),
        [(entry, _installed(entry)) for entry in entries],
    )


def _is_unbuffered() -> bool | None:
    """Tell whether Python was started with -u, which no flag says."""
    return getattr(sys.stdout, "write_through", None)


def first_environment() -> dict[str, str]:
    """Return the variables with which this process was started; Python itself changes some."""
    with open("/proc/self/environ", "rb", buffering=0) as file:
        return variables_in(file.read())


def variables_in(raw: bytes) -> dict[str, str]:
    """Return the variables in the content of /proc/PID/environ.

    Those of `--redirect` are left out: `Program.redirect` says so.
    """
    pairs = [entry.partition(b"=") for entry in raw.split(b"\0") if entry]
    found = {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
    return without_redirect(found)


def key_of(facts: str) -> str:
    """Return a short name for these facts; a template compares the facts themselves too."""
    raw = facts.encode("utf-8", "surrogateescape")
    return f"{zlib.crc32(raw):08x}{zlib.adler32(raw):08x}"


def is_of_import(variable: str) -> bool:
    """Tell whether libraries may read a variable when they are imported."""
    is_one = variable.startswith(_FAMILIES) or variable in _NAMES
    return is_one and variable not in _READ_LATER


def read_on_import(environment: dict[str, str]) -> dict[str, str]:
    """Return the variables among these that imports may read, or have read in a template."""
    noted = _noted_variables() - {*_READ_LATER}
    return {n: value for n, value in environment.items() if is_of_import(n) or n in noted}


def note_variables(names: "Iterable[str]") -> None:
    """Note variables that imports have read, for programs that start from now on."""
    noted = _noted_variables()
    found = noted | {name for name in names if not is_of_import(name)}
    if found != noted:
        place.write_note(*_NOTE, "\n".join(sorted(found)))


def _noted_variables() -> set[str]:
    return {*(place.read_note(*_NOTE) or "").splitlines()}


def session_and_terminal() -> tuple[int, int]:
    """Return this process's session, and its controlling terminal's number; 0 for none."""
    with open("/proc/self/stat", "rb", buffering=0) as file:
        fields = file.read().rpartition(b")")[2].split()
    return int(fields[3]), int(fields[4])


def _read(name: str) -> str | None:
    try:
        with open(f"/proc/self/{name}", "rb", buffering=0) as file:
            return file.read().decode("utf-8", "surrogateescape")
    except OSError:
        return None


def _installed(folder: str) -> int | None:
    """Return when packages were last installed in a directory of them; None for another one.

    A template looks by itself whether the files that it has imported are unchanged.
    """
    if not folder.endswith(("site-packages", "dist-packages")):
        return None
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return None
