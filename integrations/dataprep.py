"""Data-prep jobs: one function on many items, in processes that share one copy of the weights.

    from shmload.integrations import dataprep

    def encode(pipe, path):
        pixels = pipe.image_processor.preprocess(Image.open(path)).to(pipe.vae.dtype)
        return pipe.vae.encode(pixels).latent_dist.sample()

    for latents in dataprep.map(encode, paths, source="path/to/pipeline", components=["vae"]):
        ...

Guarantee: every item comes out once, with a result or an error, whichever processes end. A result
depends on the item, its number, the weights, the seed, the number of threads and the kind of
device; and on earlier items if the function changes the pipeline.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from shmload._jobs.job import Errors, Job
from shmload._jobs.maps import Function
from shmload.integrations.handles import Handle
from shmload.integrations.results import ResultsReport

__all__ = ["Job", "map", "write"]


def map(
    function: Function,
    items: Iterable[Any],
    *,
    source: str | os.PathLike[str] | Handle,
    as_completed: bool = False,
    errors: Errors = "raise",
    progress: bool | None = None,
    **job_kwargs: Any,
) -> Iterator[Any]:
    """Call a function on every item, in several processes that share one copy of the weights.

    Nothing happens before the first result is asked for. After the last one, or when the iterator
    is closed, the processes end and the weights are released.

    Args:
        function: as for `Job.map`.
        items: see `Job.map`.
        source: as for `Job`.
        as_completed: see `Job.map`.
        errors: see `Job.map`.
        progress: see `Job.map`.
        job_kwargs: as for `Job`: `components`, `procs`, `devices`, `dtype`, ...

    Yields:
        As `Job.map`.

    Raises:
        As `Job` and `Job.map`.
    """
    with Job(source, **job_kwargs) as job:
        yield from job.map(
            function, items, as_completed=as_completed, errors=errors, progress=progress
        )


def write(
    function: Function,
    items: Iterable[Any],
    folder: str | os.PathLike[str],
    *,
    source: str | os.PathLike[str] | Handle,
    key: Callable[[Any], str] | None = None,
    shard_items: int = 1000,
    errors: Errors = "raise",
    retry_failed: bool = False,
    save_dtype: object = None,
    format: str = "safetensors",
    facts: Mapping[str, str] | None = None,
    progress: bool | None = None,
    **job_kwargs: Any,
) -> ResultsReport:
    """Call a function on every item, in several processes, and store what it returns in a folder.

    If nothing is left to do, no process starts and no library is imported.

    Args:
        function: as for `Job.write`.
        items: see `Job.write`.
        folder: see `Job.write`.
        source: as for `Job`.
        key: see `Job.write`.
        shard_items: see `Job.write`.
        errors: see `Job.write`.
        retry_failed: see `Job.write`.
        save_dtype: see `Job.write`.
        format: see `Job.write`.
        facts: see `Job.write`.
        progress: see `Job.write`.
        job_kwargs: as for `Job`: `components`, `procs`, `devices`, `dtype`, ...

    Raises:
        As `Job` and `Job.write`.
    """
    with Job(source, **{"start": False} | job_kwargs) as job:
        return job.write(
            function,
            items,
            folder,
            key=key,
            shard_items=shard_items,
            errors=errors,
            retry_failed=retry_failed,
            save_dtype=save_dtype,
            format=format,
            facts=facts,
            progress=progress,
        )
