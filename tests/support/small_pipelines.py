"""Invented pipelines of which every placement can be tried: blocks alike, or of two sizes."""

import random

from placing import UNIT, block, blocks, leaf, model

from shmload._placement.modules import parent_of

_BLOCKS = {1: 10, 2: 7, 3: 5}


def small_pipeline(seed):
    """Make a pipeline and the sizes of one to three devices, in bytes; the same for a seed.

    The devices hold between half and two and a half of the pipeline's size.
    """
    rng = random.Random(seed)
    count = rng.choice([1, 2, 2, 3])
    size = rng.randint(6, 12)
    other = rng.choice([size, size, rng.randint(3, size)])
    half = _BLOCKS[count] // 2
    sizes = [size] * (_BLOCKS[count] - half) + [other] * half
    in_row = parent_of("blocks", tuple(block(str(n), units) for n, units in enumerate(sizes)))
    encoder = blocks("blocks", rng.randint(1, 2), rng.randint(4, 12))
    pipeline = (
        model("text_encoder", leaf("in", rng.randint(1, 9)), encoder),
        model("transformer", leaf("in", rng.randint(1, 6)), in_row, leaf("out", rng.randint(0, 3))),
        model("vae", leaf("x", rng.randint(1, 6))),
    )
    share = rng.choice([0.5, 0.7, 0.9, 1.1, 1.2, 1.4, 1.7, 2.5]) / count
    total = sum(component.nbytes for component in pipeline)
    factors = rng.choice([(1,), (0.7, 1, 1.4)])
    rooms = [int(total * share * rng.choice(factors)) // UNIT * UNIT for _ in range(count)]
    return pipeline, rooms
