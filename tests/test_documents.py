"""Documents: digests that see where segments end, and prompts that decide the split."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitstore.documents import CHAT_ROLES, ROLES, TRAINABLE_ROLES, Document, Segment

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
SEGMENTS = st.lists(
    st.builds(Segment, st.sampled_from(ROLES), TEXT | st.sampled_from(["|text:1:", ":", "|"])), min_size=1
)


def document(*segments: tuple[str, str]) -> Document:
    return Document(tuple(Segment(role, content) for role, content in segments))


def test_roles_keep_their_places():
    """A role is stored by its position: the list may only grow at its end."""
    assert ROLES[:8] == ("text", "prompt", "completion", "system", "user", "assistant", "tool", "developer")
    assert set(ROLES) >= CHAT_ROLES | TRAINABLE_ROLES


@given(SEGMENTS, SEGMENTS)
def test_digest_is_equal_only_for_equal_segments(a, b):
    assert (Document(tuple(a)).digest() == Document(tuple(b)).digest()) == (a == b)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (document(("prompt", "ab"), ("completion", "c")), document(("prompt", "a"), ("completion", "bc"))),
        (document(("user", "a"), ("user", "b")), document(("user", "ab"))),
        (document(("user", "a"), ("user", "")), document(("user", "a"))),
        (document(("text", "a|text:1:b")), document(("text", "a"), ("text", "b"))),
        (document(("text", "ab")), document(("completion", "ab"))),
        (document(("text", "é")), document(("text", "e\u0301"))),
    ],
)
def test_digest_tells_boundaries_roles_and_spellings_apart(a, b):
    assert a.digest() != b.digest()


def test_digest_ignores_the_source():
    assert Document((Segment("text", "a"),), "here").digest() == Document((Segment("text", "a"),), "there").digest()


def test_text_and_num_bytes_are_of_the_canonical_bytes():
    chat = document(("user", "naïve"), ("assistant", "🎉"))
    assert chat.text == "naïve🎉"
    assert chat.num_bytes == len(chat.text.encode()) == 10
    assert chat.is_chat
    assert not document(("prompt", "a"), ("completion", "b")).is_chat


def test_prompt_digest_is_shared_by_the_answers_to_a_prompt():
    answers = [document(("prompt", "2+2="), ("completion", answer)) for answer in ("4", "four")]
    assert answers[0].prompt_digest() == answers[1].prompt_digest()
    assert answers[0].digest() != answers[1].digest()
    assert document(("prompt", "2+3="), ("completion", "4")).prompt_digest() != answers[0].prompt_digest()


def test_prompt_digest_of_a_chat_ends_at_the_first_answer():
    one = document(("system", "s"), ("user", "hi"), ("assistant", "a"), ("user", "x"), ("assistant", "y"))
    other = document(("system", "s"), ("user", "hi"), ("assistant", "b"))
    assert one.prompt_digest() == other.prompt_digest()
    assert one.prompt_digest() != document(("user", "hi"), ("assistant", "b")).prompt_digest()


def test_prompt_digest_without_a_prompt_is_of_the_document():
    for alone in (document(("assistant", "hello")), document(("completion", "hello")), document(("text", "hello"))):
        assert alone.prompt_digest() == alone.digest()
