"""The checkpoints of the benchmarks: made once, each in its own process, and kept."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

# Part of each directory's name; raise it when the content of a source changes.
_VERSION = 1
_STABLE_DIFFUSION = Path(__file__).with_name("checkpoints.py")
_SDXL = Path(__file__).with_name("sdxl_checkpoints.py")
_GGUF = Path(__file__).with_name("gguf_checkpoints.py")
_FLUX = Path(__file__).with_name("flux_checkpoints.py")

TENSOR_COUNTS = (7_500, 30_000, 90_000)

FLUX_BLOCKS = 8
"""Double blocks of the transformer of the suite `gpu`."""
# Sizes in bfloat16: a double block, a single block, all other weights.
_DOUBLE_NBYTES, _SINGLE_NBYTES, _REST_NBYTES = 680e6, 283e6, 129e6


@dataclass(frozen=True, slots=True)
class Sources:
    """Paths of the sources below one working directory."""

    work: Path
    blocks: int = FLUX_BLOCKS
    """Double blocks of Flux's transformer; it has 1.5 times as many single blocks."""

    @property
    def fp32(self) -> Path:
        return self._directory("sd15-fp32")

    @property
    def bf16(self) -> Path:
        return self._directory("sd15-bf16")

    @property
    def fp32_bin(self) -> Path:
        return self._directory("sd15-fp32-bin")

    @property
    def bf16_bin(self) -> Path:
        return self._directory("sd15-bf16-bin")

    @property
    def sdxl_file(self) -> Path:
        """A directory with one file of weights and the folder `config`."""
        return self._directory("sdxl-fp16-file")

    @property
    def gguf(self) -> Path:
        """A directory with one GGUF file and the folder `config`; so are the next two."""
        return self._directory("flux-gguf")

    @property
    def gguf_whole(self) -> Path:
        return self._directory("flux-gguf-whole")

    @property
    def gguf_small(self) -> Path:
        return self._directory("flux-gguf-small")

    @property
    def small(self) -> Path:
        return self._directory("small-fp32")

    @property
    def tensors(self) -> Path:
        return self._directory(f"tensors-{TENSOR_COUNTS[-1]}")

    @property
    def flux_fp32(self) -> Path:
        return self._directory(f"flux-{self.blocks}-fp32")

    @property
    def flux_bf16(self) -> Path:
        return self._directory(f"flux-{self.blocks}-bf16")

    @property
    def flux_small(self) -> Path:
        return self._directory("flux-small")

    @property
    def keys(self) -> Path:
        """The same, with a hundred times as many blocks as Flux has, and tiny ones."""
        return self._directory("flux-keys")

    def tensor_file(self, count: int) -> Path:
        return self.tensors / f"{count}.safetensors"

    @property
    def single_blocks(self) -> int:
        return self.blocks * 3 // 2

    @property
    def flux_nbytes(self) -> float:
        """Approximate size of Flux's weights in bfloat16, in bytes."""
        blocks = self.blocks * _DOUBLE_NBYTES + self.single_blocks * _SINGLE_NBYTES
        return _REST_NBYTES + blocks

    def missing(self, wanted: Collection[Path]) -> list[Path]:
        """Return the wanted directories that do not exist yet, in the order to make them."""
        return [each for each in self._makers if each in wanted and not each.is_dir()]

    def make_missing(self, environment: dict[str, str], wanted: Collection[Path]) -> Iterator[str]:
        """Make the missing directories; yield a message before each.

        A directory gets its final name only when it is complete.

        Args:
            environment: of the processes that make them.
            wanted: the directories to make.
        """
        for directory in self.missing(wanted):
            yield f"making {directory}"
            program, kind, *arguments = self._makers[directory]
            directory.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=directory.parent, prefix="unfinished-") as folder:
                made = Path(folder, directory.name)
                command = [sys.executable, "-P", program, kind, made, *arguments]
                done = subprocess.run(command, env=environment, capture_output=True, text=True)
                if done.returncode:
                    raise RuntimeError(f"{directory} cannot be made:\n{done.stderr}")
                os.rename(made, directory)

    def _directory(self, name: str) -> Path:
        return self.work / f"{name}-v{_VERSION}"

    @property
    def _makers(self) -> dict[Path, tuple[str | Path, ...]]:
        """Program and arguments for each directory; a source of another comes before it."""
        blocks = str(self.blocks), str(self.single_blocks)
        return {
            self.small: (_STABLE_DIFFUSION, "small"),
            self.tensors: (_STABLE_DIFFUSION, "tensors", *map(str, TENSOR_COUNTS)),
            self.fp32: (_STABLE_DIFFUSION, "sd15"),
            self.bf16: (_STABLE_DIFFUSION, "sd15-bf16", self.fp32),
            self.fp32_bin: (_STABLE_DIFFUSION, "bin", self.fp32),
            self.bf16_bin: (_STABLE_DIFFUSION, "bin", self.bf16),
            self.sdxl_file: (_SDXL, "file"),
            self.gguf: (_GGUF, "large"),
            self.gguf_whole: (_GGUF, "whole"),
            self.gguf_small: (_GGUF, "small"),
            self.flux_small: (_FLUX, "small"),
            self.keys: (_FLUX, "keys"),
            self.flux_fp32: (_FLUX, "float32", *blocks),
            self.flux_bf16: (_FLUX, "bfloat16", *blocks),
        }


def weight_files(directory: Path) -> list[Path]:
    """Return the weight files below a directory, sorted by path."""
    suffixes = ("safetensors", "bin", "gguf")
    return sorted(path for suffix in suffixes for path in directory.rglob(f"*.{suffix}"))


def weights_nbytes(directory: Path) -> int:
    """Return the size of all weight files below a directory, in bytes."""
    return sum(path.stat().st_size for path in weight_files(directory))


def fill_page_cache(paths: list[Path]) -> None:
    """Read files, so that no measurement waits for the disk."""
    buffer = memoryview(bytearray(8 << 20))
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def drop_page_cache(paths: list[Path]) -> None:
    """Have the kernel forget files, so that a measurement reads them from the disk."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)  # what is not on the disk yet cannot be forgotten
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
