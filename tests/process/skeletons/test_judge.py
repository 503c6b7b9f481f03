"""What building leaves beside the models is found, and such models get no skeleton."""

import sys

import diffusers
import pytest

import shmload
from shmload._building import build, examining, snapshot

_HOME = sys.modules[diffusers.AutoencoderKL.__module__]
# Each is run by the constructor of a model; the name is what the reason must mention.
EFFECTS = {
    "table.append(1)": "table",
    "registry[type(self).__name__] = type(self)": "registry",
    "AutoencoderKL.made = getattr(AutoencoderKL, 'made', 0) + 1": "AutoencoderKL['made']",
    "AutoencoderKL.added = lambda self: 1": "AutoencoderKL['added']",
    "import torch; torch.manual_seed(1)": "torch's random state",
    "import torch; torch.rand(next(counter) + 1)": "torch's random state",
    "import torch; torch.rand(1, generator=torch.default_generator)": "random numbers by rand",
    "import random; random.random()": "random's state",
    "import os; os.environ['PLANTED'] = '1'": "os.putenv PLANTED",
    "import os; os.chdir('/')": "os.chdir",
    "import torch; torch.use_deterministic_algorithms(True)": "a mode of torch",
    "import torch; torch.nn.modules.module.register_module_forward_hook(print)": "a mode of torch",
    "import atexit; atexit.register(print)": "at exit",
    "import warnings; warnings.simplefilter('ignore')": "warnings",
    "open('/tmp/shmload-planted', 'w').close()": "/tmp/shmload-planted",
    "self.note = object()": "builtins.object",
    "self.order = next(counter)": "order",
    "import numpy; self.number = numpy.float32(next(counter))": "number",
    "import numpy; self.numbers = numpy.ones(2) * next(counter)": "numbers",
    "import torch; self.held = self.register_forward_hook(torch.relu)": "held.id",
    "import torch; self.empty = torch.ones(2, device='meta')": "a tensor without bytes",
}


@pytest.fixture
def request_of_a_load(saved, configure, tmp_path, monkeypatch):
    """What a load asks of the judge, which here looks at the objects of one module alone."""
    configure(skeletons=1, cache_dir=tmp_path / "cache")
    asked = []
    monkeypatch.setattr(build, "ask", asked.append)
    shmload.load_model(
        "AutoencoderKL", saved("stable-diffusion"), subfolder="vae", dtype="bfloat16"
    )
    look = snapshot.Snapshot
    monkeypatch.setattr(examining, "Snapshot", lambda *_: look({_HOME.__name__: _HOME}))
    return asked[0]


@pytest.fixture
def plant(monkeypatch):
    """Let the constructor of a library's class run some code, as if the library had it."""

    def change(code):
        held = vars(_HOME)
        plain = diffusers.AutoencoderKL.__init__
        planted = {"table": [], "registry": {}, "counter": iter(range(99)), "plain_init": plain}
        for name, value in planted.items():
            monkeypatch.setitem(held, name, value)
        source = f"def __init__(self, *a, **k):\n    plain_init(self, *a, **k)\n    {code}\n"
        made = {}
        exec(compile(source, _HOME.__file__, "exec"), held, made)
        made["__init__"].__wrapped__ = plain
        monkeypatch.setattr(diffusers.AutoencoderKL, "__init__", made["__init__"])

    return change


@pytest.mark.parametrize(
    "code",
    ["pass", "import numpy; self.step, self.steps = numpy.int64(3), numpy.ones(2)", *EFFECTS],
)
def test_what_a_constructor_leaves_is_found(request_of_a_load, plant, code):
    plant(code)
    made = examining.examine(request_of_a_load)
    assert (made.models is not None) == (code not in EFFECTS), made.reason
    assert EFFECTS.get(code, "") in made.reason


@pytest.mark.parametrize(
    "code",
    [
        "import warnings; warnings.warn('planted', FutureWarning)",
        "import logging; logging.getLogger('diffusers.planted').warning('planted')",
    ],
)
def test_what_a_constructor_says_each_time_is_repeated(request_of_a_load, plant, code):
    plant(code)
    made = examining.examine(request_of_a_load)
    assert [message.text for message in made.messages] == ["planted"], made.reason


def test_random_numbers_that_a_constructor_forgets_are_drawn_again(request_of_a_load, plant):
    plant("import torch; torch.randn(6, 8)")
    made = examining.examine(request_of_a_load)
    assert [draw.name for draw in made.draws] == ["randn.default"], made.reason


def test_what_a_constructor_says_once_is_not(request_of_a_load, plant):
    plant("import logging; table or logging.warning('planted'); table[:] = [1]")
    made = examining.examine(request_of_a_load)
    assert made.models is None
