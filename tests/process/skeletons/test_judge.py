"""What building leaves beside the models is found, and such models get no skeleton."""

import pytest
from tqdm import tqdm

pytestmark = pytest.mark.slow

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
    "import os; open(os.environ['HOME'] + '/planted', 'w').close()": "/planted",
    "self.note = object()": "builtins.object",
    "self.order = next(counter)": "order",
    "import numpy; self.number = numpy.float32(next(counter))": "number",
    "import numpy; self.numbers = numpy.ones(2) * next(counter)": "numbers",
    "import torch; self.held = self.register_forward_hook(torch.relu)": "held.id",
    "import torch; self.empty = torch.ones(2, device='meta')": "a tensor without bytes",
}


@pytest.mark.parametrize(
    "code",
    ["pass", "import numpy; self.step, self.steps = numpy.int64(3), numpy.ones(2)", *EFFECTS],
)
def test_what_a_constructor_leaves_is_found(examined, plant, code):
    plant(code)
    made = examined("bfloat16")
    assert (made.models is not None) == (code not in EFFECTS), made.reason
    assert EFFECTS.get(code, "") in made.reason


@pytest.mark.parametrize(
    "code",
    [
        "import warnings; warnings.warn('planted', FutureWarning)",
        "import logging; logging.getLogger('diffusers.planted').warning('planted')",
    ],
)
def test_what_a_constructor_says_each_time_is_repeated(examined, plant, code):
    plant(code)
    made = examined("bfloat16")
    assert [message.text for message in made.messages] == ["planted"], made.reason


def test_random_numbers_that_a_constructor_forgets_are_drawn_again(examined, plant):
    plant("import torch; torch.randn(6, 8)")
    made = examined("bfloat16")
    assert [draw.name for draw in made.draws] == ["randn.default"], made.reason


def test_first_bar_of_a_process_leaves_nothing_that_counts(examined, plant, monkeypatch):
    monkeypatch.setattr(tqdm, "monitor_interval", 10)
    plant("import io, tqdm; tqdm.tqdm(file=io.StringIO()).close()")
    made = examined("bfloat16")
    assert made.models is not None, made.reason


def test_what_a_constructor_says_once_is_not(examined, plant):
    plant("import logging; table or logging.warning('planted'); table[:] = [1]")
    made = examined("bfloat16")
    assert made.models is None
