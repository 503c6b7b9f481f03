"""Other loaders of safetensors files to a GPU, each called as its documentation shows.

Only the standard library is imported at the top. A loader returns an object that keeps its tensors
alive.
"""

from collections.abc import Callable


def _safetensors(paths: list[str], device: str) -> object:
    from safetensors.torch import load_file

    return [load_file(path, device=device) for path in paths]


def _fastsafetensors(paths: list[str], device: str) -> object:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup  # type: ignore[import-not-found]

    loader = SafeTensorsFileLoader(SingleGroup(), device, nogds=True)
    loader.add_filenames({0: paths})
    buffers = loader.copy_files_to_device()
    # The tensors are views of the loader's memory, so return the loader too.
    return loader, buffers, [buffers.get_tensor(name) for name in buffers.key_to_rank_lidx]


def _runai(paths: list[str], device: str) -> object:
    from runai_model_streamer import SafetensorsStreamer  # type: ignore[import-not-found]

    with SafetensorsStreamer() as streamer:
        streamer.stream_files(paths)
        return [tensor.to(device) for _, tensor in streamer.get_tensors()]


def _instanttensor(paths: list[str], device: str) -> object:
    from instanttensor import safe_open  # type: ignore[import-not-found]

    with safe_open(paths, framework="pt", device=device) as file:
        return [tensor for _, tensor in file.tensors()]  # since 0.2 each tensor owns its memory


LOADERS: dict[str, Callable[[list[str], str], object]] = {
    "safetensors": _safetensors,
    "fastsafetensors": _fastsafetensors,
    "runai-model-streamer": _runai,
    "instanttensor": _instanttensor,
}
"""Loaders by package name."""

FOR_CACHED_FILES: dict[str, dict[str, str]] = {
    "fastsafetensors": {"FASTSAFETENSORS_ODIRECT": "0"},
    "runai-model-streamer": {"RUNAI_STREAMER_FS_STRATEGY": "sync_buffered"},
    "instanttensor": {"INSTANTTENSOR_BACKEND": "BUFFERED"},
}
"""Environment variables, by package name, that make a loader read through the page cache."""
