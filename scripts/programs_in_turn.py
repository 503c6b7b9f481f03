#!/usr/bin/env python3
"""Run three programs over two pipelines in turn by `shmload run`, while faults happen.

Before a run the weights may be replaced by others of the same size, segments removed, a template or
one of its copies killed or stopped; or a program runs that changes the libraries and the
interpreter. Each program must get the bytes that its source had during its run, the settings of a
new process and random numbers of its own, and end within a deadline. Afterwards no process may be
left. Exit code 1 if a run breaks this.

    .venv/bin/python scripts/programs_in_turn.py --seconds 1800 --seed 1
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import click
from soaking.processes import pids_with, signalling, take_own_shared_memory

_DEADLINE_S = 90.0
_SHM_SIZE = "1g"
_VERSIONS = 3
_FAULT_SHARE = 0.3
_PAUSES_S = (0.0, 0.0, 0.2, 1.0)

_MAKE = """\
import sys, torch
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
for version in range(int(sys.argv[2])):
    torch.manual_seed(version)
    model = UNet2DModel(sample_size=8, block_out_channels=(32, 64), layers_per_block=1,
                        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                        up_block_types=("AttnUpBlock2D", "UpBlock2D"))
    DDPMPipeline(model, DDPMScheduler()).save_pretrained(f"{sys.argv[1]}-{version}")
"""
_DIGEST = """\
import hashlib
digest = hashlib.blake2b(digest_size=16)
for name, tensor in sorted(pipe.unet.state_dict().items()):
    digest.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
"""
_EXPECTED = f"""\
import sys, torch
from diffusers import DDPMPipeline
for source in sys.argv[1:]:
    pipe = DDPMPipeline.from_pretrained(source, torch_dtype=torch.bfloat16)
{"".join(f"    {line}" for line in _DIGEST.splitlines(keepends=True))}
    print(digest.hexdigest())
"""
_LOADS = f"""\
import decimal, json, logging, socket, sys
import numpy, shmload, torch
said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("shmload").addHandler(handler)
logging.getLogger("shmload").setLevel("INFO")
pipe = shmload.load_pipeline(sys.argv[1], dtype="bfloat16", keep=True)
{_DIGEST}
state = [str(torch.get_default_dtype()), torch.is_grad_enabled(), torch.get_num_threads(),
         sys.getrecursionlimit(), socket.getdefaulttimeout(), decimal.getcontext().prec,
         sys.excepthook is sys.__excepthook__, json.dumps([1]), numpy.geterr(),
         "polluted" in sys.modules, getattr(torch.nn.Linear, "polluted", None)]
print(json.dumps([digest.hexdigest(), state, torch.rand(4, dtype=torch.float64).tolist(),
                  any("what an earlier load has built" in each for each in said)]))
"""
_POLLUTED = """\
import decimal, json, socket, sys
import numpy, torch
torch.set_default_dtype(torch.float64)
torch.set_grad_enabled(False)
torch.set_num_threads(1)
torch.nn.Linear.polluted = True
sys.setrecursionlimit(5000)
sys.excepthook = lambda *_: None
socket.setdefaulttimeout(7)
decimal.getcontext().prec = 5
decimal.DefaultContext.prec = 5
numpy.seterr(all="raise")
json.dumps = lambda *_, **__: "polluted"
"""


_PROGRAMS = {"loads.py": _LOADS, "again.py": _LOADS, "pollutes.py": "import polluted\n"}


class Turns:
    """The programs, their sources and what goes wrong.

    Args:
        folder: of all files; its path is short.
        seed: decides the order of programs and faults.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._rng = random.Random(seed)
        runtime = folder / "run"
        runtime.mkdir(mode=0o700)
        self._mark = os.fsencode(runtime)
        self._environment = os.environ | {
            "PYTHONPATH": str(folder / "packages"),
            "SHMLOAD_CACHE_DIR": str(folder / "cache"),
            "XDG_RUNTIME_DIR": str(runtime),
        }
        self.counts: Counter[str] = Counter()
        self.findings: list[str] = []
        self._draws: set[str] = set()
        self._sources = folder / "first", folder / "second"
        self._version = [0, 0]
        self._make()

    def _python(self, *words: object) -> "subprocess.CompletedProcess[str]":
        """Run Python, which may fail.

        Raises:
            subprocess.TimeoutExpired: it does not end in time.
        """
        return subprocess.run(
            [sys.executable, *map(str, words)],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
        )

    def _shmload(self, *words: object) -> "subprocess.CompletedProcess[str]":
        return self._python("-m", "shmload", *words)

    def _alive(self) -> list[int]:
        """Return the processes of the templates here."""
        return list(pids_with(self._mark, file="cmdline"))

    def _make(self) -> None:
        """Write the sources and programs, and find out what the programs have to print."""
        (self._folder / "packages").mkdir()
        (self._folder / "packages" / "polluted.py").write_text(_POLLUTED)
        for name, text in _PROGRAMS.items():
            (self._folder / name).write_text(text)
        stored = self._folder / "stored"
        self._python("-c", _MAKE, stored, _VERSIONS).check_returncode()
        versions = [f"{stored}-{version}" for version in range(_VERSIONS)]
        self._digests = self._python("-c", _EXPECTED, *versions).stdout.split()
        for source in self._sources:
            shutil.copytree(versions[0], source)
        alone = self._python(self._folder / "loads.py", self._sources[0])
        self._state = json.loads(alone.stdout)[1]

    def step(self) -> None:
        """Run one program, perhaps after a fault."""
        time.sleep(self._rng.choice(_PAUSES_S))
        before = list(self._version)
        fault = ""
        if self._rng.random() < _FAULT_SHARE:
            action = self._rng.choice(
                (self._replace, self._evict, self._kill, self._stop, self._pollute)
            )
            fault = action.__name__.strip("_")
            self.counts[f"fault: {fault}"] += 1
            action()
        script, number = self._rng.choice((("loads.py", 0), ("loads.py", 1), ("again.py", 0)))
        self._run(script, number, f"{script} {number} after {fault or 'nothing'}, was {before}")

    def _run(self, script: str, number: int, what: str) -> None:
        try:
            done = self._shmload("run", "-v", self._folder / script, self._sources[number])
        except subprocess.TimeoutExpired:
            self.findings.append(f"{what}: it did not end in time")
            return
        try:
            digest, state, drawn, was_ready = json.loads(done.stdout)
        except ValueError:
            self.findings.append(f"{what}: {done.returncode} {done.stdout!r} {done.stderr}")
            return
        self.counts["run: ready" if was_ready else "run: not ready"] += 1
        self.counts["run: in the ordinary way"] += "in the ordinary way" in done.stderr
        if digest != self._digests[self._version[number]]:
            self.findings.append(f"{what}: version {self._digests.index(digest)} of the weights")
        if state != self._state:
            self.findings.append(f"{what}: {state} instead of {self._state}")
        if str(drawn) in self._draws:
            self.findings.append(f"{what}: the random numbers of another run, {drawn}")
        self._draws.add(str(drawn))

    # Faults ---------------------------------------------------------------------------------------

    def _replace(self) -> None:
        """Put other weights of the same size in place of a source's."""
        number = self._rng.randrange(2)
        self._version[number] = self._rng.randrange(_VERSIONS)
        name = "unet/diffusion_pytorch_model.safetensors"
        new = self._folder / f"stored-{self._version[number]}" / name
        target = self._sources[number] / name
        target.with_suffix(".new").write_bytes(new.read_bytes())
        target.with_suffix(".new").replace(target)

    def _evict(self) -> None:
        self._shmload("rm", self._rng.choice(self._sources))

    def _kill(self) -> None:
        """Kill a process of the templates."""
        if pids := self._alive():
            with signalling(self._rng.choice(pids), signal.SIGKILL):
                pass

    def _stop(self) -> None:
        """Stop a process of the templates while a program runs."""
        if pids := self._alive():
            with signalling(pid := self._rng.choice(pids), signal.SIGSTOP):
                self._run("loads.py", 0, f"loads.py 0 while {pid} is stopped")

    def _pollute(self) -> None:
        self._shmload("run", self._folder / "pollutes.py")

    # The end --------------------------------------------------------------------------------------

    def end(self) -> None:
        """End the templates and look for processes that are left."""
        deadline = time.monotonic() + _DEADLINE_S
        while (alive := self._alive()) and time.monotonic() < deadline:
            # Again: one that still imports does not listen yet.
            self._shmload("template", "stop")
        if alive:
            self.findings.append(f"processes are left: {alive}")
        for pid in alive:
            with signalling(pid, signal.SIGKILL):
                pass


@click.command(help=__doc__)
@click.option("--seconds", default=60.0, show_default=True, type=click.FloatRange(min=0))
@click.option("--seed", required=True, type=int)
def main(seconds: float, seed: int) -> None:
    if not take_own_shared_memory(_SHM_SIZE):
        click.echo("not root: uses the machine's /dev/shm", err=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    with tempfile.TemporaryDirectory(prefix="turns-", dir="/tmp") as folder:
        turns = Turns(Path(folder), seed)
        end_s = time.monotonic() + seconds
        try:
            while time.monotonic() < end_s:
                turns.step()
        finally:
            turns.end()
    for name, count in sorted(turns.counts.items()):
        click.echo(f"{count:6}  {name}")
    click.echo(f"{len(turns.findings)} findings")
    for finding in turns.findings:
        click.echo(f"FOUND {finding}")
    sys.exit(1 if turns.findings else 0)


if __name__ == "__main__":
    main()
