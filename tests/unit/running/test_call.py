"""A call arrives as it was sent, whatever bytes its words and variables are."""

from hypothesis import given
from hypothesis import strategies as st

from shmload._templates.messages import Call, Program, call_of

_TEXTS = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("\udc80\udcff"))
_PROGRAMS = st.builds(Program, st.sampled_from(["script", "code"]), _TEXTS, st.lists(_TEXTS))
_CALLS = st.builds(
    Call, _PROGRAMS, st.lists(st.lists(_TEXTS)), st.dictionaries(_TEXTS, _TEXTS),
    st.lists(st.integers()), st.integers(), st.integers(), st.integers(), st.integers(),
    st.booleans(),
)  # fmt: skip


@given(_CALLS)
def test_call_arrives_as_it_was_sent(call):
    arrived = call_of(call.packed())
    assert vars(arrived.program) == vars(call.program)
    assert vars(arrived) | {"program": None} == vars(call) | {"program": None}
