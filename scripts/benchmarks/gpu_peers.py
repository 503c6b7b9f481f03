"""Other loaders of safetensors files to a GPU, each used as its own documentation shows.

Only the standard library is imported at the top. A loader returns what keeps its tensors alive.
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
    # The memory belongs to the loader; nothing is copied out of it.
    return loader, buffers, [buffers.get_tensor(name) for name in buffers.key_to_rank_lidx]


def _runai(paths: list[str], device: str) -> object:
    from runai_model_streamer import SafetensorsStreamer  # type: ignore[import-not-found]

    with SafetensorsStreamer() as streamer:
        streamer.stream_files(paths)
        return [tensor.to(device) for _, tensor in streamer.get_tensors()]


def _instanttensor(paths: list[str], device: str) -> object:
    from instanttensor import safe_open  # type: ignore[import-not-found]

    with safe_open(paths, framework="pt", device=device) as file:
        return [tensor for _, tensor in file.tensors()]  # from 0.2 on each has memory of its own


LOADERS: dict[str, Callable[[list[str], str], object]] = {
    "safetensors": _safetensors,
    "fastsafetensors": _fastsafetensors,
    "runai-model-streamer": _runai,
    "instanttensor": _instanttensor,
}
"""By the names of their packages."""

FOR_CACHED_FILES: dict[str, dict[str, str]] = {
    "fastsafetensors": {"FASTSAFETENSORS_ODIRECT": "0"},
    "runai-model-streamer": {"RUNAI_STREAMER_FS_STRATEGY": "sync_buffered"},
    "instanttensor": {"INSTANTTENSOR_BACKEND": "BUFFERED"},
}
"""Environment variables by which they read the page cache, not the disk beside it."""
