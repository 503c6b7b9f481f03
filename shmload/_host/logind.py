"""What systemd-logind does to shared memory when a user logs out.

With `RemoveIPC=yes`, its default, it removes everything of a user in /dev/shm once the user's last
session has ended, unless the user lingers. Users of the system are exempt (logind.conf(5)).
"""

import pwd
from pathlib import Path

# The highest user id of the system; a constant of systemd's build, 999 in all distributions.
_LAST_SYSTEM_UID = 999
# From the weakest to the strongest; in each, a file may be overruled by those in its folder.
_ROOTS = ("usr/lib/systemd", "run/systemd", "etc/systemd")


def removes_ipc(uid: int, root: Path = Path("/")) -> bool:
    """Tell whether a user's shared memory is removed at the last logout.

    Args:
        uid: the user's id.
        root: where /etc, /run and /var are.
    """
    if uid <= _LAST_SYSTEM_UID or not (root / "run/systemd/system").is_dir():
        return False
    return _is_set(root) and not (root / "var/lib/systemd/linger" / _name_of(uid)).exists()


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _is_set(root: Path) -> bool:
    """Read `RemoveIPC=` from logind's files; the last one that has it decides."""
    mains = [root / folder / "logind.conf" for folder in _ROOTS]
    drop_ins = {
        path.name: path
        for folder in _ROOTS
        for path in (root / folder / "logind.conf.d").glob("*.conf")
    }
    value = "yes"
    for path in [*mains, *(drop_ins[name] for name in sorted(drop_ins))]:
        try:
            lines = path.read_text(errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            key, is_assignment, given = line.partition("=")
            if is_assignment and key.strip() == "RemoveIPC":
                value = given.strip().lower() or "yes"
    return value in ("yes", "true", "on", "1", "y", "t")
