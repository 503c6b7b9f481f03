"""The page of a placement says everything, and needs nothing else."""

from html.parser import HTMLParser

import pytest
from placing import UNIT, flux, leaf, model

from shmload._placement.cost import cost_of
from shmload._placement.device_map import expand
from shmload._placement.flows import cuts, travels
from shmload._placement.inventory import parse_inventory
from shmload._placement.placement import place
from shmload._placement.strategies import rooms_of

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """Reads a page: texts by section, attributes, and whether every element is closed."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open = []
        self.tags = []
        self.attributes = []
        self.sections = {}
        self.text = ""
        self._section = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "section":
            self._section = dict(attrs).get("id") or f"section {len(self.sections)}"
            self.sections[self._section] = ""
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" in self.open:
            return
        self.text += f"{data} "
        if self._section:
            self.sections[self._section] += f"{data} "


def placed(text, device_map="auto", pipeline=None):
    return place(pipeline or flux(), device_map, parse_inventory(text))


@pytest.fixture(
    params=[
        ("2x28MiB", "auto"),
        ("24MiB,cpu=8MiB,disk=100MiB", "auto"),
        ("24MiB,80MiB", {"": 0, "transformer": 1, "vae": "cpu", "text_encoder": "meta"}),
        ("cpu=1GiB", "balanced"),
    ],
    ids=["divided", "waiting", "several", "cpu"],
)
def placement(request):
    return placed(*request.param)


def test_every_device_and_module_is_there(placement):
    page = Page(placement.html("a pipeline"))
    for use in placement.devices:
        assert use.device in page.sections
    for part in placement.parts:
        there = "cpu" if part.device == "offload" else part.device
        texts = [text for text in page.sections.values() if text.startswith(there)]
        assert len(texts) == 1
        for word in (part.component, part.modules or "all"):
            assert word in texts[0]
    words = list(page.sections.values())[-1]
    assert words.startswith("In words")
    assert all(part.component in words for part in placement.parts)
    for path, device in placement.device_map.items():
        assert f'"{path}": "{device}"' in words


def test_page_needs_no_other_file_and_no_script(placement):
    page = Page(placement.html("a pipeline"))
    assert not {"script", "link", "img", "iframe", "object", "embed"} & set(page.tags)
    assert not {"src", "href", "srcset"} & {name for name, _ in page.attributes}
    text = placement.html("a pipeline")
    for outside in ("http:", "https:", "url(", "@import"):
        assert outside not in text
    assert "prefers-color-scheme:dark" in text
    assert "@media print" in text


def test_bars_say_their_amounts(placement):
    page = Page(placement.html())
    labels = [value for name, value in page.attributes if name == "aria-label" and value != "to"]
    assert len(labels) == len(placement.devices)
    assert all(label for label in labels)


def test_blocks_of_a_bar_fill_it():
    page = Page(placed("24MiB,80MiB", {"": 0, "transformer": 1}).html())
    widths = [value for name, value in page.attributes if name == "style" and "basis" in value]
    shares = [float(value.partition(":")[2].rstrip("%")) for value in widths]
    assert sum(shares) == pytest.approx(200, abs=0.1)


def test_what_travels_and_when():
    placement = placed("24MiB")
    found = travels(placement.parts)
    assert {(each.source, each.target) for each in found} == {("cpu", "cuda:0")}
    assert sum(each.nbytes for each in found) == placement.devices[1].nbytes
    assert [each.is_each_step for each in found] == sorted(
        (each.is_each_step for each in found), reverse=True
    )
    assert {each.name.split()[0] for each in found if each.is_each_step} <= {"transformer"}
    page = Page(placement.html())
    assert "Weights that travel" in page.text
    for each in found:
        assert page.text.count(each.name) >= 2  # an arrow and a row of the table


def test_what_waits_on_a_disk_travels_from_there():
    found = travels(placed("80MiB", {"": 0, "vae": "disk", "transformer": "offload"}).parts)
    assert [(each.name, each.source, each.is_each_step) for each in found] == [
        ("transformer", "cpu", True),
        ("vae", "disk", False),
    ]


def test_what_the_cpu_computes_does_not_travel():
    assert travels(placed("80MiB", {"": "cpu"}).parts) == []
    assert travels(placed("cpu=1GiB", {"": "offload"}).parts) == []
    assert "no weights travel; no cuts" in Page(placed("80MiB", {"": 0}).html()).text


def test_cuts_are_where_activations_change_devices():
    device_map = {"": 0, "transformer.transformer_blocks.[2-3]": 1, "vae": 1}
    placement = placed("2x80MiB", device_map)
    found = cuts(placement.components, placement.execution_devices)
    assert [(cut.component, cut.at, cut.source, cut.target) for cut in found] == [
        ("transformer", "transformer_blocks.2", "cuda:0", "cuda:1"),
        ("transformer", "single_transformer_blocks", "cuda:1", "cuda:0"),
    ]
    last = placed("2x80MiB", {"": 0, "text_encoder_2.encoder.block.[34]": 1})
    ways = [(cut.at, cut.target) for cut in cuts(last.components, last.execution_devices)]
    assert ways == [("encoder.block.3", "cuda:1"), ("", "cuda:0")]
    assert "back at its end" in Page(last.html()).text


@pytest.mark.parametrize(
    "text", ["2x28MiB", "3x17MiB", "24MiB", "12MiB,cpu=10MiB", "14MiB,20MiB", "8x9MiB", "80MiB"]
)
def test_page_counts_as_the_planner_does(text):
    inventory = parse_inventory(text)
    placement = place(flux(), "auto", inventory)
    cost = cost_of(flux(), expand(placement.device_map, flux()), rooms_of(inventory))
    moving = travels(placement.parts)
    assert sum(each.nbytes for each in moving if each.is_each_step) == cost.step_nbytes
    assert sum(each.nbytes for each in moving if not each.is_each_step) == cost.once_nbytes
    assert len(cuts(placement.components, placement.execution_devices)) == cost.cuts


def test_headroom_is_what_is_left_of_it(configure):
    configure(headroom=0.25)
    free, full = (placed(text, {"": 0}).devices[0] for text in ("80MiB", "44MiB"))
    assert (free.headroom_nbytes, full.headroom_nbytes) == (20 * UNIT, 11 * UNIT)
    assert "headroom 20.00 MiB, free 16.00 MiB" in Page(placed("80MiB", {"": 0}).html()).text
    assert "headroom" not in Page(placed("44MiB", {"": 0}).html()).text


def test_names_cannot_change_the_page():
    name = '<b onclick="x">&\n'
    page = Page(placed("1GiB", "auto", (model(name, leaf("x", 9)),)).html("</title><script>"))
    assert "script" not in page.tags
    assert "onclick" not in dict(page.attributes)
    assert "</title><script>" in page.text


def test_many_components_have_colors_again():
    pipeline = tuple(model(f"part_{number}", leaf("x")) for number in range(20))
    assert all(f"part_{n}" in Page(placed("1GiB", "auto", pipeline).html()).text for n in range(20))
