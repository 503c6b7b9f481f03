"""On a Ray cluster a source is resident once per node, and the actors of a stage share it."""

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from children import run_to_end
from comparing import reference
from safetensors.torch import save_file
from warming import NBYTES, TENSORS

# Do not import Ray here: it adds packages to the path, and what is remembered depends on the path.
if not importlib.util.find_spec("ray"):
    pytest.skip("there is no Ray", allow_module_level=True)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

_SUPPORT = Path(__file__).parents[2] / "support"
# In a pid namespace, where allowed, the kernel ends all of Ray's processes with the driver: some do
# not end by themselves, and they have process groups of their own.
_APART = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


@pytest.fixture(scope="module")
def seen(saved, tmp_path_factory):
    """What the driver has seen on its cluster."""
    folder = tmp_path_factory.mktemp("ray")
    save_file(TENSORS, folder / "model.safetensors", {"format": "pt"})
    apart = _APART if run_to_end([*_APART, "true"]).returncode == 0 else ()
    words = [sys.executable, "-W", "ignore", _SUPPORT / "ray_driver.py"]
    # A short path: Ray's sockets lie there, and a socket's path has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as short:
        environment = os.environ | {
            "PYTHONPATH": f"{_SUPPORT.parents[1]}{os.pathsep}{_SUPPORT}",
            "RAY_TMPDIR": short,
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            # Else actors would wait while other tests use all cores.
            "RAY_worker_niceness": "0",
        }
        done = subprocess.run(
            [*apart, *words, folder / "model.safetensors", saved("stable-diffusion"), folder],
            env=environment,
            capture_output=True,
            text=True,
            timeout=360,
        )
    assert done.returncode == 0, done.stderr[-9000:]
    return json.loads(done.stdout) | {"source": str(folder / "model.safetensors")}


def test_without_ray_the_error_says_what_to_install():
    code = "import sys; sys.modules['ray'] = None; import shmload.integrations.ray"
    done = run_to_end([sys.executable, "-c", code])
    assert done.returncode == 1
    assert "pip install 'shmload[ray]'" in done.stderr


def test_source_is_decoded_once_per_node_and_evicted_from_each(seen):
    # To shmload, nodes that share /dev/shm are one host.
    assert sorted(seen["warmed"].values()) == [NBYTES if seen["has_own_shm"] else 0, NBYTES]
    assert seen["again"] == {"first": 0, "second": 0}
    assert seen["listed"] == [seen["source"]]
    assert seen["evicted"] == 1 + seen["has_own_shm"]


def test_node_without_room_says_so_and_the_others_do_it(seen):
    if not seen["has_own_shm"]:
        pytest.skip("to give a node a small /dev/shm takes root")
    assert seen["full"]["first"] == 8 << 20
    kind, said = seen["full"]["second"]
    assert kind == "SharedMemoryFull"
    assert "8.00 MiB needed" in said


def test_node_that_is_not_done_in_time_is_reported_and_stopped(seen):
    kind, said = seen["late"]["first"]
    assert kind == "NodeError"
    assert "not done after 5 s" in said
    assert seen["late_again"] == {"first": 0}  # the builder that it waited for was not disturbed


def test_node_that_dies_in_the_middle_does_not_hold_up_the_others(seen):
    kind, said = seen["dead"].pop("victim")
    assert kind == "NodeError"
    assert "victim" in said
    assert seen["dead"] == {"first": 0, "second": NBYTES if seen["has_own_shm"] else 0}


def test_actors_of_a_node_share_one_copy(seen, saved):
    pipe = reference(saved("stable-diffusion"), torch.bfloat16)
    tensors = [*pipe.vae.state_dict().values(), *pipe.text_encoder.state_dict().values()]
    raw = b"".join(each.view(torch.uint8).numpy().tobytes() for each in tensors)
    numbers, digests, nodes, segments = zip(*seen["rows"], strict=True)
    assert sorted(numbers) == list(range(12))
    assert {*digests} == {hashlib.sha256(raw).hexdigest()}
    copies = {(node, *each) for node, each in zip(nodes, segments, strict=True)}
    assert len(copies) == len({*nodes}) == 2
    assert {len(each) for each in segments} == {2}
