"""The environment variables that decide what an import makes: all processes that share one agree.

`shmload run` imports this before each program, so it imports nothing.
"""

# Read when Python starts or when libraries are imported. The C libraries among them cannot be
# watched while they read; what Python code reads is, in a test.
_FAMILIES = (
    "ACCELERATE_", "AOTINDUCTOR_", "AOT_", "BLIS_", "COMPILE_STROBELIGHT_", "COVERAGE_",
    "CUBLAS_", "CUDA_", "CUTEDSL_", "CUTLASS_", "DIFFUSERS_", "FORCE_", "GOMP_", "GOTO_",
    "HF_", "HOME", "HUGGINGFACE_", "INDUCTOR_", "KINETO_", "KMP_", "LANG", "LC_", "LD_",
    "MALLOC_", "MKL_", "MPMATH_", "NCCL_", "NO_COLOR", "NPU_", "NPY_", "NUMEXPR_", "NUMPY_",
    "NVIDIA_", "OAUTH_", "OMP_", "OPENBLAS_", "OPENID_", "OPENSSL_", "PARTITIONER_", "PILLOW_",
    "PT2_", "PYTHON", "PYTORCH_", "RAYON_", "SAFETENSORS_", "SHMLOAD_", "SSL_", "SYMPY_",
    "TMPDIR", "TOKENIZERS_", "TORCH", "TRANSFORMERS_", "TZ", "UNSAFE_", "USE_", "VECLIB_",
    "VIRTUAL_ENV", "XDG_", "XLA_",
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


def is_of_import(variable: str) -> bool:
    """Tell whether libraries may read a variable when they are imported."""
    is_one = variable.startswith(_FAMILIES) or variable in _NAMES
    return is_one and variable not in READ_LATER
