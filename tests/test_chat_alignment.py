"""Chats aligned under two templates: hand-written pairs for each thing that templates do."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from chat_templates import END_OF_TURN, TEMPLATES, load_chat_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from logitstore.alignment import Alignment
from logitstore.alignment_parts import align_blocks, closing_ids
from logitstore.byte_ends import Proof
from logitstore.consumer.answers import answers_mask
from logitstore.documents import Document, Segment
from logitstore.token_parts import TokenBlock
from logitstore.tokenizer import Tokenizer

Load = Callable[..., Tokenizer]
USER_AND_ANSWER = (("user", "Hi?"), ("assistant", "Yo."))

# What ends the user's turn and the assistant's, where a special token of that role does so directly after the content.
CLOSERS = {
    "chatml": ("<|im_end|>", "<|im_end|>"),
    "llama3": ("<|eot_id|>", "<|eot_id|>"),
    "mistral": (None, "</s>"),
    "mistral_special": (None, "</s>"),  # [/INST] ends no turn that an assistant could end, special or not
    "mistral_last": (None, "</s>"),
    "llama2": (None, None),  # after a space: what was decided there, the other side decided at the space
    "gemma": ("<end_of_turn>", "<end_of_turn>"),
    "phi3": ("<|end|>", "<|end|>"),
    "plain": (None, None),  # a newline of a template is no end of turn
}


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    loaded: dict[tuple[str, bool], Tokenizer] = {}

    def load(name: str, *, metaspace: bool = False) -> Tokenizer:
        if (name, metaspace) not in loaded:
            folder = tmp_path_factory.mktemp(name)
            loaded[name, metaspace] = load_chat_tokenizer(folder, name, metaspace=metaspace)
        return loaded[name, metaspace]

    return load


def chat(*turns: tuple[str, str]) -> Document:
    return Document(tuple(Segment(role, content) for role, content in turns))


def block_of(tokenizer: Tokenizer, *documents: Document) -> TokenBlock:
    tokenised = tokenizer.tokenize(documents)
    return TokenBlock(
        np.concatenate([document.ids for document in tokenised]),
        np.concatenate([document.byte_lengths for document in tokenised]),
        np.cumsum([len(document.ids) for document in tokenised]),
        np.array([document.proof for document in tokenised], np.int8),
    )


def align_chat(a: Tokenizer, b: Tokenizer, *turns: tuple[str, str]) -> tuple[Alignment, TokenBlock, TokenBlock]:
    blocks = block_of(a, chat(*turns)), block_of(b, chat(*turns))
    return align_blocks(*blocks, a, b), *blocks


def pairs_of(a: Tokenizer, b: Tokenizer, *turns: tuple[str, str]) -> list[tuple[str, str]]:
    """The tokens that begin together, as they read."""
    alignment, *blocks = align_chat(a, b, *turns)
    sides = [
        [tokenizer.token_text(int(index)) for index in block.ids[rows]]
        for tokenizer, block, rows in zip((a, b), blocks, alignment.pairs(), strict=True)
    ]
    return list(zip(*sides, strict=True))


def same(text: str) -> list[tuple[str, str]]:
    return [(letter, letter) for letter in text]


@pytest.mark.parametrize("b", TEMPLATES)
@pytest.mark.parametrize("a", TEMPLATES)
def test_contents_pair_byte_by_byte_and_closers_with_closers_of_their_role(load: Load, a: str, b: str) -> None:
    expected = []
    for content, *closers in zip(("Hi?", "Yo."), CLOSERS[a], CLOSERS[b], strict=True):
        expected += same(content)
        expected += [tuple(closers)] if all(closers) else []
    assert pairs_of(load(a), load(b), *USER_AND_ANSWER) == expected


def test_end_of_turn_is_what_a_template_writes_after_an_answer(load: Load) -> None:
    found = {name: load(name) for name in END_OF_TURN}
    spelled = {name: tokenizer.token_text(tokenizer.roles.end_of_turn or 0) for name, tokenizer in found.items()}
    assert spelled == END_OF_TURN


def test_text_that_ends_by_eos_pairs_with_eos(load: Load) -> None:
    document = Document((Segment("text", "ab"),))
    a, b = load("chatml"), load("llama3")
    blocks = block_of(a, document), block_of(b, document)
    rows_a, rows_b = align_blocks(*blocks, a, b).pairs()
    assert [a.token_text(int(index)) for index in blocks[0].ids[rows_a]] == ["a", "b", "</s>"]
    assert [b.token_text(int(index)) for index in blocks[1].ids[rows_b]] == ["a", "b", "</s>"]


@pytest.mark.parametrize("merging", ["mistral", "gemma", "mistral_last"])
def test_system_prompt_that_is_merged_in_order_aligns_whole(load: Load, merging: str) -> None:
    turns = (("system", "Be."), *USER_AND_ANSWER)
    answer = END_OF_TURN[merging]
    user = [("<|im_end|>", answer)] if merging == "gemma" else []
    expected = [*same("Be."), *same("Hi?"), *user, *same("Yo."), ("<|im_end|>", answer)]
    assert pairs_of(load("chatml"), load(merging), *turns) == expected
    assert pairs_of(load(merging), load("chatml"), *turns) == [pair[::-1] for pair in expected]
    alignment, _, student = align_chat(load("chatml"), load(merging), *turns)
    assert student.proof.tolist() == [Proof.BYTES]
    assert alignment.statistics.coverage == 1.0


def test_system_prompt_out_of_order_leaves_the_document_unproven(load: Load) -> None:
    turns = (("system", "Be."), ("user", "a"), ("assistant", "b"), *USER_AND_ANSWER)
    alignment, _, student = align_chat(load("chatml"), load("mistral_last"), *turns)
    assert student.proof.tolist() == [Proof.NONE]
    assert not alignment.shared_a.any()
    assert not alignment.shared_b.any()
    assert (alignment.statistics.num_unproven_documents, alignment.statistics.coverage) == (1, 0.0)
    # What is out of order counts nothing; its bytes go to the first token that counts, and the rest is right.
    tokenizer = load("mistral_last")
    spelled = [tokenizer.token_text(int(index)) for index in student.ids]
    counted = [(text, length) for text, length in zip(spelled, student.byte_lengths.tolist(), strict=True) if length]
    assert counted == [("a", 4), ("b", 1), *((letter, 1) for letter in "Hi?Yo.")]


def test_stripped_contents_pair_where_they_begin_and_are_proven_by_characters(load: Load) -> None:
    turns = (("user", " Hi "), ("assistant", "Yo\n"))
    closers = ("<|im_end|>", "<|eot_id|>")
    expected = [(" ", "H"), ("i", "i"), closers, ("Y", "Y"), ("o", "o"), closers]
    assert pairs_of(load("chatml"), load("llama3"), *turns) == expected
    _, teacher, student = align_chat(load("chatml"), load("llama3"), *turns)
    assert (teacher.proof.tolist(), student.proof.tolist()) == ([Proof.BYTES], [Proof.CHARACTERS])
    assert student.byte_lengths[student.byte_lengths > 0].tolist() == [2, 2, 1, 2]


def test_message_of_whitespace_alone_that_is_stripped_away_loses_no_byte(load: Load) -> None:
    turns = (("user", "a"), ("assistant", " \n"), ("user", "b"), ("assistant", "c"))
    closers = ("<|im_end|>", "<|eot_id|>")
    # The whitespace is a's on the stripped side, so that what ends the first turn has no place on both.
    assert pairs_of(load("chatml"), load("llama3"), *turns) == [
        *same("a"),
        closers,
        *same("b"),
        closers,
        *same("c"),
        closers,
    ]
    _, _, student = align_chat(load("chatml"), load("llama3"), *turns)
    assert student.byte_lengths[student.byte_lengths > 0].tolist() == [3, 1, 1]


def test_tools_that_are_written_as_json_align_where_it_changes_nothing(load: Load) -> None:
    turns = (("user", "a"), ("tool", "42"), ("assistant", "b"))
    # Behind 42, Llama-3 writes a quote: its end of turn has no place on both sides.
    closers = ("<|im_end|>", "<|eot_id|>")
    assert pairs_of(load("chatml"), load("llama3"), *turns) == [*same("a"), closers, *same("42"), *same("b"), closers]


def test_tools_that_json_changes_leave_the_document_unproven_and_whole(load: Load) -> None:
    turns = (("user", "a"), ("tool", '{"x": "1\n2"}'), ("assistant", "b"))
    alignment, _, student = align_chat(load("chatml"), load("llama3"), *turns)
    assert student.proof.tolist() == [Proof.NONE]
    assert student.byte_lengths.sum() == chat(*turns).num_bytes
    assert not alignment.shared_b.any()
    mask = answers_mask(student, [chat(*turns)], closing_ids(load("llama3")))
    assert "".join(load("llama3").token_text(int(index)) for index in student.ids[mask]) == "b<|eot_id|>"


def test_tools_under_templates_that_know_none_align_as_any_role(load: Load) -> None:
    turns = (("user", "a"), ("tool", "4\n2"), ("assistant", "b"))
    closers = ("<|im_end|>", "<|end|>")
    expected = [*same("a"), closers, *same("4⏎2"), closers, *same("b"), closers]
    assert pairs_of(load("chatml"), load("phi3"), *turns) == expected


def test_injected_system_prompts_and_dates_pair_with_nothing(load: Load) -> None:
    llama3 = load("llama3")
    block = block_of(llama3, chat(*USER_AND_ANSWER))
    spelled = "".join(llama3.token_text(int(index)) for index in block.ids)
    assert "Today Date: 01 Jan 2024⏎⏎<|eot_id|>" in spelled
    assert block.proof.tolist() == [Proof.BYTES]
    alignment, _, _ = align_chat(load("phi3"), llama3, *USER_AND_ANSWER)
    assert not alignment.shared_b[: np.flatnonzero(block.byte_lengths)[0]].any()


def test_content_that_spells_an_end_of_turn_pairs_as_text(load: Load) -> None:
    turns = (("user", "<|im_end|>"), ("assistant", "b"))
    closers = ("<|im_end|>", "<|eot_id|>")
    assert pairs_of(load("chatml"), load("llama3"), *turns) == [*same("<|im_end|>"), closers, *same("b"), closers]


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("chatml", "Yo.<|im_end|>Ok<|im_end|>"),
        ("llama3", "Yo.<|eot_id|>Ok<|eot_id|>"),
        ("mistral", "Yo.</s>Ok</s>"),
        ("mistral_special", "Yo.</s>Ok</s>"),
        ("mistral_last", "Yo.</s>Ok</s>"),
        ("llama2", "Yo. </s>Ok </s>"),
        ("gemma", "Yo.<end_of_turn>Ok<end_of_turn>"),
        ("phi3", "Yo.<|end|>Ok<|end|>"),
        ("plain", "Yo.⏎Ok⏎"),
    ],
)
@pytest.mark.parametrize("metaspace", [False, True])
def test_answers_are_what_the_assistant_writes_with_its_end_of_turn(
    load: Load, name: str, kept: str, metaspace: bool
) -> None:
    document = chat(*USER_AND_ANSWER, ("user", "So?"), ("assistant", "Ok"))
    tokenizer = load(name, metaspace=metaspace)
    block = block_of(tokenizer, document)
    mask = answers_mask(block, [document], closing_ids(tokenizer))
    found = "".join(tokenizer.token_text(int(index)) for index in block.ids[mask])
    if metaspace:  # tokens may begin with a space of the template, and ".⏎" is one: what follows it ends that answer
        found, kept = found.replace(" ", "").replace("⏎U", "⏎"), kept.replace(" ", "")
    assert found == kept


def test_answers_of_completions_end_by_eos(load: Load) -> None:
    document = Document((Segment("prompt", "Hi "), Segment("completion", "Yo")))
    tokenizer = load("chatml")
    block = block_of(tokenizer, document)
    mask = answers_mask(block, [document], closing_ids(tokenizer))
    assert "".join(tokenizer.token_text(int(index)) for index in block.ids[mask]) == "Yo</s>"


@settings(deadline=None, max_examples=60)
@given(
    contents=st.lists(st.text(min_size=1, max_size=12), min_size=2, max_size=4),
    a=st.sampled_from(sorted(TEMPLATES)),
    b=st.sampled_from(sorted(TEMPLATES)),
)
def test_chats_align_at_equal_bytes_under_any_two_templates(load: Load, contents: list[str], a: str, b: str) -> None:
    turns = [("assistant" if n % 2 else "user", content) for n, content in enumerate(contents)]
    tokenizers = load(a), load(b, metaspace=True)
    alignment, *blocks = align_chat(*tokenizers, *turns)
    starts = [
        (np.cumsum(block.byte_lengths) - block.byte_lengths)[rows]
        for block, rows in zip(blocks, alignment.pairs(), strict=True)
    ]
    assert np.array_equal(*starts)
    for tokenizer, block, rows in zip(tokenizers, blocks, alignment.pairs(), strict=True):
        without_bytes = block.ids[rows][block.byte_lengths[rows] == 0]
        assert set(without_bytes.tolist()) <= closing_ids(tokenizer)
    if all(block.exact.all() for block in blocks):
        assert alignment.statistics.coverage == 1.0
    keeps = [name not in ("llama3", "gemma") for name in (a, b)]
    for block, is_kept in zip(blocks, keeps, strict=True):
        assert block.exact.all() or not is_kept
