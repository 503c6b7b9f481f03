"""Install the project into the environment whose Python runs this: `install.py PINS PROJECT`.

uv does it, since it downloads in parallel. It does not read pip's configuration, so it is told here
what pip was told. pip does it where uv is not available, fails, or cannot be told.
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

# PyPI's torch for x86-64 is the CUDA build: 3 GB with its libraries. This index has one of 0.2 GB.
_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
_PROBE_TIMEOUT_S = 5.0
_STARTED_S = float(os.environ.get("SETUP_STARTED") or time.time())

_PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install"]
_UV = [str(Path(sys.executable).with_name("uv")), "pip", "install", "--python", sys.executable]
_SOURCES = ("index-url", "extra-index-url", "find-links", "no-index")
# Settings of pip that change nothing for uv. With any other one, pip itself installs.
_HARMLESS = {
    "cache-dir",
    "default-timeout",
    "disable-pip-version-check",
    "no-cache-dir",
    "no-color",
    "no-compile",
    "no-input",
    "no-python-version-warning",
    "no-warn-script-location",
    "prefer-binary",
    "progress-bar",
    "quiet",
    "require-virtualenv",
    "retries",
    "root-user-action",
    "timeout",
    "verbose",
}


def main(pins: str, project: str) -> int:
    """Install `project`, held to `pins`; return the exit code."""
    settings = _pip_settings()
    options = ["--constraint", pins]
    uv = _install_uv(settings, pins)
    torch = _torch_from_cpu_index(settings, pins)
    if torch:
        alone = [*options, "--no-deps", "--index-url", _cpu_index(), torch]
        _say(f"fetching {torch}, the build for CPUs (0.2 GB): no NVIDIA driver here")
        if uv is None or _run_uv([*uv, *alone]):
            subprocess.run([*_PIP, *alone], check=False)
    size = "" if find_spec("torch") else " (up to 3 GB, if torch comes as its CUDA build)"
    _say(f"fetching what shmload{project.removeprefix('.')} needs{size}")
    wanted = [*options, "--editable", project]
    code = 1
    if uv is not None:
        code = _run_uv([*uv, *wanted])
        if code:
            _say("uv failed; pip goes on, which takes longer")
    if code:
        code = subprocess.run([*_PIP, *wanted], check=False).returncode
    _say("installed" if code == 0 else "not installed: see above")
    return code


def _run_uv(arguments: list[str]) -> int:
    """Run `uv pip install`; pass on what it says, but for its list of all packages at the end."""
    with subprocess.Popen([*_UV, *arguments], stderr=subprocess.PIPE, text=True) as uv:
        assert uv.stderr is not None
        for line in uv.stderr:
            if not line.startswith((" + ", " - ", " ~ ")):
                _say(line.strip())
    return uv.returncode


def _say(text: str) -> None:
    print(f"[{time.time() - _STARTED_S:3.0f} s] {text}", flush=True)


def _pip_settings() -> dict[str, str]:
    """Return what pip was told by its files and by the environment."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    return parse_settings(
        subprocess.run(command, capture_output=True, text=True, check=True).stdout
    )


def parse_settings(listed: str) -> dict[str, str]:
    """Return the settings that hold for `pip install`, of what `pip config list` printed."""
    settings: dict[str, str] = {}
    for section in ("global.", "install.", ":env:."):  # a later one wins, as in pip
        for line in listed.splitlines():
            key, _, value = line.partition("=")
            if key.startswith(section):
                settings[key.removeprefix(section)] = ast.literal_eval(value)
    return settings


def options_for_uv(settings: dict[str, str]) -> list[str] | None:
    """Return the options that tell uv where packages come from; None if uv cannot be told."""
    if settings.keys() - _HARMLESS - {"cert", *_SOURCES}:
        return None
    options = ["--index-strategy", "unsafe-best-match"]  # as pip: the best version of any index
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        options.append("--no-index")
    for key in ("index-url", "extra-index-url", "find-links"):
        for place in settings.get(key, "").split():
            options += [f"--{key}", place]
    return options


def _install_uv(settings: dict[str, str], pins: str) -> list[str] | None:
    """Install uv and return the options that it always needs. None: let pip install."""
    options = options_for_uv(settings)
    if options is None:
        _say("pip installs: it has settings that uv cannot be told")
        return None
    _say("fetching uv, which installs the rest (18 MB)")
    command = [*_PIP, "--quiet", "--only-binary=:all:", "--constraint", pins, "uv"]
    if subprocess.run(command, check=False).returncode:
        _say("pip installs: there is no uv for this machine")
        return None
    if "cert" in settings:
        os.environ["SSL_CERT_FILE"] = settings["cert"]
    elif ssl.get_default_verify_paths().cafile:
        options.append("--system-certs")
    return options


def _torch_from_cpu_index(settings: dict[str, str], pins: str) -> str | None:
    """Return the pinned torch if it should come from the index of CPU builds, else None."""
    if settings.keys() & set(_SOURCES) or Path("/dev/nvidiactl").exists():
        return None  # the user has said where packages come from, or has a GPU
    try:
        tls = ssl.create_default_context(cafile=settings.get("cert"))
        place = f"{_cpu_index()}/torch/"
        urllib.request.urlopen(place, timeout=_PROBE_TIMEOUT_S, context=tls).close()
    except OSError:
        return None
    lines = Path(pins).read_text().splitlines()
    return next(line for line in lines if line.startswith("torch=="))


def _cpu_index() -> str:
    return os.environ.get("TORCH_INDEX", _CPU_INDEX)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
