"""A slow file system: a directory, mounted read-only by FUSE, that answers like an object store.

Each request takes a latency, and its bytes take the time of one stream; requests are answered in
parallel. It speaks the kernel's protocol (linux/fuse.h), so it needs no library, but the right to
mount: root, or a user namespace of its own.

    unshare --mount python scripts/benchmarks/slow_mount.py SOURCE TARGET COMMAND...

It runs the command while SOURCE is mounted at TARGET, and prints one line of JSON after it: how
long it took (`wall_s`), and how many reads of which sizes the mount answered (`reads`).
"""

import contextlib
import ctypes
import errno
import json
import os
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

LATENCY_S = 0.005
BYTES_PER_S = 200e6

# linux/mount.h
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MNT_DETACH = 1, 2, 4, 2
# linux/fuse.h: requests that have no answer; flags of INIT as libfuse sets them: reads that
# overlap, through the page cache and past it, and long ones
_FORGET, _INTERRUPT, _BATCH_FORGET = 2, 36, 42
_ASYNC_READ, _ASYNC_DIO, _MAX_PAGES = 1 << 0, 1 << 15, 1 << 22
_IN_HEADER, _OUT_HEADER = struct.Struct("<IIQQIIIHH"), struct.Struct("<IiQ")
_READ_IN = struct.Struct("<QQI")
_READ_NBYTES = 1 << 20
_PAGE_NBYTES = 4096
_VALID_S = 3600
_THREADS = 64

_Answer = Callable[[int, bytes, memoryview], "bytes | memoryview"]


class SlowMount:
    """Serves one mount.

    Args:
        source: the directory that is shown.
        latency_s: how long a request waits that opens, reads or looks a name up, in seconds.
        bytes_per_s: the rate of one stream, which is one read.
    """

    def __init__(
        self, source: Path, latency_s: float = LATENCY_S, bytes_per_s: float = BYTES_PER_S
    ) -> None:
        self._latency_s, self._bytes_per_s = latency_s, bytes_per_s
        self._lock = threading.Lock()
        self._paths = [b"", os.fsencode(source)]  # by node; the root is 1
        self._nodes = {self._paths[1]: 1}
        self.reads: Counter[int] = Counter()
        """Number of reads, by the bytes asked for."""
        self._answers: dict[int, _Answer] = {
            1: self._look_up,
            3: self._get_attributes,
            5: self._read_link,
            14: self._open,
            15: self._read,
            17: self._describe,
            18: self._release,
            25: _nothing,  # flush
            26: self._init,
            27: _opened_directory,
            28: self._read_directory,
            29: _nothing,  # releasedir
            38: _nothing,  # destroy
        }

    @contextlib.contextmanager
    def mounted(self, target: Path) -> Iterator[None]:
        """Mount at a directory, and serve in threads until the block ends.

        Raises:
            OSError: FUSE is missing, or this process may not mount.
        """
        fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        try:
            options = (
                f"fd={fd},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},"
                f"allow_other,max_read={_READ_NBYTES}"
            )
            flags = _MS_RDONLY | _MS_NOSUID | _MS_NODEV
            _call("mount", b"slow", bytes(target), b"fuse.slow", flags, options.encode())
            try:
                for _ in range(_THREADS):
                    threading.Thread(target=self._serve, args=(fd,), daemon=True).start()
                yield
            finally:
                _call("umount2", bytes(target), _MNT_DETACH)
        finally:
            os.close(fd)

    def _serve(self, fd: int) -> None:
        request = memoryview(bytearray(_READ_NBYTES + _PAGE_NBYTES))
        room = memoryview(bytearray(_READ_NBYTES))
        while True:
            try:
                got = os.readv(fd, [request])
            except OSError as exc:
                if exc.errno == errno.ENOENT:
                    continue  # the request was taken back
                return  # unmounted
            _, operation, unique, node, *_ = _IN_HEADER.unpack_from(request)
            if operation in (_FORGET, _INTERRUPT, _BATCH_FORGET):
                continue
            found: bytes | memoryview = b""
            error = 0
            try:
                if operation not in self._answers:
                    raise OSError(errno.ENOSYS, "not needed")
                found = self._answers[operation](node, bytes(request[_IN_HEADER.size : got]), room)
            except OSError as exc:
                error = -(exc.errno or errno.EIO)
            nbytes = _OUT_HEADER.size + memoryview(found).nbytes
            with contextlib.suppress(OSError):  # interrupted, or unmounted
                os.writev(fd, [_OUT_HEADER.pack(nbytes, error, unique), found])

    def _init(self, node: int, body: bytes, room: memoryview) -> bytes:
        major, minor, read_ahead, flags = struct.unpack_from("<IIII", body)
        flags &= _ASYNC_READ | _ASYNC_DIO | _MAX_PAGES
        # No limits but the kernel's own for requests in the background.
        pages = _READ_NBYTES // _PAGE_NBYTES
        limits = struct.pack("<HHIIHHII24x", 0, 0, _READ_NBYTES, 1, pages, 0, 0, 0)
        return struct.pack("<IIII", major, min(minor, 36), read_ahead, flags) + limits

    def _look_up(self, node: int, body: bytes, room: memoryview) -> bytes:
        time.sleep(self._latency_s)
        path = os.path.join(self._paths[node], body.rstrip(b"\0"))
        attributes = _attributes(os.lstat(path))
        with self._lock:
            if path not in self._nodes:
                self._nodes[path] = len(self._paths)
                self._paths.append(path)
        entry = struct.pack("<QQQQII", self._nodes[path], 0, _VALID_S, _VALID_S, 0, 0)
        return entry + attributes

    def _get_attributes(self, node: int, body: bytes, room: memoryview) -> bytes:
        return struct.pack("<QII", _VALID_S, 0, 0) + _attributes(os.lstat(self._paths[node]))

    def _read_link(self, node: int, body: bytes, room: memoryview) -> bytes:
        return os.readlink(self._paths[node])

    def _open(self, node: int, body: bytes, room: memoryview) -> bytes:
        time.sleep(self._latency_s)
        fd = os.open(self._paths[node], os.O_RDONLY | os.O_CLOEXEC)
        return struct.pack("<QIi", fd, 0, 0)

    def _read(self, node: int, body: bytes, room: memoryview) -> memoryview:
        fd, offset, nbytes = _READ_IN.unpack_from(body)
        self.reads[nbytes] += 1
        time.sleep(self._latency_s + nbytes / self._bytes_per_s)
        return room[: os.preadv(fd, [room[:nbytes]], offset)]

    def _release(self, node: int, body: bytes, room: memoryview) -> bytes:
        os.close(struct.unpack_from("<Q", body)[0])
        return b""

    def _describe(self, node: int, body: bytes, room: memoryview) -> bytes:
        return struct.pack("<QQQQQIIII24x", 1, 0, 0, 1, 0, _PAGE_NBYTES, 255, _PAGE_NBYTES, 0)

    def _read_directory(self, node: int, body: bytes, room: memoryview) -> bytes:
        _, first, most = _READ_IN.unpack_from(body)
        found = b""
        for number, name in enumerate(sorted(os.listdir(self._paths[node]))[first:], first + 1):
            entry = struct.pack("<QQII", 1, number, len(name), 0) + name
            entry += bytes(-len(entry) % 8)
            if len(found) + len(entry) > most:
                break
            found += entry
        return found


def _nothing(node: int, body: bytes, room: memoryview) -> bytes:
    return b""


def _opened_directory(node: int, body: bytes, room: memoryview) -> bytes:
    return bytes(16)


def _attributes(found: os.stat_result) -> bytes:
    """Return a file's stat as `struct fuse_attr`."""
    times = (found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns)
    return struct.pack(
        "<6Q10I",
        found.st_ino,
        found.st_size,
        found.st_blocks,
        *(each // 10**9 for each in times),
        *(each % 10**9 for each in times),
        found.st_mode,
        found.st_nlink,
        found.st_uid,
        found.st_gid,
        0,
        _PAGE_NBYTES,
        0,
    )


def _call(name: str, *arguments: bytes | int) -> None:
    """Call a function of the C library; raise its OSError."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def main(source: str, target: str, *command: str) -> int:
    mount = SlowMount(Path(source).resolve())
    with mount.mounted(Path(target).resolve()):
        began = time.perf_counter()
        done = subprocess.run(command)
        wall_s = time.perf_counter() - began
    print(json.dumps({"wall_s": wall_s, "reads": mount.reads}))
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
