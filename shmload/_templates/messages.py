"""What a caller and a copy of a template say to each other; the template tells of the end.

    caller ── connects ──▶ template ── forks ──▶ copy
    caller ◀──────────────────────────────── hello ─ copy
    caller ── the call, with descriptors ──────────▶ copy
    caller ◀───────────────────── ready PID GROUP ─ copy
    caller ── go ──────────────────────────────────▶ program
    caller ◀── stopped, ended STATUS ─ template
    caller ◀── refused WHY ─ template or copy, in place of hello or ready

Each is a packet of words, but for the call, which is a literal of Python. Only after `hello` does
the caller send that: a stopped template would keep its descriptors open. It has a second after
which it runs the program itself, so the copy waits for `go`.

GROUP is the process group that the caller shall join; STATUS is that of `os.waitpid`.
"""

VERSION = 11
"""Changes with any message. A template of another version is not met: its key is another."""

HELLO, GO, STOPPED = b"hello", b"go", b"stopped"


class Program:
    """A program, as a command line names it.

    Args:
        kind: `script`, `module`, `code` or `stdin`.
        value: the script, the module or the code.
        arguments: of the program.
        flags: options for Python, as they were given.
    """

    def __init__(self, kind: str, value: str, arguments: list[str], flags: list[str]) -> None:
        self.kind, self.value = kind, value
        self.arguments, self.flags = arguments, flags


class Call:
    """A program to run; with it come descriptors: the directory, then those of `fds`.

    Args:
        program: see there.
        settings: the variables that the program is going to set, see `variables`.
        environment: the caller's first variables.
        fds: the numbers of the descriptors that the program inherits.
        group: the caller's process group if it has a terminal, else 0.
        blocked: the signals that the caller blocks, a bit each.
        ignored: those that it ignores, a bit each.
        umask: the caller's.
        is_verbose: the caller's user is told why a program is not run here.
    """

    def __init__(
        self,
        program: Program,
        settings: list[list[str]],
        environment: dict[str, str],
        fds: list[int],
        group: int,
        blocked: int,
        ignored: int,
        umask: int,
        is_verbose: bool,
    ) -> None:
        self.program, self.settings, self.environment = program, settings, environment
        self.fds, self.group, self.umask = fds, group, umask
        self.blocked, self.ignored, self.is_verbose = blocked, ignored, is_verbose

    def packed(self) -> bytes:
        """Return the bytes of this call, for `call_of`."""
        return ascii(vars(self) | {"program": vars(self.program)}).encode()


def call_of(raw: bytes) -> Call:
    """Return the call that these bytes are; other bytes raise whatever Python raises."""
    # Not at the top: a caller would wait for it.
    import ast

    fields = ast.literal_eval(raw.decode("ascii"))
    return Call(**fields | {"program": Program(**fields["program"])})
