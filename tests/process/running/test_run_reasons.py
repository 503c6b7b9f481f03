"""`shmload run -v`: whenever a program is run in the ordinary way, one line says why."""

import re
import subprocess
import sys

import pytest

_DEADLINE_S = 60.0
# By the reason: a line for the shell, where $RUN is the command.
WAYS = {
    "it is read from standard input": "echo 'print(1)' | $RUN -",
    "it is not a file": "echo 'print(1)' | $RUN /dev/stdin",
    "it is interactive": "$P -i -m shmload run -v -c 'print(1)'",
    "it watches the process that has started it": "JPY_PARENT_PID=$$ $RUN -c 'print(1)'",
    "a standard stream is closed": "$RUN -c 'print(1)' <&-",
    "it inherits very many descriptors":
        "for n in {10..270}; do eval \"exec $n</dev/null\"; done; $RUN -c 'print(1)'",
    "it is no Python program": "$RUN compiled.pyc",
    "the template has imported json.decoder": "$RUN -m json.decoder && echo 1",
    "has a json of its own": "$RUN beside/app.py",
    "the program set TZ before": "$RUN -c 'import os; os.environ[\"TZ\"] = \"UTC\"; import numpy; "
        "print(1)'",
    "the program has put another": "$RUN -c 'import sys; sys.path.insert(0, \"other\"); "
        "import numpy'",
    "there is no template yet": "ulimit -c 1; $RUN -c 'print(1)'",
    "options of Python are given": "$RUN -X dev -c 'print(1)'",
    "a template cannot be started": "SHMLOAD_RUN_IMPORTS=blocked $RUN -c 'print(1)'",
    "the template does not answer": "kill -STOP $PID; $RUN -c 'print(1)'; kill -CONT $PID",
    "the template is not ready yet": "SHMLOAD_RUN_IMPORTS=cold $RUN -c 'print(1)'",
    "lets other users rename": "XDG_RUNTIME_DIR=$PWD/open $RUN -c 'print(1)'",
    "there are very many templates": "for n in {1..16}; do exec {fd}> "
        "$XDG_RUNTIME_DIR/shmload/templates/$n.lock; flock $fd; done; export LANG=other; "
        "$RUN -c 'print(1)'",
    "there can be no template": "SHMLOAD_RUN_IMPORTS=odd $RUN -c 'print(1)'",
}  # fmt: skip


@pytest.fixture(scope="module")
def variables(running):
    """Return the variables of the shell; there is a template, and what hinders each way."""
    work = running.work
    (work / "beside").mkdir()
    (work / "beside/json.py").write_text("")
    (work / "other").mkdir()
    (work / "other/numpy.py").write_text("print(1)")
    (work / "beside/app.py").write_text("import json; print(1)")
    (work / "open/shmload").mkdir(parents=True, mode=0o777)
    (work / "open/shmload").chmod(0o777)
    (work / "compile_it.py").write_text("print(1)")
    make = "import py_compile; py_compile.compile('compile_it.py', 'compiled.pyc')"
    subprocess.run([sys.executable, "-c", make], cwd=work, check=True, timeout=_DEADLINE_S)
    given = {"P": sys.executable, "RUN": f"{sys.executable} -m shmload run -v"}
    given |= running.environment
    odd, blocked, cold = (given | {"SHMLOAD_RUN_IMPORTS": n} for n in ("odd", "blocked", "cold"))
    asked = "import os; from shmload._templates import identity, place, variables\n"
    asked += "key = identity.key_of(variables.first_environment())\n"
    for variables, line in (
        (odd, "place.write_note(key, 'failed', 'there can be no template')"),
        (blocked, "os.mkdir(f'{place.socket_of(key)}.lock')"),
    ):
        running.run([sys.executable, "-c", asked + line], env=variables, check=True)
    with running.held_back(cold):
        yield given


@pytest.mark.parametrize("reason", WAYS)
def test_one_line_says_why_a_program_is_run_in_the_ordinary_way(running, variables, reason):
    variables["PID"] = str(running.start_template(["json", "numpy"], variables))  # some end it
    ended = running.run(["bash", "-c", WAYS[reason]], env=variables)
    assert ended.stdout == "1\n", ended.stderr
    said = [line for line in ended.stderr.splitlines() if line.startswith("shmload run:")]
    assert len(said) == 1, ended.stderr
    assert re.match(f"shmload run: in the ordinary way: .*{re.escape(reason)}", said[0])
