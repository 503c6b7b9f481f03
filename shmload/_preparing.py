"""Loads a pipeline before its program starts, in a branch of a template.

The branch gives the segments up until a program asks for the pipeline (`parking`), so anybody may
remove them meanwhile. A template imports this module when it starts.
"""

import contextlib
import multiprocessing.context
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import torch

import shmload
from shmload._building.draws import Draw, Draws, repeat
from shmload._building.prepared import Prepared, Request, put
from shmload._building.unchanged import Facts
from shmload._host.fingerprint import files_below
from shmload._loading.verbs import plan
from shmload._segments.parking import park
from shmload._segments.view import remove_dead_views


def decodes(request: Request) -> bool:
    """Tell whether a load has to decode: then it takes long, and leaves nothing for others."""
    with _in_folder(request):
        is_kept = request.keep is True
        return plan(request.source, dtype=request.dtype, keep=is_kept).decode_nbytes > 0


def load(request: Request) -> Any:
    """Load a pipeline as its program does."""
    with _in_folder(request):
        source = Path(request.source) if request.is_path else request.source
        return shmload.load_pipeline(source, **_arguments_of(request))


def load_ahead(request: Request) -> tuple[Any, tuple[Draw, ...]]:
    """Load a pipeline, and leave torch's random state as it was before, if that can be made up for.

    Returns:
        The pipeline; and the random numbers that its load draws, which its program has to draw.
    """
    before = torch.get_rng_state()
    with Draws() as draws:
        pipeline = load(request)
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    repeat(draws.found)
    # Otherwise something else has changed the state, and it stays changed.
    torch.set_rng_state(before if torch.equal(torch.get_rng_state(), after) else after)
    return pipeline, tuple(draws.found)


def prepare(request: Request) -> set[int]:
    """Load a pipeline ahead; return the descriptors that have to stay open for it.

    Raises:
        Exception: it cannot be prepared.
    """
    try:
        folder = os.path.join(request.folder or "/", request.source)
        files = files_below(folder)
        with _context_restored():
            pipeline, draws = load_ahead(request)
        facts = Facts(folder, files, [pipeline, *pipeline.components.values()])
    finally:
        # A copy that was in the midst of this was ended.
        remove_dead_views()
    parked = park()
    put(Prepared(request, pipeline, facts, parked, lambda: repeat(draws)))
    return parked.numbers


@contextlib.contextmanager
def _context_restored() -> Iterator[None]:
    """Have a program choose how its processes start, also after a load that has made a lock."""
    context: Any = multiprocessing.context
    before = context._default_context._actual_context
    try:
        yield
    finally:
        context._default_context._actual_context = before


@contextlib.contextmanager
def _in_folder(request: Request) -> Iterator[None]:
    here = os.getcwd()
    os.chdir(request.folder or "/")
    try:
        yield
    finally:
        os.chdir(here)


def _arguments_of(request: Request) -> dict[str, Any]:
    dtype: Any = request.dtype
    if dtype is not None and request.is_torch_dtype:
        dtype = getattr(torch, dtype)
    pipeline_class: Any = request.pipeline_class
    if request.is_class:
        pipeline_class = getattr(diffusers, pipeline_class)
    return {"dtype": dtype, "keep": request.keep, "pipeline_class": pipeline_class}
