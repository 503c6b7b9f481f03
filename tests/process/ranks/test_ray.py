"""On a Ray cluster a source is resident once per node, and the actors of a stage share it."""

import importlib.util
import json
import sys

import pytest
import torch
from children import run_to_end
from comparing import reference
from ray_clusters import RayCluster, weights
from safetensors.torch import save_file
from warming import CHILD, NBYTES, begun

import shmload

# Do not import Ray here: it adds packages to the path, and what is remembered depends on the path.
if not importlib.util.find_spec("ray"):
    pytest.skip("there is no Ray", allow_module_level=True)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("evicts"),
    pytest.mark.timeout(300),  # more than a cluster's own deadline, which says what is wrong
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, _own_environment):
    """A cluster of one node that uses the tests' /dev/shm."""
    with RayCluster(tmp_path_factory.mktemp("ray") / "driver.log") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def first(cluster):
    return cluster.ask("ray.get_runtime_context().get_node_id()")


@pytest.fixture(scope="module")
def has_own_shm(cluster):
    """Whether the second node has a /dev/shm of its own, which needs root."""
    return cluster.ask("has_own_shm()")


@pytest.fixture(scope="module")
def second(cluster, has_own_shm):
    return cluster.ask(f"add_node({'size=4m' if has_own_shm else None!r})")


@pytest.fixture(autouse=True)
def _empty_nodes(request, evicts):
    """Remove what a test leaves on the second node: `evicts` knows this process's /dev/shm only."""
    cluster = request.getfixturevalue("cluster") if "second" in request.fixturenames else None
    yield
    if cluster and not cluster.is_late:
        for report in cluster.ask(call("cluster_segments")):
            for info in report.report or ():
                cluster.ask(call("evict_cluster", info.name))


def call(function, *args, **kwargs):
    """Return the expression that calls a function of the driver."""
    arguments = [*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())]
    return f"shmray.{function}({', '.join(arguments)})"


def by_node(reports):
    return {report.node_id: report for report in reports}


def read_nbytes(reports):
    assert not [report.error for report in reports if report.error]
    return [report.report.read_nbytes for report in reports]


def test_without_ray_the_error_says_what_to_install():
    code = "import sys; sys.modules['ray'] = None; import shmload.integrations.ray"
    done = run_to_end([sys.executable, "-c", code])
    assert done.returncode == 1
    assert "pip install 'shmload[ray]'" in done.stderr


# Warming ------------------------------------------------------------------------------------------


def test_source_is_decoded_once_per_node_and_evicted_from_each(
    cluster, first, second, has_own_shm, checkpoint
):
    warm = call("warm_cluster", str(checkpoint), torch_dtype="bfloat16")
    reports = cluster.ask(warm)
    assert {report.node_id for report in reports} == {first, second}
    # To shmload, nodes that share /dev/shm are one host.
    assert sorted(read_nbytes(reports)) == [NBYTES if has_own_shm else 0, NBYTES]
    assert read_nbytes(cluster.ask(warm)) == [0, 0]
    assert {i.source for r in cluster.ask(call("cluster_segments")) for i in r.report} == {
        str(checkpoint)
    }

    removed = cluster.ask(call("evict_cluster", str(checkpoint.parent)))
    assert sum(len(report.report) for report in removed) == 1 + has_own_shm
    again = cluster.ask(call("evict_cluster", str(checkpoint)))
    assert [(report.report, report.error) for report in again] == [([], None)] * 2


def test_node_without_room_says_so_and_the_others_do_it(
    cluster, first, second, has_own_shm, tmp_path
):
    if not has_own_shm:
        pytest.skip("to give a node a small /dev/shm takes root")
    path = tmp_path / "large.safetensors"
    save_file({"weight": torch.ones(1 << 20, 2)}, path)
    reports = by_node(cluster.ask(call("warm_cluster", str(path))))
    assert reports[first].report.resident_nbytes > 8 << 20
    error = reports[second].error
    assert type(error) is shmload.SharedMemoryFull
    assert error.needed > 8 << 20 > error.available > 0


def test_node_that_is_not_done_in_time_is_reported_and_stopped(cluster, first, checkpoint, child):
    builder = child(CHILD, "warm", checkpoint)
    begun(builder)
    arguments = {"torch_dtype": "bfloat16", "nodes": [first]}
    warm = call("warm_cluster", str(checkpoint), timeout_s=5.0, **arguments)
    cluster.ask(f"begin('warm', lambda: {warm})")
    cluster.ask(f"until_waiting({first!r})")
    (report,) = cluster.ask("finish('warm')")
    assert type(report.error) is shmload.NodeError
    assert "not done after 5 s" in str(report.error)
    cluster.ask(f"until_idle({first!r})")
    builder.expect("AT")
    builder.say()
    builder.expect("READ")
    assert read_nbytes(cluster.ask(call("warm_cluster", str(checkpoint), **arguments))) == [0]


def test_node_that_dies_in_the_middle_does_not_hold_up_the_others(
    cluster, first, second, has_own_shm, checkpoint, child
):
    builder = child(CHILD, "warm", checkpoint)
    begun(builder)
    victim = cluster.ask("add_node()")
    warm = call("warm_cluster", str(checkpoint), torch_dtype="bfloat16", timeout_s=60)
    cluster.ask(f"begin('warm', lambda: {warm})")
    cluster.ask(f"until_waiting({victim!r})")
    cluster.ask(f"until_waiting({first!r})")
    cluster.ask(f"kill({victim!r})")
    builder.expect("AT")
    builder.say()
    builder.expect("READ")
    reports = by_node(cluster.ask("finish('warm')"))
    assert set(reports) == {first, second, victim}
    assert type(reports[victim].error) is shmload.NodeError
    assert victim[:12] in str(reports[victim].error)
    assert read_nbytes([reports[first]]) == [0]
    assert read_nbytes([reports[second]]) == [NBYTES if has_own_shm else 0]


# Stages -------------------------------------------------------------------------------------------


def test_actors_of_a_node_share_one_copy_that_one_of_them_has_decoded(
    cluster, first, second, has_own_shm, saved, tmp_path
):
    source, components = saved("stable-diffusion"), ["vae", "text_encoder"]
    actors = 3  # on two nodes with two CPUs each: one node has two actors
    rows = cluster.ask(
        f"run_stage(Witness, {str(source)!r}, {components}, {actors}, components={components},"
        f" torch_dtype='bfloat16', meeting=Path({str(tmp_path)!r}), actors={actors})"
    )
    wanted = reference(source, torch.bfloat16)
    bits = b"".join(weights(getattr(wanted, name)) for name in components)
    assert sorted(row["id"] for row in rows) == list(range(4 * actors))
    assert all(row["weights"] == bits for row in rows)

    notes = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert len(notes) == actors
    assert all(note["missing"] == ["image_encoder", "safety_checker", "unet"] for note in notes)
    by_place = [[note for note in notes if note["node"] == node] for node in (first, second)]
    for there in by_place:
        inodes = there[0]["segments"]
        assert len(inodes) == len(components)
        assert all(note["segments"] == inodes for note in there)
    decoded = [sum(note["decoded"] for note in there) for there in by_place]
    assert decoded == [2, 2] if has_own_shm else sum(decoded) == 2
