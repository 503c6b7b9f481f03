"""Invented pipelines for placement tests: no library, no weights, sizes that are easy to add."""

from hypothesis import strategies as st

from shmload._placement.inventory import Device, Inventory
from shmload._placement.modules import Component, Module, parent_of

UNIT = 1 << 20


def limited(*units, **host):
    """Make an inventory of GPUs and what is given by name, in units, without headroom."""
    sizes = {f"cuda:{index}": each for index, each in enumerate(units)} | host
    return Inventory().with_devices(
        Device(name=name, nbytes=int(each * UNIT), room_nbytes=int(each * UNIT))
        for name, each in sizes.items()
    )


def leaf(name, units=1):
    return Module(name=name, nbytes=units * UNIT)


def block(name, units=2):
    """Make a module that must stay whole, with two submodules."""
    small = units // 2
    return parent_of(name, (leaf("attn", small), leaf("ff", units - small)), is_whole=True)


def blocks(name, count, units=2):
    return parent_of(name, tuple(block(str(number), units) for number in range(count)))


def model(name, *children, ties=(), each_step=None):
    return Component(
        name=name,
        module=parent_of("", children),
        ties=ties,
        runs_each_step=name.startswith("transformer") if each_step is None else each_step,
    )


def flux():
    """Make a pipeline in the shape of Flux: 1, 12, 30 and 1 units."""
    return (
        model("text_encoder", leaf("embeddings")),
        model(
            "text_encoder_2",
            leaf("shared", 2),
            parent_of("encoder", (leaf("embed_tokens", 0), blocks("block", 5))),
            ties=(("shared", "encoder.embed_tokens"),),
        ),
        model(
            "transformer",
            leaf("pos_embed", 0),
            leaf("x_embedder", 1),
            blocks("transformer_blocks", 4, 3),
            blocks("single_transformer_blocks", 16, 1),
            leaf("proj_out", 1),
        ),
        model("vae", leaf("decoder")),
    )


_SIZES = st.integers(0, 12)
_NAMES = ("text_encoder", "vae", "transformer", "unet", "safety_checker")


@st.composite
def modules(draw, name="", depth=3, inside=False):
    """Draw a tree of modules; submodules of one that must stay whole may have submodules too."""
    if depth == 0 or draw(st.booleans()):
        return Module(
            name=name, nbytes=draw(_SIZES) * UNIT, is_whole=not inside and draw(st.booleans())
        )
    numbered = draw(st.booleans())
    count = draw(st.integers(1, 12 if numbered else 3))
    is_whole = not inside and draw(st.integers(0, 3)) == 0
    children = tuple(
        draw(modules(str(n) if numbered else f"m{n}", depth - 1, inside or is_whole))
        for n in range(count)
    )
    return parent_of(name, children, is_whole=is_whole)


@st.composite
def components(draw):
    """Draw a pipeline with some tied tensors."""
    found = []
    for name in draw(st.lists(st.sampled_from(_NAMES), min_size=1, max_size=4, unique=True)):
        module = draw(modules())
        paths = [path for path, _ in module.units()]
        ties = ()
        if len(paths) > 1 and draw(st.booleans()):
            ties = (
                tuple(draw(st.lists(st.sampled_from(paths), min_size=2, max_size=3, unique=True))),
            )
        found.append(
            Component(name=name, module=module, ties=ties, runs_each_step=draw(st.booleans()))
        )
    return tuple(found)


@st.composite
def inventories(draw):
    """Draw an inventory as text."""
    sizes = draw(st.lists(st.integers(1, 60), min_size=0, max_size=4))
    items = [f"{size}MiB" for size in sizes]
    if not items or draw(st.booleans()):
        items.append(f"cpu={draw(st.integers(0, 100))}MiB")
    return ",".join(items)
