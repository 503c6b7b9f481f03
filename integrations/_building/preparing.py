"""Loads a pipeline before its program starts, in a copy of a template.

The copy gives the segments up until the program asks for the pipeline (`parking`), so anybody may
remove them meanwhile. A template imports this module when it starts: a copy that imports modules of
its own would have others than its program.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch

from shmload._host.fingerprint import files_below
from shmload._loading.verbs import plan
from shmload._segments.parking import park
from shmload._segments.view import remove_dead_views
from shmload.integrations._building.prepared import Prepared, Request, put
from shmload.integrations._building.unchanged import Facts


def prepare(request: Request, load_pipeline: Callable[..., Any]) -> set[int]:
    """Load a pipeline ahead; return the descriptors that have to stay open for it.

    Nothing is decoded: if its segments are not resident, nothing is prepared.

    Args:
        request: what the last program has asked for.
        load_pipeline: the function that it has called.

    Raises:
        Exception: it cannot be prepared.
    """
    here = os.getcwd()
    os.chdir(request.folder)
    try:
        is_kept = request.keep is True
        if plan(request.source, dtype=request.dtype, keep=is_kept).decode_nbytes:
            return set()
        folder = os.path.abspath(request.source)
        files = files_below(folder)
        state = torch.get_rng_state()
        source = Path(request.source) if request.is_path else request.source
        pipeline = load_pipeline(source, **_arguments_of(request))
        if not torch.equal(state, torch.get_rng_state()):
            raise ValueError("the load has drawn random numbers")
        facts = Facts(folder, files, [pipeline, *pipeline.components.values()])
    finally:
        os.chdir(here)
        # A copy that was in the midst of this was ended, if its program came too early.
        remove_dead_views()
    parked = park()
    put(Prepared(request, pipeline, facts, parked))
    return parked.numbers


def _arguments_of(request: Request) -> dict[str, Any]:
    dtype: Any = request.dtype
    if dtype is not None and request.is_torch_dtype:
        dtype = getattr(torch, dtype)
    pipeline_class: Any = request.pipeline_class
    if request.is_class:
        pipeline_class = getattr(diffusers, pipeline_class)
    return {"dtype": dtype, "keep": request.keep, "pipeline_class": pipeline_class}
