"""Measure what the judge costs: how many run at once, their processor time, and slower loads.

    python scripts/judge_costs.py --json judges.json

Eight tiny pipelines are made with random weights.

- at once: 24 processes with caches of their own load three of them together; the most judges that
  run at a time.
- processor time: each pipeline is loaded in five dtypes, by 40 processes one after the other; what
  the judges take until nothing waits any more.
- slower: these 40 loads against the same ones with SHMLOAD_SKELETONS=0, in pairs.

It runs alone on the machine, or the judges wait for an idle one. It removes the segments it made.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

_ROOT = Path(__file__).parents[1]
_FAMILIES = ("stable-diffusion", "sdxl", "sd3", "flux", "wan", "qwen-image", "sana")
_DTYPES = ("float32", "bfloat16", "float16", "float64", "auto")
_TOGETHER = 24
_LOOK_S = 0.05
_DEADLINE_S = 900.0
_PROGRAM = "from shmload._building.judging import main"
_LOAD = """\
import sys, time
import shmload, torch, diffusers, transformers
begun = time.perf_counter()
shmload.load_pipeline(sys.argv[1], dtype=sys.argv[2])
print(time.perf_counter() - begun)
"""
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--quick", action="store_true", help="two pipelines in one dtype")
    asked = parser.parse_args()
    families, dtypes, together = _FAMILIES, _DTYPES, _TOGETHER
    if asked.quick:
        families, dtypes, together = _FAMILIES[:2], _DTYPES[:1], 2
    with tempfile.TemporaryDirectory(prefix="shmload-judges-") as name:
        work = Path(name)
        sources = _save_all(work, families)
        figures = {
            "judges at once": _at_once(work, sources[:3], together),
            **_costs(work, sources, dtypes),
        }
    print(json.dumps(figures, indent=1))
    if asked.json:
        asked.json.write_text(json.dumps(figures, indent=1) + "\n")


def _save_all(work: Path, families: Sequence[str]) -> list[Path]:
    sys.path.insert(0, str(_ROOT / "tests/support"))
    import diffusers
    import pipelines

    sources = [pipelines.save(family, work / family) for family in families]
    unet = diffusers.UNet2DModel(
        sample_size=8,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )
    diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler()).save_pretrained(work / "ddpm")
    return [*sources, work / "ddpm"]


def _at_once(work: Path, sources: list[Path], together: int) -> int:
    """Return the most judges that run while processes with caches of their own load together."""
    with _Judges(work / "together") as judges:
        started = []
        for number in range(together):
            cache = work / f"cache-{number}"
            cache.mkdir()
            source = sources[number % len(sources)]
            started.append(_start(source, "bfloat16", work / "together", cache))
        for process in started:
            _end_of(process)
        judges.wait_for_end()
    return judges.most_at_once


def _costs(work: Path, sources: list[Path], dtypes: Sequence[str]) -> dict[str, float]:
    """Load all pipelines in all dtypes, with judges and without; see the module's text."""
    runtime, cache = work / "costs", work / "cache"
    cache.mkdir()
    took: dict[str, list[float]] = {"1": [], "0": []}
    with _Judges(runtime) as judges:
        for source in sources:
            for dtype in dtypes:
                for way, all_s in took.items():
                    process = _start(source, dtype, runtime, cache, SHMLOAD_SKELETONS=way)
                    all_s.append(float(_end_of(process)))
        while_loading_s = judges.cpu_s
        judges.wait_for_end()
    ratios = [with_ / without for with_, without in zip(took["1"], took["0"], strict=True)]
    return {
        "loads": len(ratios),
        "processor time of judges, s": round(judges.cpu_s, 1),
        "of it while the loads ran, s": round(while_loading_s, 1),
        "loads with judges, s": round(sum(took["1"]), 2),
        "loads without, s": round(sum(took["0"]), 2),
        "slower, median of pairs": round(statistics.median(ratios), 3),
        "slower, total": round(sum(took["1"]) / sum(took["0"]), 3),
    }


def _start(
    source: Path, dtype: str, runtime: Path, cache: Path, **variables: str
) -> subprocess.Popen[str]:
    own = {"XDG_RUNTIME_DIR": str(runtime), "SHMLOAD_CACHE_DIR": str(cache)}
    own |= {"HF_HUB_OFFLINE": "1", "SHMLOAD_SKELETONS": "1", "SHMLOAD_REDIRECT": "0"}
    return subprocess.Popen(
        [sys.executable, "-c", _LOAD, str(source), dtype],
        env=os.environ | own | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _end_of(process: subprocess.Popen[str]) -> str:
    out, errors = process.communicate(timeout=_DEADLINE_S)
    if process.returncode:
        raise SystemExit(f"a load has failed:\n{errors}")
    return out


class _Judges(threading.Thread):
    """Looks at the judges of one folder for sockets and queues, while its block runs."""

    def __init__(self, runtime: Path) -> None:
        super().__init__()
        runtime.mkdir(mode=0o700)
        self.most_at_once = 0
        self._runtime = os.fsencode(f"XDG_RUNTIME_DIR={runtime}\0")
        self._cpu_s: dict[int, float] = {}
        self._ending = threading.Event()
        self._now: list[int] = []

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self.join()

    @property
    def cpu_s(self) -> float:
        """Processor time of the judges and their processes up to now."""
        return sum(self._cpu_s.values())

    def run(self) -> None:
        while not self._ending.wait(_LOOK_S):
            found = set(filter(self._is_judge, map(int, filter(str.isdigit, os.listdir("/proc")))))
            # Its examiners have its command line, too.
            self._now = [pid for pid in found if _parent(pid) not in found]
            for pid in self._now:
                with contextlib.suppress(OSError):
                    self._cpu_s[pid] = max(self._cpu_s.get(pid, 0), _cpu_s(pid))
            self.most_at_once = max(self.most_at_once, len(self._now))

    def wait_for_end(self) -> None:
        """Wait until no judge is left."""
        until = time.monotonic() + _DEADLINE_S
        quiet = 0
        while quiet < 20:
            quiet = 0 if self._now else quiet + 1
            if time.monotonic() > until:
                raise SystemExit("the judges do not end: is the machine idle?")
            time.sleep(_LOOK_S)

    def _is_judge(self, pid: int) -> bool:
        with contextlib.suppress(OSError):
            return (
                _PROGRAM in Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
                and self._runtime in Path(f"/proc/{pid}/environ").read_bytes()
            )
        return False


def _cpu_s(pid: int) -> float:
    """Return the processor time of a process and of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) * _TICK_S


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


if __name__ == "__main__":
    main()
