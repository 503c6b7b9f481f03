"""Ray: sources resident on every node of a cluster, and stages of Ray Data that share them.

Guarantee: a failure on one node is the error in that node's report, within a deadline. It neither
delays nor fails the other nodes.
"""

import functools
import os
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from shmload import evict, segments, warm
from shmload.errors import NodeError, SegmentNotFound, ShmloadError, needing
from shmload.integrations.loads import load_pipeline

with needing("ray", "shmload.integrations.ray", "'shmload[ray]'"):
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


class NodeReport(NamedTuple):
    """The result of one node, or its error."""

    node_id: str
    """Ray's id of the node."""
    report: Any
    """The result; None if the node failed."""
    error: ShmloadError | None
    """Why the node failed; None if it did not."""


def warm_cluster(
    source: str | os.PathLike[str],
    *,
    nodes: Collection[str] | None = None,
    timeout_s: float = 3600.0,
    **warm_kwargs: Any,
) -> list[NodeReport]:
    """Make a source resident on every node that is alive now, once on each.

    A node where it is resident reads no byte. Each node needs shmload and the source: a path that
    is valid there, or a hub id. The task asks Ray for no CPU, so it does not wait for running jobs.

    Args:
        source: as for `warm`. A path that exists here is made absolute.
        nodes: ids of the nodes; None for all.
        timeout_s: deadline for all nodes together, in seconds. On a node that is not done by then
            the process is killed; the next load there removes its unfinished segments.
        warm_kwargs: as for `warm`: `dtype`, `components`, `workers`, ...

    Returns:
        One `WarmReport` for each node. Its error is what `warm` raised there, such as a
        `CapacityError`; or a `NodeError`: the node died, missed the deadline, or failed otherwise.
    """
    work = functools.partial(warm, _absolute(source), progress=False, **warm_kwargs)
    return _on_each_node(work, nodes, timeout_s)


def evict_cluster(source: str | os.PathLike[str], **options: Any) -> list[NodeReport]:
    """Remove the resident segments of a source on every node that is alive now.

    Args:
        source: as for `evict`.
        options: `nodes` and `timeout_s`, as for `warm_cluster`.

    Returns:
        For each node the segments that were removed. The error is a `SegmentBusy` if a process is
        attached to one; the others are removed.
    """
    return _on_each_node(functools.partial(_evict, _absolute(source)), **options)


def cluster_segments(**options: Any) -> list[NodeReport]:
    """List the segments on every node that is alive now; options as for `evict_cluster`."""
    return _on_each_node(segments, **options)


def _evict(source: str) -> list[Any]:
    try:
        return [*evict(source)]
    except SegmentNotFound:
        return []


def _absolute(source: str | os.PathLike[str]) -> str:
    """Return an absolute path, or a hub id: Ray's processes have other working directories."""
    return os.path.abspath(source) if os.path.exists(source) else os.fspath(source)


def _on_each_node(
    work: Callable[[], Any], nodes: Collection[str] | None = None, timeout_s: float = 3600.0
) -> list[NodeReport]:
    """Call a function once on each node, all at the same time, and return the reports."""
    # No retries: the process may have been killed because the node ran out of memory.
    run = ray.remote(num_cpus=0, max_retries=0)(_run)
    alive = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    wanted = alive if nodes is None else [*nodes]
    tasks = {}
    for node in {*wanted}.intersection(alive):
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        tasks[node] = run.options(scheduling_strategy=strategy).remote(work)
    late = [*tasks.values()]
    try:
        if late:
            _, late = ray.wait(late, num_returns=len(late), timeout=timeout_s)
    finally:  # a Ctrl-C ends them too
        for task in late:
            ray.cancel(task, force=True)  # not forced, it would end only when its own wait does
    reports = []
    for node in wanted:
        report, error = None, None
        if node not in tasks:
            error = _node_error(node, "it is not one of the nodes that are alive")
        elif tasks[node] in late:
            error = _node_error(node, f"not done after {timeout_s:g} s; raise timeout_s")
        else:
            try:
                # It is ready; this takes longer only if the node dies in this moment.
                report, error = ray.get(tasks[node], timeout=30.0)
            except RayError as exc:  # it has died, or its task raised an error that is not ours
                error = _node_error(node, str(exc).strip().rpartition("\n")[2])
                error.add_note(str(exc))
        reports.append(NodeReport(node, report, error))
    return reports


def _node_error(node: str, reason: str) -> NodeError:
    return NodeError(f"node {node[:12]}: {reason}", node_id=node)


def _run(work: Callable[[], Any]) -> tuple[Any, ShmloadError | None]:
    """Call a function in a process of Ray's; return shmload's errors instead of raising them."""
    try:
        return work(), None
    except ShmloadError as exc:
        return None, exc


class Stage:
    """A stage of Ray Data that calls a function with a pipeline and each batch.

    For `Dataset.map_batches`: all its actors on a node share one copy of the weights. The first
    actor decodes what is not resident there; the others wait for it and attach.

        images.map_batches(
            Stage,
            fn_constructor_args=(encode, "/models/sd"),
            fn_constructor_kwargs={"components": ["vae"], "dtype": "bfloat16"},
            compute=ray.data.ActorPoolStrategy(size=8),
            batch_size=16,
        )

    Args:
        fn: called with the pipeline, a batch, and the `fn_args` and `fn_kwargs` of `map_batches`;
            returns or yields batches. It may be defined anywhere, in `__main__` too.
        source: as for `load_pipeline`; a path must be absolute, and the same on every node.
        load_kwargs: as for `load_pipeline`: `components`, `dtype`, `device_map="cuda"`, ...

    Attributes:
        pipe: the pipeline. Its weights are mapped copy-on-write: a write to one is private to the
            actor.

    Raises:
        ShmloadError: what `load_pipeline` raises; Ray Data then ends the job with it.
    """

    def __init__(self, fn: Callable[..., Any], source: str, **load_kwargs: Any) -> None:
        self._fn = fn
        self.pipe = load_pipeline(source, share=True, **load_kwargs)

    def __call__(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what the function returns for a batch."""
        return self._fn(self.pipe, batch, *args, **kwargs)
