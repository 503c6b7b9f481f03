"""What `shmload top` shows and what its keys mean, as functions of values."""

import io
import itertools

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.screen import Screen
from statuses import STATUS

from shmload._cli.top import Desk
from shmload._cli.top_view import Row, Snapshot, compose

ROWS = (
    Row(id="a", name="org/flux", dtype="bfloat16", nbytes=22 << 30, done=0.61, bytes_per_s=2 << 30),
    Row(id="b", model_id="b", name="sd", dtype="float16", nbytes=2 << 30, users="4711 server.py"),
    Row(id="c", model_id="c", name="lora", dtype="", nbytes=1 << 20, idle_s=7200, is_pinned=True),
)
SHOWN = Snapshot(status=STATUS, rows=ROWS)


def texts(snapshot=SHOWN, chosen=0, width=80, height=24, encoding="utf-8"):
    with io.TextIOWrapper(io.BytesIO(), encoding) as file:
        console = Console(file=file, width=width, height=height, color_system=None)
        console.print(Screen(compose(snapshot, chosen, "", "", console)))
        file.flush()
        return [line.rstrip() for line in file.buffer.getvalue().decode(encoding).splitlines()]


def test_screen_tells_service_budget_and_models():
    lines = texts()
    assert lines[0] == "shmload  process 1234, up 2 h, 3 clients"
    assert "22.00 GiB of 40.00 GiB, room for 17.00 GiB in memory" in lines[1]
    assert lines[2] == "waiting  2 loads for room"
    assert lines[3] == "served   120 hits, 7 misses, 2 evictions, 0 refusals"
    assert lines[5].split() == ["MODEL", "DTYPE", "SIZE", "HIT", "MISS", "STATE"]
    assert lines[6].startswith("> org/flux  ")
    assert lines[6].endswith("61% 2.00 GiB/s")
    assert lines[7].endswith("4711 server.py")
    assert lines[8].endswith("idle 2 h  pinned")
    assert lines[10].endswith("q quit")


@pytest.mark.parametrize("name", ["org/flux", "x" * 300, "模型" * 40, "a\x1b[2J\nb", "é" * 90])
def test_every_line_fits_and_no_name_moves_the_cursor(name):
    rows = tuple(Row(id=str(n), name=name, dtype="float16", nbytes=1) for n in range(30))
    for width, height in itertools.product((1, 10, 40, 79, 80, 200), (1, 2, 5, 10, 24)):
        lines = texts(Snapshot(status=STATUS, rows=rows), width=width, height=height)
        assert len(lines) <= height
        assert all(cell_len(line) <= width for line in lines)
        assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize("chosen", [0, 5, 20, 29])
def test_chosen_row_is_shown_among_many(chosen):
    rows = tuple(Row(id=str(n), name=f"m{n}", dtype="", nbytes=1) for n in range(30))
    lines = texts(Snapshot(status=STATUS, rows=rows), chosen, height=16)
    (line,) = (line for line in lines if line.startswith("> "))
    assert line.split()[1] == f"m{chosen}"


def test_without_a_service_models_and_the_trouble_are_shown():
    lines = texts(Snapshot(status=None, rows=ROWS, trouble="no service listens"))
    assert lines[0] == "no service listens"
    assert any("org/flux" in line for line in lines)


def test_terminal_without_such_characters_gets_ascii():
    assert all(line.isascii() for line in texts(encoding="ascii"))


# Keys ---------------------------------------------------------------------------------------------


@pytest.fixture
def orders():
    return []


@pytest.fixture
def desk(orders):
    return Desk(orders.append)


def press(desk, *keys, snapshot=SHOWN):
    for key in keys:
        desk.press(key, snapshot.rows)


def test_arrows_choose_up_to_the_ends(desk):
    press(desk, "down", "down", "down", "down")
    assert desk.place_among(ROWS) == 2
    press(desk, "up")
    assert desk.place_among(ROWS) == 1
    press(desk, "up", "up", "up")
    assert desk.place_among(ROWS) == 0


def test_choice_stays_with_its_model_or_else_its_place(desk):
    press(desk, "down")
    without = Snapshot(status=STATUS, rows=(ROWS[0], ROWS[2]))
    moved = Snapshot(status=STATUS, rows=(ROWS[1], ROWS[0], ROWS[2]))
    assert texts(moved, desk.place_among(moved.rows))[6].startswith("> sd")
    assert texts(without, desk.place_among(without.rows))[7].startswith("> lora")


def test_question_says_that_a_model_is_pinned(desk):
    press(desk, "down", "down", "e")
    assert desk.question == "evict lora, 1.00 MiB, which is pinned?"


def test_evict_asks_first_and_only_y_confirms(desk, orders):
    press(desk, "down", "e")
    assert desk.question == "evict sd (float16), 2.00 GiB?"
    press(desk, "q")
    assert not desk.question
    assert orders == []
    press(desk, "e", "y")
    assert len(orders) == 1


def test_model_that_is_not_resident_yet_can_only_be_chosen(desk, orders):
    press(desk, "p", "e")
    assert not desk.question
    assert orders == []


def test_keys_without_models_do_nothing(desk, orders):
    press(desk, "p", "e", "y", "up", snapshot=Snapshot(status=STATUS, rows=()))
    assert orders == []
