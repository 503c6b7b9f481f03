"""Workers that die, stop, fail or send garbage are replaced once; then the load fails."""

import sys
import time

import pytest
import torch
from doors import decoding_door, refusal, state_dict
from harm import DIE, DIE_ONCE, STOP, STOP_ONCE
from safetensors.torch import load_file, save_file
from warming import as_bf16, assert_same

import shmload
from shmload._checkpoints.formats.safetensors import build_header
from shmload._checkpoints.header import TensorSpec


def assert_right(source):
    got = shmload.load_state_dict(source, torch.bfloat16, verify=True)
    assert_same(got, as_bf16(load_file(source)))


@pytest.mark.parametrize("workers", [1, 2])
def test_worker_killed_once_is_replaced(checkpoint, workers_that, caplog, workers):
    starts = workers_that(DIE_ONCE, workers=workers)
    assert_right(checkpoint)
    # The second of two workers may be ended before it starts.
    assert 2 <= starts() <= workers + 1
    (line,) = caplog.messages
    assert line == (
        f"a worker died (SIGKILL) while it decoded {checkpoint}; its pieces go to another"
    )


def save_in_pieces(path, monkeypatch):
    """Write a file that has 16 pieces in bfloat16; return its tensor."""
    monkeypatch.setattr("shmload._segments.pieces.PIECE_NBYTES", 1 << 20)
    wanted = torch.arange(8 << 20, dtype=torch.float32)
    save_file({"a": wanted}, path)
    return wanted


@pytest.mark.timeout(30)
def test_each_piece_may_lose_one_worker(tmp_path, workers_that, monkeypatch):
    # Pieces that waited behind the lost one were never begun: that does not count as a try.
    path = tmp_path / "model.safetensors"
    wanted = save_in_pieces(path, monkeypatch)
    tried = tmp_path / "tried"
    tried.mkdir()
    starts = workers_that(
        f"""
        real = fill.Filler.fill
        def die_once(self, source, target, runs, report):
            number = (runs[0].target_offset - 4096) >> 20
            try:
                if number % 8 == 0 or number == 1:
                    os.close(os.open(f"{tried}/{{number}}", os.O_CREAT | os.O_EXCL))
                    os.kill(os.getpid(), signal.SIGKILL)
            except FileExistsError:
                pass
            return real(self, source, target, runs, report)
        fill.Filler.fill = die_once
        """
    )
    state = shmload.load_state_dict(path, torch.bfloat16, verify=True)
    assert starts() == 4
    assert torch.equal(state["a"], wanted.bfloat16())


@decoding_door
def test_worker_killed_twice_is_an_error(checkpoint, workers_that, door):
    starts = workers_that(DIE)
    often = "; the piece was tried once before; perhaps"
    error = refusal(door, checkpoint, shmload.WorkerError, checkpoint, "SIGKILL", often, "dmesg")
    assert starts() == 2
    assert error.path == checkpoint


def test_stopped_worker_is_replaced(checkpoint, workers_that):
    starts = workers_that(STOP_ONCE, stall_timeout_s=1)
    assert_right(checkpoint)
    assert starts() == 2


@pytest.mark.slow
@decoding_door
def test_worker_stopped_twice_is_an_error(checkpoint, workers_that, door):
    starts = workers_that(STOP, stall_timeout_s=1)
    refusal(door, checkpoint, shmload.WorkerError, checkpoint, " 1 s", "SHMLOAD_STALL_TIMEOUT_S")
    assert starts() == 2


@decoding_door
def test_worker_that_cannot_start_is_not_started_again(checkpoint, workers_that, door):
    starts = workers_that("print('my last words', file=sys.stderr); sys.exit(3)")
    error = refusal(door, checkpoint, shmload.WorkerError, "exit code 3", "-P")
    assert starts() == 1
    assert error.__notes__ == ["its output: my last words"]


@decoding_door
def test_worker_killed_each_time_it_starts_is_an_error(checkpoint, workers_that, door):
    starts = workers_that("os.kill(os.getpid(), signal.SIGKILL)")
    said = r"a worker died (SIGKILL) before it was ready; 2 workers in a row were lost; perhaps"
    error = refusal(door, checkpoint, shmload.WorkerError, said)
    assert error.path is None
    assert starts() == 2


def test_interpreter_that_is_missing(checkpoint, monkeypatch, configure):
    configure(inline_nbytes=0)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    refusal(state_dict, checkpoint, shmload.WorkerError, "/nowhere/python")


def test_worker_that_never_gets_ready(checkpoint, workers_that):
    starts = workers_that("os.write(1, b'last words'); signal.pause()", start_timeout_s=2)
    error = refusal(state_dict, checkpoint, shmload.WorkerError, "no worker was ready in 2 s")
    assert "SHMLOAD_START_TIMEOUT_S" in str(error)
    assert starts() == 1
    assert error.__notes__ == ["its output: last words"]


@pytest.mark.timeout(30)
def test_worker_that_never_gets_ready_while_another_decodes(tmp_path, workers_that, monkeypatch):
    path = tmp_path / "model.safetensors"
    wanted = save_in_pieces(path, monkeypatch)
    workers_that("is_first() and signal.pause()", workers=2, stall_timeout_s=600)
    real, later_s = time.monotonic, []
    monkeypatch.setattr(time, "monotonic", lambda: real() + sum(later_s))
    state = shmload.load_state_dict(
        path, torch.bfloat16, progress=lambda *_: later_s or later_s.append(100)
    )
    assert later_s == [100]
    assert torch.equal(state["a"], wanted.bfloat16())


def test_worker_that_fails_says_where(checkpoint, workers_that):
    workers_that("harm_when_writing(lambda: 1 / 0)")
    error = refusal(state_dict, checkpoint, shmload.WorkerError, checkpoint)
    assert "ZeroDivisionError" in error.__notes__[0]


def test_worker_that_prints_disturbs_nothing(checkpoint, workers_that, capfd):
    workers_that("os.write(1, b'x' * (1 << 20)); os.write(2, b'y' * (1 << 20))")
    assert_right(checkpoint)
    assert capfd.readouterr() == ("", "")


RUBBISH = {
    "rubbish": "os.write(channel_fd, b'\\0\\0\\0\\5hello')",
    "huge length": "os.write(channel_fd, b'\\xff' * 4)",
    "most of a huge frame": "os.write(channel_fd, (1 << 26).to_bytes(4, 'big') + b'x' * 100_000)",
    "half a frame": "os.write(channel_fd, b'\\0\\0\\1\\0' + b'x' * 9)",
    "no UTF-8": "os.write(channel_fd, b'\\0\\0\\0\\x09\\x81\\xa4type\\xa2\\xff\\xfe')",
    "another version": "say(Ready(VERSION + 1))",
    "answer to no piece": "say(Ready(VERSION), Filled(9, 9, b''))",
    "failure of no piece": "say(Ready(VERSION), Failed(9, 9, Reason.INTERNAL, ''))",
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("after", ["signal.pause()", "sys.exit(4)"])
@pytest.mark.parametrize("kind", RUBBISH)
def test_worker_that_sends_rubbish_is_an_error_and_no_loop(checkpoint, workers_that, kind, after):
    starts = workers_that(f"{RUBBISH[kind]}; {after}", start_timeout_s=1, stall_timeout_s=1)
    with pytest.raises(shmload.WorkerError):
        shmload.load_state_dict(checkpoint, torch.bfloat16)
    assert starts() <= 3


@pytest.mark.timeout(30)
def test_piece_that_was_filled_before_rubbish_counts(tmp_path, workers_that, monkeypatch):
    path = tmp_path / "model.safetensors"
    wanted = save_in_pieces(path, monkeypatch)
    starts = workers_that(
        """
        from shmload._host.frames import to_frame
        from shmload.workers import main as program
        from shmload.workers.messages import Filled
        def send_with_rubbish(channel, message):
            rubbish = b"\\0\\0\\0\\5hello" if isinstance(message, Filled) and is_first() else b""
            channel.sendall(to_frame(message) + rubbish)
        program.send = send_with_rubbish
        program.serve_parent(program.serve)
        sys.exit(0)
        """
    )
    state = shmload.load_state_dict(path, torch.bfloat16, verify=True)
    assert starts() == 2
    assert torch.equal(state["a"], wanted.bfloat16())


def write_alternating(path, count):
    """Write tensors whose neighbours cannot be merged into one run."""
    specs = tuple(
        TensorSpec(f"t{number}", ("F32", "I32")[number % 2], (16,), number * 64, number * 64 + 64)
        for number in range(count)
    )
    path.write_bytes(build_header(specs, {}, 8) + bytes(64 * len(specs)))


@pytest.mark.slow
@pytest.mark.timeout(30)
def test_stopped_worker_that_reads_nothing_does_not_block_its_coordinator(tmp_path, workers_that):
    # A piece with so many runs that its message does not fit into the socket's buffer.
    path = tmp_path / "model.safetensors"
    write_alternating(path, 20_000)
    starts = workers_that(
        """
        if is_first():
            say(Ready(VERSION))
            os.kill(os.getpid(), signal.SIGSTOP)
        """,
        stall_timeout_s=3,
    )
    assert len(shmload.load_state_dict(path, torch.bfloat16)) == 20_000
    assert starts() == 2
