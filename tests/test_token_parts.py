"""Tokens columns: what tells one from another."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from builders import build_bytelevel_tokenizer

from logitstore.byte_ends import Proof
from logitstore.documents import Document, Segment
from logitstore.staging import upload
from logitstore.storage import open_storage
from logitstore.store import Store
from logitstore.token_parts import read_tokens, stage_tokens, tokens_template
from logitstore.tokenized_document import TokenizedDocument
from logitstore.tokenizer import Tokenizer


def test_tokens_template_ignores_chat_templates_where_there_are_no_chats(tmp_path: Path) -> None:
    chat = Tokenizer.from_folder(build_bytelevel_tokenizer(tmp_path / "chat"))
    base = Tokenizer.from_folder(build_bytelevel_tokenizer(tmp_path / "base", chat_template=None))
    assert tokens_template(chat, has_chats=False) == tokens_template(base, has_chats=False)
    assert tokens_template(chat, has_chats=True) != tokens_template(base, has_chats=True)


def test_tokens_part_reads_back_with_positions_restarting_at_each_document(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(build_bytelevel_tokenizer(tmp_path / "tokenizer"))
    documents = tokenizer.tokenize([Document((Segment("text", text),)) for text in ("one two", "drei")])
    part = stage_tokens(documents)
    storage = open_storage(str(tmp_path / "store"))
    upload(storage, part)
    block = read_tokens(Store(storage).part(part.digest))
    np.testing.assert_array_equal(block.ids, np.concatenate([document.ids for document in documents]))
    np.testing.assert_array_equal(block.positions(), np.concatenate([np.arange(len(d.ids)) for d in documents]))
    assert block.byte_lengths.sum() == len("one twodrei")
    assert block.exact.all()


def test_tokens_part_keeps_what_proves_each_document(tmp_path: Path) -> None:
    tokens = [
        TokenizedDocument(np.array([5], np.int32), np.array([length], np.int32), proof)
        for length, proof in enumerate(Proof)
    ]
    part = stage_tokens(tokens)
    storage = open_storage(str(tmp_path / "store"))
    upload(storage, part)
    block = read_tokens(Store(storage).part(part.digest))
    assert (block.proof.dtype, block.proof.tolist()) == (np.int8, [Proof.NONE, Proof.BYTES, Proof.CHARACTERS])
    assert block.exact.tolist() == [False, True, True]
