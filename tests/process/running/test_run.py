"""`shmload run`: what comes back of a program, whatever becomes of its caller and its template."""

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from running_place import wait_until_gone
from watching import until

_DEADLINE_S = 60.0
_LIBRARY = """
import os, sys
VALUE = os.environ.get("TORCH_OWN_SETTING", "unset")
sys.modules["of_no_file"] = type(sys)("of_no_file")  # as Cython does
print("own_library is imported", file=sys.stderr)
"""
_WAITS = "print('up', flush=True); input()"


@pytest.fixture
def library(running):
    """A package of the user's, on the path of templates and programs; returns its file."""
    folder = running.folder / "site"
    folder.mkdir(exist_ok=True)
    file = folder / "own_library.py"
    if not file.exists() or file.read_text() != _LIBRARY:
        file.write_text(_LIBRARY)
        running.kill_templates()  # those of a test that has changed it are stale
    running.environment["PYTHONPATH"] = str(folder)
    return file


@pytest.fixture
def template(running, library):
    """Return the process id of a template that has imported the package."""
    return running.start_template(["own_library", "json"])


def run(running, *program):
    return running.shmload("run", "-v", *program)


# Imports -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("template")
def test_import_says_what_it_said_in_the_template(running):
    ended = run(running, "-c", "print('before'); import own_library; print(own_library.VALUE)")
    assert ended.stdout == "before\nunset\n"
    assert ended.stderr == "own_library is imported\n"
    assert run(running, "-c", "pass").stderr == ""


@pytest.mark.usefixtures("template")
def test_module_of_no_file_and_variables_of_a_rank_hinder_no_program(running):
    code = "import sys; sys.modules['of_no_file'] = type(sys)('of_no_file'); import own_library"
    environment = running.environment | {"TORCHELASTIC_ERROR_FILE": "/tmp/of-a-rank"}
    ended = running.shmload("run", "-v", "-c", code, environment=environment)
    assert ended.stderr == "own_library is imported\n"


_SETS = """
import os, sys
print(os.environ.get("TORCH_OWN_SETTING"))
words, sys.argv = sys.argv[1:], ["app"]
sys.path.insert(1, "/nowhere")
if words != ["no"]:
    os.environ["TORCH_OWN_SETTING"] = "new"
import own_library
print(own_library.VALUE)
"""


@pytest.mark.usefixtures("template")
def test_program_that_sets_variables_gets_a_template_that_has_them(running):
    def reason_of_a_run(*words):
        ended = run(running, "-c", _SETS, *words)
        assert ended.stdout == f"None\n{'unset' if words else 'new'}\n"
        return ended.stderr.removesuffix("own_library is imported\n")

    ordinary = "shmload run: in the ordinary way: the program"
    late = "TORCH_OWN_SETTING before it imported a library\n"
    assert reason_of_a_run() == f"{ordinary} set {late}"
    running.wait_for_templates(lambda found: len(found) == 2)
    assert reason_of_a_run() == ""
    assert reason_of_a_run("no") == f"{ordinary} did not set {late}"
    assert reason_of_a_run("no") == ""
    assert reason_of_a_run() == f"{ordinary} set {late}"
    assert reason_of_a_run() == ""


@pytest.mark.usefixtures("template")
def test_program_that_changes_its_directory_before_it_sets_variables_is_learnt_too(running):
    (running.work / "elsewhere").mkdir()
    before = len(running.wait_for_templates(lambda found: found))
    code = "import os; os.chdir('elsewhere'); os.environ['TORCH_OWN_SETTING'] = 'elsewhere'\n"
    code += "import own_library; print(own_library.VALUE)"
    assert "after it had written" in run(running, "-c", code).stderr
    running.wait_for_templates(lambda found: len(found) == before + 1)
    running.wait_for_templates(lambda found: {each.state for each in found} == {"ready"})
    ended = run(running, "-c", code)
    assert (ended.stdout, ended.stderr) == ("elsewhere\n", "own_library is imported\n")


@pytest.mark.usefixtures("template")
def test_value_that_is_another_each_time_starts_one_template(running):
    code = "import os; os.environ['TORCH_OWN_SETTING'] = str(os.getpid()); import own_library\n"
    code += "print(own_library.VALUE == str(os.getpid()))"
    before = len(running.wait_for_templates(lambda found: found))
    assert run(running, "-c", code).stdout == "True\n"
    running.wait_for_templates(lambda found: len(found) == before + 1)
    running.wait_for_templates(lambda found: {each.state for each in found} == {"ready"})
    for _ in range(3):
        ended = run(running, "-c", code)
        assert ended.stdout == "True\n"
        assert "the program set TORCH_OWN_SETTING before" in ended.stderr
    assert len(running.wait_for_templates(lambda found: found)) == before + 1


@pytest.mark.parametrize(
    "trace", ["os.mkdir('made')", "os.rmdir('old')", "open('empty', 'w').close()"]
)
@pytest.mark.usefixtures("template")
def test_program_that_has_left_a_trace_is_not_started_over(running, trace):
    (running.work / "old").mkdir(exist_ok=True)
    code = f"import os; {trace}; os.environ['TORCH_OWN_SETTING'] = 'new'; import own_library"
    ended = run(running, "-c", code)
    assert "after it had written" in ended.stderr
    assert ended.returncode == 0


@pytest.mark.usefixtures("template")
def test_variable_of_the_caller_that_imports_have_read_gets_another_template(running):
    program = ("-c", "import own_library; print(own_library.VALUE)")
    running.environment["TORCH_OWN_SETTING"] = "other"
    try:
        running.start_template(["own_library", "json"])
        ended = run(running, *program)
    finally:
        del running.environment["TORCH_OWN_SETTING"]
    assert (ended.stdout, ended.stderr) == ("other\n", "own_library is imported\n")
    assert run(running, *program).stdout == "unset\n"


@pytest.mark.parametrize(
    ("made", "is_found"), [("own_library/part.py", False), ("own_library.py", True)]
)
@pytest.mark.usefixtures("template")
def test_folder_beside_the_script_counts_as_for_python(running, made, is_found):
    """A folder without `__init__.py` ranks behind an installed package, a module before."""
    folder = running.folder / "beside"
    (folder / made).parent.mkdir(parents=True)
    (folder / made).write_text("VALUE = 'beside'\n")
    script = folder / "app.py"
    script.write_text("import own_library; print(own_library.VALUE)")
    seen = run(running, str(script))
    wanted = running.run([sys.executable, script], check=True)
    shutil.rmtree(folder)
    assert seen.stdout == wanted.stdout == ("beside\n" if is_found else "unset\n")
    assert ("has a own_library of its own" in seen.stderr) == is_found


def test_changed_package_ends_the_template(running, template, library):
    library.write_text(_LIBRARY + "VALUE = 'changed'\n")
    ended = run(running, "-c", "import own_library; print(own_library.VALUE)")
    assert ended.stdout == "changed\n"
    assert "a package has changed" in ended.stderr
    wait_until_gone(template)
    assert running.shmload("template", "ls").stdout  # the next one is there, or starts


@pytest.mark.parametrize("exists", [True, False])
def test_module_that_appears_in_front_of_an_imported_one_ends_the_template(running, exists):
    """Its folder is on the path, and may not exist yet."""
    front, back = running.folder / f"front-{exists}", running.folder / "back"
    back.mkdir(exist_ok=True)
    (back / "twofold.py").write_text("VALUE = 'back'")
    if exists:
        front.mkdir()
    running.environment["PYTHONPATH"] = f"{front}:{back}"
    running.start_template(["twofold"])
    program = ("-c", "import twofold; print(twofold.VALUE)")
    front.mkdir(exist_ok=True)
    (front / "other.py").write_text("")
    same = run(running, *program)
    assert (same.stdout, same.stderr) == ("back\n", "")
    (front / "twofold.py").write_text("VALUE = 'front'")
    ended = run(running, *program)
    assert ended.stdout == "front\n"
    assert "stale: a package has changed" in ended.stderr


# Ends --------------------------------------------------------------------------------------------


_SAYS_PID = "import os; print('up', flush=True); print(os.getpid(), flush=True); input()"


@pytest.mark.parametrize("has_template", [True, False])
def test_program_ends_with_its_caller_and_its_group(start, template, has_template):
    caller = start(
        "import os, time; print('up', flush=True)\n"
        "if not os.fork(): print(os.getppid(), os.getpid(), flush=True)\n"
        "time.sleep(99)"
    )
    program, child = map(int, caller.stdout.readline().split())
    assert program != caller.pid
    if not has_template:
        os.kill(template, signal.SIGKILL)
        wait_until_gone(template)
    caller.kill()
    wait_until_gone(program)
    wait_until_gone(child)


def test_caller_waits_for_a_template_that_is_silent_for_seconds(start, template):
    caller = start(_SAYS_PID)
    program = os.pidfd_open(int(caller.stdout.readline()))
    os.kill(template, signal.SIGSTOP)
    try:
        caller.stdin.write("end\n")
        caller.stdin.flush()
        assert select.select([program], [], [], _DEADLINE_S)[0]
        with pytest.raises(subprocess.TimeoutExpired):
            caller.wait(2)
    finally:
        os.kill(template, signal.SIGCONT)
        os.close(program)
    assert caller.wait(_DEADLINE_S) == 0


# A program that may not signal another user's, though it is root's.
_WITHOUT_KILL = """
import ctypes, os, sys
assert ctypes.CDLL(None).prctl(24, 5, 0, 0, 0) == 0  # CAP_KILL leaves the bounding set
os.execv(sys.executable, [sys.executable, "-m", "shmload", *sys.argv[1:]])
"""
_BECOMES_ANOTHER = "import os; os.setuid(65534); print('up', flush=True); input(); os._exit(5)"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a right to lose")
@pytest.mark.usefixtures("template")
def test_signal_that_may_not_be_passed_on_runs_no_program_again(running):
    command = [sys.executable, "-c", _WITHOUT_KILL]
    running.run([*command, "template", "warm"], check=True)
    caller = subprocess.Popen(
        [*command, "run", "-v", "-c", _BECOMES_ANOTHER],
        cwd=running.work, env=running.environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert caller.stdout.readline() == "up\n", caller.stderr.read()
    caller.send_signal(signal.SIGUSR1)
    assert caller.communicate("end\n", timeout=_DEADLINE_S) == ("", "")
    assert caller.returncode == 5


@pytest.mark.parametrize("options", ["-Im", "-Bm"])
@pytest.mark.usefixtures("template")
def test_options_of_python_may_stand_with_its_m(running, options):
    asked = "import sys; print(sys.orig_argv[1], sys.orig_argv[2])"
    command = [sys.executable, options, "shmload", "run", "-v", "-c", asked]
    assert running.run(command, check=True).stdout == f"{options[:2]} -c\n"


@pytest.mark.usefixtures("template")
def test_program_leaves_no_socket_to_the_garbage_collector(running):
    environment = running.environment | {"PYTHONWARNINGS": "always"}
    running.start_template(["json"], environment)
    assert running.shmload("run", "-v", "-c", "pass", environment=environment).stderr == ""


def test_program_goes_on_without_its_template(start, template):
    caller = start(_WAITS + "; import sys; sys.exit(5)")
    os.kill(template, signal.SIGKILL)
    wait_until_gone(template)
    caller.communicate("go on\n", timeout=_DEADLINE_S)
    assert caller.returncode == 255  # nobody can say more


def test_template_after_a_killed_one_is_not_ready_before_it_serves(running, template, library):
    os.kill(template, signal.SIGKILL)  # it leaves its socket
    wait_until_gone(template)
    gate = running.folder / "gate"
    os.mkfifo(gate)
    library.write_text(f"open({str(gate)!r}).read()\n")
    run(running, "-c", "print(1)")  # starts another
    with gate.open("w"):  # which imports the library now
        assert "starting" in running.shmload("template", "ls").stdout
        assert running.shmload("template", "stop").returncode == 0
        library.write_text(_LIBRARY)
        assert running.shmload("template", "warm").returncode == 0


@pytest.mark.slow
def test_stopped_template_costs_a_second(running, template):
    os.kill(template, signal.SIGSTOP)
    try:
        ended = run(running, "-c", "print(1)")
    finally:
        os.kill(template, signal.SIGCONT)
    assert ended.stdout == "1\n"
    assert "in the ordinary way: the template does not answer" in ended.stderr
    assert run(running, "-c", "print(2)").stderr == ""  # it serves again


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGABRT", "SIGTTIN", "SIGWINCH", "SIGCHLD"])
@pytest.mark.usefixtures("template")
def test_signal_reaches_the_program_once(start, name):
    """Servers count their workers by SIGTTIN and SIGWINCH, units tell of a hang by SIGABRT."""
    caller = start(
        f"import os, signal; signal.signal(signal.{name}, lambda *_: os.write(1, b'got\\n')); "
        "print('up', flush=True); print(input())"
    )
    caller.send_signal(signal.Signals[name])
    assert caller.stdout.readline() == "got\n", (caller.wait(), caller.stderr.read())
    out, _ = caller.communicate("end\n", timeout=_DEADLINE_S)
    assert out == "end\n"
    assert caller.returncode == 0


@pytest.mark.usefixtures("template")
def test_program_that_signals_its_parent_harms_no_other(running, start):
    caller = start()
    run(running, "-c", "import os, signal; os.kill(os.getppid(), signal.SIGUSR1)")
    caller.communicate("end\n", timeout=_DEADLINE_S)
    assert caller.returncode == 0


_ODD_VARIABLES = """
import ctypes, os, sys
def array(words):
    return (ctypes.c_char_p * (len(words) + 1))(*map(os.fsencode, words), None)
given = [f"{name}={value}" for name, value in os.environ.items()]
given += ["=odd", "word", "TWICE=1", "TWICE=2"]
command = [sys.executable, *sys.argv[1:]]
ctypes.CDLL(None).execve(os.fsencode(sys.executable), array(command), array(given))
"""


@pytest.mark.parametrize("option", ["-c", "-Bc"])
@pytest.mark.usefixtures("template")
def test_variables_that_no_shell_passes_are_taken_as_by_python(running, option):
    program = [option, "import os; print(os.environ['TWICE'], 'word' in os.environ)"]
    command = [sys.executable, "-c", _ODD_VARIABLES, "-m", "shmload", "run", *program]
    assert running.run(command, check=True).stdout == "1 False\n"


def test_many_runs_leave_nothing(running, template):
    process = Path(f"/proc/{template}")

    def held():
        return [len(os.listdir(process / name)) for name in ("fd", "task")]

    def children():
        return (process / f"task/{template}/children").read_text().split()

    run(running, "-c", "pass")
    until(lambda: not children())
    before = held()
    for _ in range(10):
        run(running, "-c", "pass")
    # What the first run had may still have been there.
    until(lambda: not children() and all(map(int.__le__, held(), before)))


# A terminal --------------------------------------------------------------------------------------


class Shell:
    """An interactive shell on a terminal of its own."""

    def __init__(self, environment, folder):
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            environment = environment | {"PS1": "$ ", "TERM": "dumb", "P": sys.executable}
            os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], environment)
        self.expect(r"\$ $")

    def type(self, keys):
        os.write(self._fd, keys.encode())

    def expect(self, pattern):
        """Read until the pattern has come, and return what came."""
        seen = b""
        deadline = time.monotonic() + _DEADLINE_S
        while not re.search(pattern.encode(), seen):
            assert time.monotonic() < deadline, seen
            if select.select([self._fd], [], [], 0.1)[0]:
                seen += os.read(self._fd, 1 << 16)
        return seen.decode()

    def close(self):
        os.close(self._fd)
        os.waitpid(self.pid, 0)


@pytest.fixture
def shell(running):
    opened = Shell(running.environment, running.work)
    yield opened
    opened.close()


def test_terminal_controls_the_program_and_ends_the_template(running, library, shell):
    shell.type("SHMLOAD_RUN_IMPORTS=json; export SHMLOAD_RUN_IMPORTS\n")
    shell.expect(r"\$ $")
    shell.type("$P -m shmload template warm --json | grep '\"pid\"'\n")
    pid = int(re.search(r'"pid": (\d+)', shell.expect(r'"pid": \d+,[^$]*\$ $'))[1])
    code = "import time; print(open('/dev/tty').isatty(), flush=True); time.sleep(99)"
    shell.type(f'$P -m shmload run -v -c "{code}"; echo code $?\n')
    assert "ordinary" not in shell.expect("\nTrue")
    shell.type("\x03")
    shell.expect(r"KeyboardInterrupt\s+(code 130)?")
    shell.type("\n")
    shell.expect(r"\$ $")
    shell.type("$P -m shmload run -v -c \"print('u' + 'p', flush=True); print(input())\"\n")
    assert "ordinary" not in shell.expect("\nup")
    shell.type("\x1a")
    shell.expect("Stopped")
    shell.type("fg\n")
    shell.expect("fg\r\n.*\n")
    shell.type("words\n")
    shell.expect(r"words\r\n\$ $")
    shell.type("exit\n")
    wait_until_gone(pid)
