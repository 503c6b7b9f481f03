"""`shmload run`: imports in several threads."""

_COUNT = 60
_IN_THREADS = f"""
import builtins, sys, threading
builtins.is_program = True
sys.setswitchinterval(1e-6)
found = []
def load(names):
    for name in names:
        try:
            found.append(__import__("chain." + name, fromlist=["VALUE"]).VALUE)
        except BaseException as exc:
            print(name, repr(exc))
names = [f"link{{number}}" for number in range({_COUNT})]
threads = [threading.Thread(target=load, args=(order,)) for order in (names, names[::-1])]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(sum(found))
"""


def test_threads_import_at_once(running):
    """Each module needs the next one; one thread begins at either end. No module runs twice."""
    package = running.folder / "site" / "chain"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    for number in range(_COUNT):
        text = f"import logging\nlogging.getLogger(__name__).setLevel(10)\nVALUE = {number}\n"
        text += "import builtins\nif hasattr(builtins, 'is_program'): print('runs', __name__)\n"
        if number + 1 < _COUNT:
            text += f"from chain import link{number + 1}\n"
        (package / f"link{number}.py").write_text(text)
    running.environment["PYTHONPATH"] = str(package.parent)
    running.shmload("template", "stop")
    running.start_template([f"chain.link{number}" for number in reversed(range(_COUNT))])
    for _ in range(10):
        done = running.shmload("run", "-v", "-c", _IN_THREADS)
        assert (done.stdout, done.stderr) == (f"{2 * sum(range(_COUNT))}\n", "")
