"""Prove that restored pipelines equal built ones, family by family of diffusers.

    git clone --depth 1 https://github.com/huggingface/diffusers /tmp/diffusers
    python scripts/remembered_families.py --diffusers /tmp/diffusers [flux wan ...]

Run it once a release, and with the oldest libraries (their own tag of diffusers as the checkout).
Of each family the first class is taken that can be made tiny (`tiny_families`); `--classes` takes
all. It is saved with seeded weights. One process loads it by shmload and keeps it. Another one, of
an interpreter with other hashes, recalls it, loads the directory with diffusers alone, and compares
both as the tests do (tests/support/comparing.py), and what their tokenizers make of texts.

It prints a line for each pipeline: how much of it was kept, and whether what was recalled is equal
or where it differs first. Exit code 1: one differs, or could not be recalled. Families that cannot
be made tiny, or that diffusers itself cannot load, are listed and not counted.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from tiny_families import Candidate, candidates, prepare, save_tiny

_ROOT = Path(__file__).parents[1]
_DTYPES = ("float32", "bfloat16")
_DEADLINE_S = 300
_LONGEST = 300
"""Of a reason, in letters."""
WHOLE = "whole"
"""The level of a pipeline that is kept with all its parts."""

_TEXTS = (
    "",
    " ",
    "a cat, the red dog",
    "A  Cat\tand\na dog \r\n",
    "naïve cafe\u0301, ﬁne ½ Ⅷ",
    "猫と犬、고양이, قطة, כלב",
    "👩‍👩‍👧‍👦🏳️‍🌈 \u200b\ufeff\u00a0x",
    "a\x00b\x07\x7f\ue000\U0010ffff",
    "\ud800",
    "<|endoftext|> <s></s> <pad> <bos> [MASK] <|im_start|>user",
    "don't 1,234.5 !!! --- ___ <a href='x'>",
    "the cat " * 300,
)


# How a pipeline is kept and recalled --------------------------------------------------------------


def keep(source: Path, dtype: Any, name: str) -> str:
    """Load a directory so that `recall` returns its pipeline; return how much of it is kept.

    Raises:
        NotKept: nothing is; says why.
    """
    import shmload

    shmload.load_pipeline(source, dtype=dtype, keep=True, progress=False)
    says = [info.kept for info in shmload.segments() if info.kept][-1]
    if says.startswith("nothing"):
        raise NotKept(says)
    return says


def recall(source: Path, dtype: Any, name: str) -> Any:
    """Return what `keep` has kept, in a process that has loaded nothing."""
    import shmload
    from shmload._building import attempt

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("nothing was recalled")

    if [info.kept for info in shmload.segments() if info.kept][-1] == WHOLE:
        attempt.load = refuse
    return shmload.load_pipeline(source, dtype=dtype, keep=True, progress=False)


def forget(source: Path, names: list[str]) -> None:
    """Remove what `keep` has kept of a directory."""
    import shmload

    with contextlib.suppress(shmload.SegmentNotFound):
        shmload.evict(source)


class NotKept(Exception):
    """Raised with the reason why a pipeline is not kept."""


# Rows ---------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--diffusers", type=Path, required=True, help="a checkout of diffusers")
    parser.add_argument("--classes", action="store_true", help="all classes of each family")
    parser.add_argument("--recalling", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("families", nargs="*", help="default: all")
    asked = parser.parse_args()
    sys.path.insert(0, str(_ROOT / "tests/support"))
    if asked.recalling:
        _import_libraries()
        _answer(sys.stdin, sys.stdout)
        return
    with tempfile.TemporaryDirectory(prefix="shmload-families-") as name:
        work = Path(name)
        os.environ |= {"SHMLOAD_CACHE_DIR": str(work / "cache")}
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(work / "hub")}
        with _Recaller() as recaller:
            prepare(asked.diffusers)
            _import_libraries()
            found = candidates(asked.diffusers)
            table = _Table(work, recaller)
            for family in asked.families or sorted(found):
                table.add(family, found.get(family, []), all_classes=asked.classes)
    print(table.total(), flush=True)
    sys.exit(any(not row.is_equal for row in table.rows))


@dataclass(frozen=True, slots=True)
class _Row:
    """What was found of one class of pipelines."""

    family: str
    is_whole: bool
    is_equal: bool
    """Of what was kept, at least."""


class _Table:
    """Judges families, and prints a row for each pipeline.

    Args:
        work: a folder for what is saved.
        recaller: the process that recalls.
    """

    def __init__(self, work: Path, recaller: "_Recaller") -> None:
        self._work = work
        self._recaller = recaller
        self._missing: list[str] = []
        self.rows: list[_Row] = []

    def total(self) -> str:
        """Return the last line."""
        families = len({row.family for row in self.rows})
        whole = sum(row.is_whole for row in self.rows)
        different = sum(not row.is_equal for row in self.rows)
        missing = f"; not counted: {', '.join(self._missing)}" if self._missing else ""
        return (
            f"{len(self.rows)} pipelines of {families} families: {whole} kept whole, "
            f"{different} different{missing}"
        )

    def add(self, family: str, tried: list[Candidate], *, all_classes: bool) -> None:
        """Add the first candidate that can be made, or all."""
        whys = []
        for candidate in tried:
            source = self._work / family
            shutil.rmtree(source, ignore_errors=True)
            why = self._save(candidate, source)
            if not why:
                self.rows.append(self._judge(candidate, source))
            elif all_classes:
                self._print(family, candidate.class_name, f"not counted: {why}")
            whys.append(why)
            if not why and not all_classes:
                return
        if all(whys):
            self._missing.append(family)
            self._print(family, "-", f"not counted: {[*whys, 'diffusers has no test of it'][0]}")

    def _save(self, candidate: Candidate, source: Path) -> str:
        """Save a pipeline that diffusers loads; return why not."""
        outcome = _in_child(save_tiny, candidate, source)
        if not outcome.has_failed:
            outcome = _in_child(_load_alone, source)
        return outcome.text

    def _judge(self, candidate: Candidate, source: Path) -> _Row:
        is_whole = is_equal = True
        cells = {}
        for dtype in _DTYPES:
            name = _name_of(source, dtype)
            kept = _in_child(keep, source, _dtype(dtype), name)
            if kept.has_failed:
                is_whole = False
                is_equal &= kept.text.startswith(NotKept.__name__)
                cells[dtype] = kept.text
                continue
            recalled = self._recaller.ask(source, dtype, name)
            is_whole &= kept.text == WHOLE
            is_equal &= not recalled
            cells[dtype] = f"{kept.text}, {f'DIFFERENT: {recalled}' if recalled else 'equal'}"
        forgotten = _in_child(forget, source, [_name_of(source, dtype) for dtype in _DTYPES])
        if forgotten.has_failed:
            is_equal = False
            cells = {
                dtype: f"{cell}; not removed: {forgotten.text}" for dtype, cell in cells.items()
            }
        shutil.rmtree(source)
        alike = len({*cells.values()}) == 1
        text = "; ".join(
            [cells[_DTYPES[0]]] if alike else [f"{dtype}: {cell}" for dtype, cell in cells.items()]
        )
        self._print(candidate.family, candidate.class_name, text)
        return _Row(candidate.family, is_whole, is_equal)

    def _print(self, family: str, class_name: str, text: str) -> None:
        print(f"{family:24} {class_name:44} {text}", flush=True)


def _name_of(source: Path, dtype: str) -> str:
    return f"{source.parent.name}-{source.name}-{dtype}"


def _dtype(name: str) -> Any:
    import torch

    return getattr(torch, name)


# The process that recalls -------------------------------------------------------------------------


class _Recaller:
    """An interpreter with other hashes and addresses, which forks a child for each request."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--recalling"],
            env=os.environ | {"PYTHONHASHSEED": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.communicate()

    def ask(self, source: Path, dtype: str, name: str) -> str:
        """Have a pipeline recalled and compared; return how it differs, if it does."""
        assert self._process.stdin
        assert self._process.stdout
        print(json.dumps([str(source), dtype, name]), file=self._process.stdin, flush=True)
        answer: str = json.loads(self._process.stdout.readline())
        return answer


def _answer(requests: IO[str], answers: IO[str]) -> None:
    for line in requests:
        source, dtype, name = json.loads(line)
        outcome = _in_child(_compare, Path(source), _dtype(dtype), name)
        print(json.dumps(outcome.text), file=answers, flush=True)


def _compare(source: Path, dtype: Any, name: str) -> str:
    """Recall a pipeline and load it with diffusers alone; return how they differ."""
    import torch
    from comparing import assert_equal

    torch.manual_seed(0)
    got = recall(source, dtype, name)
    wanted = _load_alone(source, dtype)
    try:
        assert_equal(got, wanted)
    except AssertionError as exc:
        return f"{exc}: {traceback.extract_tb(exc.__traceback__)[-1].line}"
    return "; ".join(_compare_encodings(got, wanted))


def _compare_encodings(got: Any, wanted: Any) -> list[str]:
    """Return which texts the tokenizers of two pipelines, or of their processors, encode apart."""
    found = []
    for name, part in wanted.components.items():
        other = got.components[name]
        part, other = (getattr(each, "tokenizer", each) for each in (part, other))
        if hasattr(part, "convert_ids_to_tokens"):
            found += [
                f"{name} encodes {text!r:.30} otherwise"
                for text in _TEXTS
                if _encodings(other, text) != _encodings(part, text)
            ]
    return found[:3]


def _encodings(tokenizer: Any, text: str) -> list[str]:
    """Return what a tokenizer makes of a text, and of that again; or its errors."""
    made = []
    for given in ({}, {"padding": "max_length", "truncation": True, "max_length": 32}):
        for texts in ((text,), (text, "a dog")):
            try:
                ids = tokenizer(*texts, **given)
                made.append(repr(ids.data) + tokenizer.decode(ids["input_ids"]))
            except Exception as exc:  # whatever it raises, the other one must
                made.append(f"{type(exc).__name__}: {exc}")
    return made


def _load_alone(source: Path, dtype: Any = None) -> Any:
    """Load with diffusers alone."""
    import torch
    from comparing import reference

    torch.manual_seed(0)  # for weights that are in no file
    return reference(source, dtype)


# Children -----------------------------------------------------------------------------------------


def _import_libraries() -> None:
    """Import once what all children need."""
    import comparing  # noqa: F401
    import diffusers
    import transformers

    from shmload._building.rules import import_libraries

    import_libraries()
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()


@dataclass(frozen=True, slots=True)
class _Outcome:
    text: str
    """What the function returned, if it is a text; or why it failed."""
    has_failed: bool


def _in_child(function: Callable[..., Any], *args: Any) -> _Outcome:
    """Call a function in a forked child, so that none sees what another one has left."""
    with tempfile.TemporaryFile("w+") as file:
        child = os.fork()
        if child == 0:
            signal.alarm(_DEADLINE_S)
            code = 1
            try:
                if not os.environ.get("FAMILIES_TRACEBACK"):
                    _silence()
                made = function(*args)
                file.write(made if isinstance(made, str) else "")
                code = 0
            except BaseException as exc:
                traceback.print_exc()
                file.write(" ".join(f"{type(exc).__name__}: {exc}".split())[:_LONGEST])
            finally:
                file.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        file.seek(0)
        text = file.read()
    return _Outcome(text or (f"ended with {code}" if code else ""), bool(code))


def _silence() -> None:
    """Have what the libraries print go nowhere; FAMILIES_TRACEBACK=1 shows it, with tracebacks."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)


if __name__ == "__main__":
    main()
