"""Measure: the placements of `auto` beside those of accelerate and diffusers.

Nine pipelines with the published configurations, in bfloat16, on five rigs. All have the same
modules, sizes and limits, the GPUs less a tenth, and are judged by the same rule.
"""

import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import torch

from benchmarks.plan_peers import Peer, peer_plans
from benchmarks.published import PIPELINES
from benchmarks.published_models import Model
from shmload._building.module_trees import component_of
from shmload._placement.cost import Cost, cost_of
from shmload._placement.device_map import expand
from shmload._placement.inventory import Inventory, parse_inventory
from shmload._placement.modules import Component
from shmload._placement.placement import place
from shmload._placement.strategies import rooms_of

RIGS = {
    "1x8": "8GiB",
    "2x24": "2x24GiB",
    "4x24": "4x24GiB",
    "24+80": "24GiB,80GiB",
    "8x16": "8x16GiB",
}


@dataclass(frozen=True, slots=True)
class Pair:
    """A pipeline on a rig: the placement of shmload, and the best of the others."""

    pipeline: str
    rig: str
    modules: int
    """Number of modules of the pipeline."""
    ours: Cost
    our_seconds: float
    theirs: Cost
    their_seconds: float
    their_way: str

    @property
    def verdict(self) -> str:
        """`better`, `equal` or `worse`, by bytes at each step, cuts and the fullest device."""
        ours, theirs = rank(self.ours), rank(self.theirs)
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
        component: torch.nn.Module.to(entry.make(), torch.bfloat16)
        for component, entry in PIPELINES[name][1].items()
        if isinstance(entry, Model)
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
        rooms = rooms_of(inventory)
        seconds = statistics.median(_timed(components, inventory) for _ in range(rounds))
        theirs = _best_peer(models, components, rooms, rounds)
        yield Pair(
            pipeline=name,
            rig=rig,
            modules=sum(1 for model in models.values() for _ in model.modules()),
            ours=_cost_of_auto(components, inventory),
            our_seconds=seconds,
            theirs=cost_of(components, theirs.devices, rooms),
            their_seconds=theirs.seconds,
            their_way=theirs.name,
        )


def _timed(components: tuple[Component, ...], inventory: Inventory) -> float:
    began = time.perf_counter()
    place(components, "auto", inventory)
    return time.perf_counter() - began


def _cost_of_auto(components: tuple[Component, ...], inventory: Inventory) -> Cost:
    placement = place(components, "auto", inventory)
    return cost_of(components, expand(placement.device_map, components), rooms_of(inventory))


def _best_peer(
    models: Mapping[str, torch.nn.Module],
    components: tuple[Component, ...],
    rooms: Mapping[str, int],
    rounds: int,
) -> Peer:
    """Return the best placement that keeps the limits, with its median time."""
    runs = [list(peer_plans(models, components, rooms)) for _ in range(rounds)]
    costs = [cost_of(components, peer.devices, rooms) for peer in runs[0]]
    within = [n for n, cost in enumerate(costs) if cost.fullest <= 1] or range(len(costs))
    best = min(within, key=lambda number: rank(costs[number]))
    seconds = statistics.median(run[best].seconds for run in runs)
    return Peer(runs[0][best].name, runs[0][best].devices, seconds)
