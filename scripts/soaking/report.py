"""A soak's counts and findings."""

import time
from collections import Counter, deque
from dataclasses import asdict, dataclass, field
from typing import Any

_EVENTS_KEPT = 60
_IN_JSON = (
    "seed",
    "seconds",
    "processes",
    "has_service",
    "has_own_shm",
    "operations",
    "faults",
    "messages",
    "longest_s",
    "longest",
)


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken promise, with its details."""

    step: int
    what: str
    detail: str
    events: tuple[str, ...]
    """The last events before it."""


@dataclass(slots=True)
class Report:
    """Counts and findings of one soak."""

    seed: int
    seconds: float
    processes: int
    has_service: bool
    has_own_shm: bool
    began_s: float = field(default_factory=time.monotonic)
    step: int = 0
    operations: Counter[str] = field(default_factory=Counter)
    """Number of operations by "operation: outcome"."""
    faults: Counter[str] = field(default_factory=Counter)
    messages: dict[str, str] = field(default_factory=dict)
    """The first message of every kind of error."""
    longest_s: float = 0.0
    longest: str = ""
    findings: list[Finding] = field(default_factory=list)
    events: deque[str] = field(default_factory=lambda: deque(maxlen=_EVENTS_KEPT))

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.began_s

    def note(self, event: str) -> None:
        """Remember an event, to show it with the next finding."""
        self.step += 1
        self.events.append(f"{self.elapsed_s:8.3f} s  step {self.step:5}  {event}")

    def count_fault(self, kind: str, detail: str) -> None:
        self.faults[kind] += 1
        self.note(f"FAULT {kind}: {detail}")

    def count_operation(self, do: str, outcome: str, took_s: float, detail: str) -> None:
        self.operations[f"{do}: {outcome}"] += 1
        if took_s > self.longest_s:
            self.longest_s, self.longest = took_s, f"{detail}: {outcome}"
        self.note(f"{outcome} after {took_s:.3f} s: {detail}")

    def find(self, what: str, detail: str) -> None:
        self.findings.append(Finding(self.step, what, detail, tuple(self.events)))

    def failures(self) -> int:
        """Return how many operations did not end with "ok"."""
        return sum(n for name, n in self.operations.items() if not name.endswith(": ok"))

    def line(self) -> str:
        """Return the progress of the soak, in one line."""
        return (
            f"{self.elapsed_s:5.0f} s  step {self.step}: {self.operations.total()} operations, "
            f"{self.failures()} failed; {self.faults.total()} faults; "
            f"longest {self.longest_s:.1f} s; {len(self.findings)} findings"
        )

    def summary(self) -> str:
        """Return all counts, and all findings with the command to repeat them."""
        lines = [self.line(), "operations:", *_rows(self.operations), "faults:"]
        lines += [*_rows(self.faults), "the first errors:"]
        lines += [f"  {kind}: {message}" for kind, message in sorted(self.messages.items())]
        lines += [f"longest: {self.longest_s:.2f} s, {self.longest}"]
        for finding in self.findings:
            lines += ["", f"FOUND at step {finding.step}: {finding.what}", finding.detail]
            lines += ["before it:", *finding.events]
        if self.findings:
            service = "" if self.has_service else " --without-service"
            lines += ["", "to repeat it:"]
            options = f"--seed {self.seed} --seconds {self.seconds:g} --processes {self.processes}"
            lines += [f"  scripts/soak {options}{service}"]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        return {
            "findings": [asdict(finding) for finding in self.findings],
            "elapsed_s": round(self.elapsed_s, 3),
            **{name: getattr(self, name) for name in _IN_JSON},
        }


def _rows(counts: Counter[str]) -> list[str]:
    return [f"  {count:6}  {name}" for name, count in sorted(counts.items())]
