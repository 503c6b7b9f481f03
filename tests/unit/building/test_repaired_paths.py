"""Paths of a view are replaced in objects and in errors."""

from pathlib import Path

import pytest
import torch

from shmload._building.paths import PathRepair
from shmload._host.limits import repair_errors

_VIEW = Path("/dev/shm/shmload-0-view-0123")


@pytest.fixture
def repair():
    return PathRepair(_VIEW, "models/sd", "models/sd")


class _Holder:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


def test_strings_are_repaired_wherever_they_are(repair):
    from diffusers.configuration_utils import FrozenDict  # not while all tests are collected

    inner = _Holder(path=f"{_VIEW}/unet/config.json")
    frozen = FrozenDict({"_name_or_path": f"{_VIEW}/unet"})
    held = _Holder(
        root=str(_VIEW),
        nested={"list": [f"{_VIEW}/a", {"deep": f"{_VIEW}/b"}], "pair": (f"{_VIEW}/c", 1)},
        as_path=_VIEW / "vae",
        inner=inner,
        frozen=frozen,
        tensor=torch.ones(3),
        other="/dev/shm/somebody-else",
    )
    held.itself = held
    repair.repair(held)
    assert held.root == "models/sd"
    assert held.nested == {
        "list": ["models/sd/a", {"deep": "models/sd/b"}],
        "pair": ("models/sd/c", 1),
    }
    assert held.as_path == Path("models/sd/vae")
    assert inner.path == "models/sd/unet/config.json"
    assert frozen["_name_or_path"] == "models/sd/unet"
    assert held.other == "/dev/shm/somebody-else"


def test_what_the_user_gave_stands_for_the_root():
    given = Path("models/sd")
    held = _Holder(root=str(_VIEW), part=f"{_VIEW}/unet")
    PathRepair(_VIEW, "models/sd/", given).repair(held)
    assert held.root is given
    assert held.part == "models/sd/unet"


@pytest.mark.parametrize("is_cause", [True, False])
def test_error_and_the_one_before_it_are_repaired(repair, is_cause):
    def fail():
        try:
            raise FileNotFoundError(2, "No such file", f"{_VIEW}/vae")
        except FileNotFoundError as exc:
            error = ValueError(f"cannot load {_VIEW}/vae")
            if is_cause:
                raise error from exc
            raise error  # noqa: B904 as a library may: a traceback shows the other error too

    with pytest.raises(ValueError, match="cannot load") as raised:
        fail()
    repair_errors(raised.value, repair.text)
    assert str(raised.value) == "cannot load models/sd/vae"
    assert raised.value.__context__.filename == "models/sd/vae"
