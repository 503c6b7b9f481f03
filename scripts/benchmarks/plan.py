"""The placements of `auto` beside those of accelerate and diffusers: `scripts/bench plan`.

Nine pipelines with the published configurations, in bfloat16, on five rigs. All have the same
modules, sizes and limits, the GPUs less a tenth, and are judged by the same rule.

Accelerate knows one model, so a pipeline is a module with its models as children. Its maps are made
in four ways: for the devices' limits as they are, and for those of `get_balanced_memory`; with the
models in the pipeline's order, and with those first that run at every step. Diffusers' `balanced`
is compared where it places every component on a GPU.
"""

import logging
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from accelerate.utils import get_balanced_memory, infer_auto_device_map
from diffusers.pipelines.pipeline_loading_utils import _assign_components_to_devices

from benchmarks.cost import cost_of
from benchmarks.published import PIPELINES
from shmload._building.module_trees import component_of, whole_classes
from shmload._placement.auto import Cost
from shmload._placement.device_map import Devices, expand
from shmload._placement.inventory import parse_inventory
from shmload._placement.modules import Component, join
from shmload._placement.placement import place
from shmload._tables import Page, Table

RIGS = {
    "1x8": "8GiB",
    "2x24": "2x24GiB",
    "4x24": "4x24GiB",
    "24+80": "24GiB,80GiB",
    "8x16": "8x16GiB",
}
# As much as `infer_auto_device_map` ever wants; without it the disk would take the rest.
_HOST_NBYTES = 1 << 50
_HEAD = ("pipeline", "rig", "each step", "once", "cuts", "fullest", "plan", "", "of the others")
_UNITS = ("", "GiB", "GiB", "GiB", "", "", "ms", "", "each step, once, cuts, fullest, ms, way")


@dataclass(frozen=True, slots=True)
class Placed:
    """A placement: its cost, how long it took to plan, and how it was made."""

    cost: Cost
    seconds: float
    way: str = ""

    def cells(self) -> tuple[str, ...]:
        """Return what the table shows of it."""
        return (
            f"{self.cost.step_nbytes / 2**30:.2f}",
            f"{self.cost.once_nbytes / 2**30:.2f}",
            str(self.cost.cuts),
            f"{self.cost.fullest:.1%}",
            f"{self.seconds * 1000:.0f}",
        )

    def as_json(self) -> dict[str, Any]:
        """Return it for `json.dump`."""
        way = {"way": self.way} if self.way else {}
        return self.cost._asdict() | {"seconds": self.seconds} | way


@dataclass(frozen=True, slots=True)
class Pair:
    """A pipeline on a rig: the placement of shmload, and the best of the others."""

    pipeline: str
    rig: str
    modules: int
    """Number of modules of the pipeline."""
    ours: Placed
    theirs: Placed

    @property
    def verdict(self) -> str:
        """`better`, `equal` or `worse`, by bytes at each step, cuts and the fullest device."""
        ours, theirs = rank(self.ours.cost), rank(self.theirs.cost)
        return "equal" if ours == theirs else "better" if ours < theirs else "worse"


def rank(cost: Cost) -> tuple[float, ...]:
    """Return what two placements are compared by, as exactly as the table shows it.

    Weights that travel once in a generation do not count, though `auto` lets few bytes of them
    wait: accelerate does not tell them from those that travel at every step.
    """
    return round(cost.step_nbytes / 2**30, 2), cost.cuts, round(cost.fullest, 3)


@cache
def models_of(name: str) -> dict[str, torch.nn.Module]:
    """Return the models of a published pipeline in bfloat16, on the meta device."""
    # ModelMixin.to warns of modules that its loader keeps in float32.
    return {
        component: torch.nn.Module.to(model.make(), torch.bfloat16)
        for component, model in PIPELINES[name].items()
    }


def compare_all(names: Iterable[str], rounds: int, announce: Callable[[str], None]) -> list[Pair]:
    """Compare the placements of pipelines on every rig.

    Args:
        names: of `PIPELINES`.
        rounds: how often each plan is timed.
        announce: called with each pair as soon as it is done.
    """
    # Accelerate warns that the GPUs of the rigs are not here, and of buffers.
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    pairs = []
    for name in names:
        for pair in compare(name, rounds):
            announce(f"{pair.pipeline} on {pair.rig}: {pair.verdict}")
            pairs.append(pair)
    return pairs


def compare(name: str, rounds: int, rigs: Iterable[str] = RIGS) -> Iterator[Pair]:
    """Compare the placements of one pipeline on some rigs.

    Args:
        name: one of `PIPELINES`.
        rounds: how often each plan is timed; the median counts.
        rigs: of `RIGS`.
    """
    models = models_of(name)
    components = tuple(component_of(key, model) for key, model in models.items())
    for rig in rigs:
        inventory = parse_inventory(RIGS[rig])
        rooms = inventory.rooms()
        our_seconds = []
        for _ in range(rounds):
            began = time.perf_counter()
            placement = place(components, "auto", inventory)
            our_seconds.append(time.perf_counter() - began)
        cost = cost_of(components, expand(placement.device_map, components), rooms)
        yield Pair(
            pipeline=name,
            rig=rig,
            modules=sum(1 for model in models.values() for _ in model.modules()),
            ours=Placed(cost, statistics.median(our_seconds)),
            theirs=_best_peer(models, components, rooms, rounds),
        )


def _best_peer(
    models: Mapping[str, torch.nn.Module],
    components: tuple[Component, ...],
    rooms: Mapping[str, int],
    rounds: int,
) -> Placed:
    """Return the best placement that keeps the limits, with its median time."""
    runs = [list(_peers(models, components, rooms)) for _ in range(rounds)]
    costs = [cost_of(components, devices, rooms) for _, devices, _ in runs[0]]
    within = [n for n, cost in enumerate(costs) if cost.fullest <= 1] or range(len(costs))
    best = min(within, key=lambda number: rank(costs[number]))
    seconds = statistics.median(run[best][2] for run in runs)
    return Placed(costs[best], seconds, runs[0][best][0])


def _peers(
    models: Mapping[str, torch.nn.Module],
    components: tuple[Component, ...],
    rooms: Mapping[str, int],
) -> Iterator[tuple[str, Devices, float]]:
    """Yield the placements of other libraries: the way, the device of every unit, the seconds."""
    names = dict(enumerate(rooms))
    limits = {index: rooms[name] for index, name in names.items()} | {"cpu": _HOST_NBYTES}
    whole = sorted({name for model in models.values() for name in whole_classes(model)})
    each_step = {component.name for component in components if component.runs_each_step}
    for order, ordered in (
        ("pipeline's order", list(models)),
        ("transformer first", sorted(models, key=lambda name: name not in each_step)),
    ):
        box = torch.nn.Module()
        for name in ordered:
            box.add_module(name, models[name])
        for way in ("as they are", "balanced"):
            began = time.perf_counter()
            allowed = dict(limits)
            if way == "balanced":
                allowed = get_balanced_memory(box, allowed, no_split_module_classes=whole)
            found = infer_auto_device_map(box, allowed, no_split_module_classes=whole)
            seconds = time.perf_counter() - began
            device_map = {path: names.get(device, "cpu") for path, device in found.items()}
            yield f"accelerate, {way}, {order}", _spread(device_map, components), seconds
    sizes = {c.name: c.nbytes for c in sorted(components, key=lambda c: -c.nbytes)}
    began = time.perf_counter()
    assigned = _assign_components_to_devices(sizes, {i: limits[i] for i in names})
    seconds = time.perf_counter() - began
    homes = {name: names[i] for i, group in assigned.items() if i in names for name in group}
    if homes.keys() == sizes.keys():
        yield "diffusers, balanced", _spread(homes, components), seconds


def _spread(device_map: Mapping[str, str], components: tuple[Component, ...]) -> Devices:
    """Return the device of every unit: its own entry's, or that of the nearest module above it.

    Accelerate leaves out tensors that a module holds beside its children, if they are buffers; they
    lie where the map begins.
    """
    devices = {}
    for component in components:
        for path, _ in component.module.units():
            unit = at = join(component.name, path)
            while at and at not in device_map:
                at = at.rpartition(".")[0]
            devices[unit] = device_map.get(at, next(iter(device_map.values())))
    return devices


# The report ---------------------------------------------------------------------------------------


def format_pairs(machine: Mapping[str, str], pairs: Sequence[Pair]) -> str:
    """Return the whole report as text."""
    facts = "\n".join(f"{name:26} {value}" for name, value in machine.items())
    table = Table(titles=_HEAD, rows=[_UNITS, *map(_row, pairs)])
    counts = ", ".join(f"{count} {verdict}" for verdict, count in _counts(pairs).items())
    slowest_s = max(pair.ours.seconds for pair in pairs)
    sums = (
        f"\nof {len(pairs)} pairs: {counts} than the best of accelerate and diffusers\n"
        f"slowest plan: {slowest_s * 1000:.0f} ms"
    )
    return Page((f"{facts}\n", table, sums)).text()


def pairs_as_json(machine: Mapping[str, str], pairs: Sequence[Pair]) -> dict[str, Any]:
    """Return the whole report as a value for `json.dump`; times in seconds, sizes in bytes."""
    return {
        "machine": dict(machine),
        "counts": _counts(pairs),
        "pairs": [
            {
                "pipeline": pair.pipeline,
                "rig": pair.rig,
                "modules": pair.modules,
                "verdict": pair.verdict,
                "ours": pair.ours.as_json(),
                "best of the others": pair.theirs.as_json(),
            }
            for pair in pairs
        ],
    }


def _counts(pairs: Iterable[Pair]) -> dict[str, int]:
    found = Counter(pair.verdict for pair in pairs)
    return {verdict: found[verdict] for verdict in ("better", "equal", "worse")}


def _row(pair: Pair) -> tuple[str, ...]:
    theirs = ", ".join((*pair.theirs.cells(), pair.theirs.way))
    return pair.pipeline, pair.rig, *pair.ours.cells(), pair.verdict, theirs
