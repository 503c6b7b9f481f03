"""What an offloading call keeps on a device follows from the tree of modules."""

from shmload._placement.modules import Component, Module, parent_of
from shmload._placement.offloading import offloading_table, offloading_uses


def leaf(name, nbytes):
    return Module(name=name, nbytes=nbytes)


def block(name, *sizes):
    return parent_of(name, tuple(leaf(f"layer{n}", size) for n, size in enumerate(sizes)))


TRANSFORMER = Component(
    name="transformer",
    module=parent_of(
        "",
        (
            leaf("embed", 7),
            parent_of("blocks", (block("0", 10, 20), block("1", 30, 40), block("2", 5))),
            parent_of("norms", (leaf("first", 1), leaf("last", 2))),
        ),
    ),
)
# Its blocks are one level down, where block_level does not look.
ENCODER = Component(
    name="encoder", module=parent_of("", (parent_of("model", (block("layers", 50, 60),)),))
)


def sizes(*components):
    return [use.nbytes for use in offloading_uses(components)]


def test_model_block_and_leaf():
    assert sizes(TRANSFORMER) == [115, 115, 10 + 100, 10 + 70, 40, 40]


def test_blocks_further_down_stay_together():
    assert sizes(ENCODER) == [110, 110, 110, 110, 60, 60]


def test_largest_component_counts_for_each_call():
    assert sizes(TRANSFORMER, ENCODER) == [115, 115, 110, 110, 60, 60]
    assert sizes() == [0] * 6


def test_one_block_needs_no_room_for_a_second():
    module = parent_of("", (parent_of("blocks", (leaf("0", 9),)),))
    assert sizes(Component(name="one", module=module)) == [9] * 6


def test_table_says_what_fits():
    uses = offloading_uses([TRANSFORMER])
    assert [row[2] for row in offloading_table(uses, 80).rows] == ["no", "no", "no", *["yes"] * 3]
    assert {row[2] for row in offloading_table(uses, None).rows} == {"-"}


def test_streams_keep_no_one_copy():
    uses = offloading_uses([TRANSFORMER])
    assert [use.call for use in uses if not use.keeps_one_copy] == [
        use.call for use in uses if "use_stream" in use.call
    ]


def test_component_that_the_pipeline_excepts_stays():
    checker = Component(name="safety_checker", module=block("", 100, 200))
    assert sizes(TRANSFORMER, checker) == [115 + 300, 300, 300, 300, 200, 40 + 300]
    assert sizes(checker) == [300, 300, 300, 300, 200, 300]
