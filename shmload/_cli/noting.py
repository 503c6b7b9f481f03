"""Tells templates of the pipelines that are resident: they load them ahead of any program."""

import os

from shmload._templates import look, notes
from shmload._templates.messages import Noted
from shmload._templates.place import PlaceUnsafe
from shmload.integrations._building.prepared import Request, encode


def note_for_templates(source: str, dtype: object) -> None:
    """Have the templates of this user, now and later, load a pipeline ahead.

    Args:
        source: what was warmed; what is no directory of a pipeline is left alone.
        dtype: its name, or None; a dtype for each component is left alone.
    """
    if not isinstance(dtype, str | None) or not os.path.exists(f"{source}/model_index.json"):
        return
    request = Request(
        source=source,
        is_path=False,
        folder="" if os.path.isabs(source) else os.getcwd(),
        dtype=dtype,
        is_torch_dtype=False,
        keep=True,
        pipeline_class=None,
        is_class=False,
    )
    try:
        notes.note_warmed(encode(request))
        look.tell_all(Noted("", [], [], 0, 0))
    except (OSError, PlaceUnsafe, UnicodeEncodeError):  # there are no templates then
        return
