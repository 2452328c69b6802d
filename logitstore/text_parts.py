"""Text parts: the documents of a block, as bytes and segments.

bytes     uint8 [N]      the canonical bytes of all documents, one after the other
segments  int64 [S, 3]   document (within the block), role (position in ROLES), end (in ``bytes``)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from logitstore.documents import ROLES, Document, Segment
from logitstore.parts import Part
from logitstore.staging import ArrayToStore, StagedPart, stage

SEGMENT_COLUMNS = ("document", "role", "end")
TEXT_TEMPLATE = {"kind": "text", "version": "1"}


def text_recipe(block: str) -> dict[str, Any]:
    return {**TEXT_TEMPLATE, "block": block}


def stage_text(documents: list[Document]) -> StagedPart:
    contents, table, end = [], [], 0
    for number, document in enumerate(documents):
        for segment in document.segments:
            content = segment.content.encode()
            end += len(content)
            contents.append(content)
            table.append((number, ROLES.index(segment.role), end))
    arrays = {
        "bytes": ArrayToStore(np.frombuffer(b"".join(contents), np.uint8), {"encoding": "utf-8"}),
        "segments": ArrayToStore(
            np.array(table, np.int64).reshape(-1, 3), {"columns": list(SEGMENT_COLUMNS), "roles": list(ROLES)}
        ),
    }
    return stage("text", arrays, {"num_documents": len(documents)})


def read_documents_of(part: Part) -> list[Document]:
    """The documents of a text part, in order; their ``source`` is not stored here and is empty."""
    text = part.array("bytes").tobytes()
    documents: list[list[Segment]] = []
    begin = 0
    for number, role, end in part.array("segments").tolist():
        if number == len(documents):
            documents.append([])
        documents[number].append(Segment(ROLES[role], text[begin:end].decode()))
        begin = end
    return [Document(tuple(segments)) for segments in documents]
