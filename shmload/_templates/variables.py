"""The variables of a program: what it starts with, what imports read of that, what it sets.

What libraries read on import is read in the template. A program that sets such a variable before
its imports starts over in the ordinary way once, and from then on uses a template that has these
variables.
"""

import os

from shmload._templates import place

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from shmload._templates.messages import Program

# Read when Python starts or when libraries are imported. The C libraries among them cannot be
# watched while they read; what Python code reads is, in a test.
_FAMILIES = (
    "ACCELERATE_", "AOTINDUCTOR_", "AOT_", "BLIS_", "COMPILE_STROBELIGHT_", "COVERAGE_",
    "CUBLAS_", "CUDA_", "CUTEDSL_", "CUTLASS_", "DIFFUSERS_", "FORCE_", "GLIBC_", "GOMP_", "GOTO_",
    "HF_", "HOME", "HUGGINGFACE_", "INDUCTOR_", "KINETO_", "KMP_", "LANG", "LC_", "LD_",
    "MALLOC_", "MKL_", "MPMATH_", "NCCL_", "NO_COLOR", "NPU_", "NPY_", "NUMEXPR_", "NUMPY_",
    "NVIDIA_", "OAUTH_", "OMP_", "OPENBLAS_", "OPENID_", "OPENSSL_", "PARTITIONER_", "PILLOW_",
    "PT2_", "PYTHON", "PYTORCH_", "RAYON_", "SAFETENSORS_", "SHMLOAD_", "SSL_", "SYMPY_",
    "TCMALLOC_", "TMPDIR", "TOKENIZERS_", "TORCH", "TQDM_", "TRANSFORMERS_", "TZ", "UNSAFE_",
    "USE_", "VECLIB_", "VIRTUAL_ENV", "XDG_", "XLA_",
)  # fmt: skip
_NAMES = frozenset({
    "DISABLE_TELEMETRY", "DO_NOT_TRACK", "EAGER_IMPORT", "ENABLE_PERSISTENT_TMA_MATMUL",
    "ENABLE_TEMPLATE_TMA_STORE", "ENABLE_TMA_LOAD_FOR_TEMPLATE_EPILOGUE",
    "FX_NET_ACC_SPLITTER_TRACKER_DUMP_PATH", "FX_NET_ACC_SPLITTER_TRACKER_MODE",
    "FX_PATCH_GETITEM", "LNAME", "LOGLEVEL", "LOGNAME", "LOG_AUTOTUNE_RESULTS", "LOG_TLPARSE",
    "SAGE_ROOT", "TEMP", "TMP", "USER", "USERNAME",
})  # fmt: skip

READ_LATER = frozenset({"HF_DEACTIVATE_ASYNC_LOAD", "HF_TOKEN"})
"""Read when a model is found or loaded, not when a library is imported."""

_SET = "settings"
"""A note of a program."""
_KEEPS_S = 1800.0
REDIRECT = "SHMLOAD_REDIRECT"
_PATH = "PYTHONPATH"
_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "startup")


def first_environment() -> dict[str, str]:
    """Return the variables with which this process was started; Python itself changes some."""
    found: dict[str, str] = {}
    try:
        with open("/proc/self/environ", "rb", buffering=0) as file:
            entries = file.read().split(b"\0")
    except OSError:  # there is no /proc
        return dict(os.environ)
    for entry in entries:
        name, is_one, value = os.fsdecode(entry).partition("=")
        if name and is_one:
            found.setdefault(name, value)  # of two with a name Python takes the first
    return found


def with_redirect(environment: "Mapping[str, str]", way: str) -> dict[str, str]:
    """Return an environment in which `redirect` is on in all processes that get it.

    Python imports the module in `startup` when it starts.

    Args:
        environment: as it is without.
        way: `1`, or `verbose` to have each call's way written on standard error.
    """
    before = environment.get(_PATH)
    path = f"{_FOLDER}{os.pathsep}{before}" if before else _FOLDER
    return {**environment, REDIRECT: way, _PATH: path}


def read_on_import(environment: "Mapping[str, str]") -> dict[str, str]:
    """Return the variables among these that imports may read."""
    return {name: value for name, value in environment.items() if is_of_import(name)}


def is_of_import(variable: str) -> bool:
    """Tell whether libraries may read a variable when they are imported."""
    is_one = variable.startswith(_FAMILIES) or variable in _NAMES
    # Those of torchrun are another rank's or run's each time; torch reads them when it begins one.
    return is_one and variable not in READ_LATER and not variable.startswith("TORCHELASTIC_")


# That programs set ------------------------------------------------------------------------------


def read_settings(program: "Program") -> list[list[str]]:
    """Return what a program has set last time: names with their values, or alone if removed."""
    found = place.read_note(note_of(program), _SET) or ""
    return [entry.split("=", 1) for entry in found.split("\0") if entry]


def write_settings(note: str, settings: list[list[str]], known: list[list[str]]) -> bool:
    """Note what a program has set, so that its next run has a template with that.

    A value may be another each time, such as a new directory. Each would get a template of its own:
    other values of the same variables replace the known ones only if these are old.

    Args:
        note: the key that `note_of` gave when the program started.
        settings: what it has set.
        known: what it was to set by the note.

    Returns:
        Whether that was noted.

    Raises:
        OSError: it cannot be written.
    """
    is_same = [name for name, *_ in settings] == [name for name, *_ in known]
    if settings == known or (is_same and place.age_s(note, _SET) < _KEEPS_S):
        return False
    place.write_note(note, _SET, "\0".join(map("=".join, settings)))
    return True


def with_settings(variables: "Mapping[str, str]", settings: list[list[str]]) -> dict[str, str]:
    """Return variables as they are once a program has set its own."""
    found = dict(variables)
    for name, *value in settings:
        found.pop(name, None)
        if value:
            found[name] = value[0]
    return found


def differences(before: "Mapping[str, str]", after: "Mapping[str, str]") -> list[list[str]]:
    """Return what leads from some variables to others."""
    changed = sorted(n for n in before.keys() | after.keys() if before.get(n) != after.get(n))
    return [[name, after[name]] if name in after else [name] for name in changed]


def note_of(program: "Program") -> str:
    """Return the key of the note that all runs of a program in this directory share."""
    value = os.path.abspath(program.value) if program.kind == "script" else program.value
    return place.key_of(f"{os.getcwd()}\n{program.kind}\n{value}")
