"""Install the project into the environment of the running Python: `install.py PINS PROJECT`.

uv installs, because it downloads in parallel. uv does not read pip's configuration, so this script
passes the package sources on. pip installs where uv is missing or fails.
"""

import ast
import os
import ssl
import subprocess
import sys
import time
import urllib.request
from importlib.util import find_spec
from pathlib import Path

# PyPI's torch for x86-64 is the CUDA build, 3 GB with its libraries; this index has the CPU build,
# 0.2 GB.
_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
_PROBE_TIMEOUT_S = 5.0
_STARTED_S = float(os.environ.get("SETUP_STARTED") or time.time())

_PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install"]
_UV = [str(Path(sys.executable).with_name("uv")), "pip", "install", "--python", sys.executable]
_SOURCES = ("index-url", "extra-index-url", "find-links", "no-index")


def main(pins: str, project: str) -> int:
    """Install `project` with the constraints file `pins`; return the exit code."""
    settings = _pip_settings()
    options = ["--constraint", pins]
    uv = _install_uv(settings, pins)
    torch = _torch_from_cpu_index(settings, pins)
    if torch:
        alone = [*options, "--no-deps", "--index-url", _CPU_INDEX, torch]
        _say(f"fetching {torch}, the CPU build (0.2 GB): this machine has no NVIDIA driver")
        if uv is None or _run_uv([*uv, *alone]):
            subprocess.run([*_PIP, *alone], check=False)
    size = "" if find_spec("torch") else " (up to 3 GB with the CUDA build of torch)"
    _say(f"fetching the requirements of shmload{project.removeprefix('.')}{size}")
    wanted = [*options, "--editable", project]
    code = 1
    if uv is not None:
        code = _run_uv([*uv, *wanted])
        if code:
            _say("uv failed; installing with pip, which takes longer")
    if code:
        code = subprocess.run([*_PIP, *wanted], check=False).returncode
    _say("installed" if code == 0 else "not installed: see above")
    return code


def _run_uv(arguments: list[str]) -> int:
    return subprocess.run([*_UV, "--quiet", *arguments], check=False).returncode


def _say(text: str) -> None:
    print(f"[{time.time() - _STARTED_S:3.0f} s] {text}", flush=True)


def _pip_settings() -> dict[str, str]:
    """Return pip's settings from its configuration files and the environment."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.check_output(command, text=True)
    settings: dict[str, str] = {}
    for section in ("global.", "install.", ":env:."):  # a later one wins, as in pip
        for line in listed.splitlines():
            key, _, value = line.partition("=")
            if key.startswith(section):
                settings[key.removeprefix(section)] = ast.literal_eval(value)
    return settings


def _options_for_uv(settings: dict[str, str]) -> list[str]:
    """Return uv's options for pip's package sources."""
    options = ["--index-strategy", "unsafe-best-match"]  # as pip: the best version of any index
    if sys.dont_write_bytecode:  # else each process would compile the libraries for itself
        options.append("--compile-bytecode")
    for key in ("index-url", "extra-index-url", "find-links", "constraint"):
        for place in settings.get(key, "").split():
            options += [f"--{key}", place]
    return options


def _install_uv(settings: dict[str, str], pins: str) -> list[str] | None:
    """Install uv and return the options for every call of it; None if pip has to install."""
    _say("fetching uv, which installs the rest (18 MB)")
    command = [*_PIP, "--quiet", "--only-binary=:all:", "--constraint", pins, "uv"]
    if subprocess.run(command, check=False).returncode:
        _say("installing with pip: there is no uv for this machine")
        return None
    options = _options_for_uv(settings)
    if "cert" in settings:
        os.environ["SSL_CERT_FILE"] = settings["cert"]
    elif ssl.get_default_verify_paths().cafile:
        options.append("--system-certs")
    return options


def _torch_from_cpu_index(settings: dict[str, str], pins: str) -> str | None:
    """Return the pinned torch if it should come from the index of CPU builds, else None."""
    if settings.keys() & set(_SOURCES) or Path("/dev/nvidiactl").exists():
        return None  # the user configured package sources, or the machine has a GPU
    try:
        tls = ssl.create_default_context(cafile=settings.get("cert"))
        place = f"{_CPU_INDEX}/torch/"
        urllib.request.urlopen(place, timeout=_PROBE_TIMEOUT_S, context=tls).close()
    except OSError:
        return None
    lines = Path(pins).read_text().splitlines()
    return next(line for line in lines if line.startswith("torch=="))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
