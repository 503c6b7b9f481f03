"""The environment variables that decide what an import makes: all processes that share one agree.

`shmload run` imports this before each program, so it imports nothing.
"""

# Read when Python starts or when libraries are imported. The C libraries among them cannot be
# watched while they read; what Python code reads is, in a template.
_FAMILIES = (
    "ACCELERATE_", "BLIS_", "COVERAGE_", "CUBLAS_", "CUDA_", "DIFFUSERS_", "FORCE_COLOR", "GOMP_",
    "GOTO_", "HF_", "HOME", "HUGGINGFACE_", "KMP_", "LANG", "LC_", "LD_", "MALLOC_", "MKL_",
    "NCCL_", "NO_COLOR", "NUMEXPR_", "NVIDIA_", "OMP_", "OPENBLAS_", "OPENSSL_", "PYTHON",
    "PYTORCH_", "RAYON_", "SAFETENSORS_", "SHMLOAD_", "SSL_", "TMPDIR", "TOKENIZERS_", "TORCH",
    "TRANSFORMERS_", "TZ", "USE_", "VECLIB_", "VIRTUAL_ENV", "XDG_",
)  # fmt: skip
_NAMES = frozenset({"LNAME", "LOGNAME", "TEMP", "TMP", "USER", "USERNAME"})

READ_LATER = frozenset({"HF_DEACTIVATE_ASYNC_LOAD"})
"""Read when a model is loaded: shmload sets it for that time."""


def is_of_import(variable: str) -> bool:
    """Tell whether libraries may read a variable when they are imported."""
    is_one = variable.startswith(_FAMILIES) or variable in _NAMES
    return is_one and variable not in READ_LATER
