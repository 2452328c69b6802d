"""Tokenizers: documents to ids with the bytes that each token covers, reproducible from what a store keeps of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from logitstore.byte_ends import ByteEnds, weakest
from logitstore.chat import RENDERING_DATE, ChatTemplate, RenderedChat
from logitstore.cutting import Cutter, CutText
from logitstore.digests import digest_bytes
from logitstore.documents import Document
from logitstore.errors import TokenizerError
from logitstore.special_roles import SpecialRoles, find_end_of_turn, find_pad
from logitstore.tokenized_document import TokenizedDocument, surround
from logitstore.tokenizer_assets import decode_tokenizer, encode_tokenizer
from logitstore.tokenizer_folder import (
    TokenizerFolder,
    read_loaded_tokenizer,
    read_tokenizer_folder,
    write_tokenizer_folder,
)

RENDERING_VERSION = "1"


_MALFORMED = (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError, MemoryError, OverflowError)
"""What reading a file raises that is JSON, or a protobuf message, but not a tokenizer."""


class Tokenizer:
    """A tokenizer with its rendering: BOS, EOS and chat template.

    Attributes:
        bos_ids: put before every document, unless its chat template has written them; empty if the tokenizer's own
            post-processor adds none.
        eos_ids: put after every document that is not a chat; empty if no EOS token is defined.
        fingerprint: digest of ``asset()``, the tokenizer's identity.
    """

    def __init__(
        self,
        asset: bytes,
        cutter: Cutter,
        *,
        bos_ids: Sequence[int] = (),
        eos_ids: Sequence[int] = (),
        chat_template: ChatTemplate | None = None,
        pad_id: int | None = None,
    ) -> None:
        """For ``from_folder`` and ``from_asset``."""
        self._asset = asset
        self._cutter = cutter
        self._chat_template = chat_template
        self._pad_id = pad_id
        self.fingerprint = digest_bytes(asset)
        self.bos_ids = tuple(bos_ids)
        self.eos_ids = tuple(eos_ids)
        self._special_ids = frozenset({*cutter.special_tokens, *bos_ids, *eos_ids})
        self._token_bytes = [None if n in self._special_ids else data for n, data in enumerate(cutter.token_bytes)]

    @classmethod
    def from_folder(cls, path: str | Path, chat_template: str | None = None) -> Tokenizer:
        """Load a tokenizer as ``save_pretrained`` writes it, or from another kind of file.

        Args:
            path: the folder, or one file: ``tokenizer.json``, a SentencePiece ``tokenizer.model``, ``tekken.json`` or
                ``*.tiktoken``, with what stands beside it.
            chat_template: the text of a Jinja template to take instead of the tokenizer's own.

        Raises:
            TokenizerError: no such file, an unreadable one, or BOS or EOS that is not in the vocabulary.
        """
        try:
            files = read_tokenizer_folder(path)
        except _MALFORMED as error:
            raise TokenizerError(f"{path}: {_not_a_tokenizer(error)}") from error
        return cls._from_files(files, chat_template, str(path))

    @classmethod
    def from_loaded(cls, loaded: Any, chat_template: str | None = None) -> Tokenizer:
        """The same from a ``tokenizers.Tokenizer``, or from a fast tokenizer of transformers.

        Raises:
            TokenizerError: it is neither, or BOS or EOS is not in the vocabulary.
        """
        return cls._from_files(read_loaded_tokenizer(loaded), chat_template, type(loaded).__name__)

    @classmethod
    def _from_files(cls, folder: TokenizerFolder, chat_template: str | None, where: str) -> Tokenizer:
        template = chat_template if chat_template is not None else folder.chat_template
        try:
            asset = encode_tokenizer(folder.tokenizer_json)
            cutter = Cutter(asset)
            bos_ids = cutter.leading_ids()
            if not bos_ids and folder.add_bos_token:
                bos_ids = _named_ids(cutter, folder, "bos_token")
            return cls(
                asset,
                cutter,
                bos_ids=bos_ids,
                eos_ids=_named_ids(cutter, folder, "eos_token"),
                chat_template=None if template is None else ChatTemplate(template, folder.special_tokens),
                pad_id=cutter.id_of(folder.special_tokens.get("pad_token", "")),
            )
        except TokenizerError as error:
            raise TokenizerError(f"{where}: {error}") from error
        except _MALFORMED as error:
            raise TokenizerError(f"{where}: {_not_a_tokenizer(error)}") from error

    @classmethod
    def from_asset(
        cls, asset: bytes, rendering: Mapping[str, Any] | None = None, template: bytes | None = None
    ) -> Tokenizer:
        """The tokenizer that ``asset()``, ``rendering()`` and ``template_asset()`` came from.

        Without a rendering: no BOS, no EOS, no chats.

        Raises:
            TokenizerError: the template is not the one that the rendering names, or the rendering is of another
                version.
        """
        if rendering is None:
            return cls(asset, Cutter(asset))
        _check_rendering(rendering, template)
        return cls(
            asset,
            Cutter(asset),
            bos_ids=rendering["bos"],
            eos_ids=rendering["eos"],
            chat_template=None if template is None else ChatTemplate(template.decode(), rendering["variables"]),
        )

    def asset(self) -> bytes:
        """Canonical JSON of all that decides how text is cut; the chat template is apart."""
        return self._asset

    def template_asset(self) -> bytes | None:
        """The chat template's bytes, None if there is none."""
        return None if self._chat_template is None else self._chat_template.source.encode()

    def rendering(self) -> dict[str, Any]:
        """What surrounds the text, for a recipe: template, BOS, EOS and all that a template can ask for."""
        template = self.template_asset()
        return {
            "template": None if template is None else digest_bytes(template),
            "variables": {} if self._chat_template is None else dict(self._chat_template.variables),
            "bos": list(self.bos_ids),
            "eos": list(self.eos_ids),
            "date": RENDERING_DATE,
            "version": RENDERING_VERSION,
        }

    @property
    def vocab_size(self) -> int:
        """Highest id + 1."""
        return len(self._token_bytes)

    @property
    def token_bytes(self) -> list[bytes | None]:
        """Bytes of each token by id; None for special tokens and ids without a token."""
        return self._token_bytes

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of all special tokens, BOS and EOS among them."""
        return self._special_ids

    @cached_property
    def fallback_ids(self) -> frozenset[int]:
        """Ids of byte tokens (``<0x0A>``), which texts hold only where no other token has their bytes."""
        single = ((index, data) for index, data in enumerate(self._token_bytes) if data is not None and len(data) == 1)
        return frozenset(index for index, data in single if self._cutter.spelling(index) == f"<0x{data.hex().upper()}>")

    @cached_property
    def roles(self) -> SpecialRoles:
        """Special tokens by what they are for.

        The chat template and the configuration come first; what they do not say is told by well-known spellings, so a
        tokenizer out of a store, which keeps no more than texts ask for, may know its padding by another token.
        """
        cutter = self._cutter
        ids = {spelling: index for index, spelling in cutter.special_tokens.items()}
        return SpecialRoles(
            bos=self.bos_ids[0] if self.bos_ids else None,
            eos=self.eos_ids[0] if self.eos_ids else None,
            end_of_turn=find_end_of_turn(self._chat_template, cutter.specials_of, ids.get),
            pad=self._pad_id if self._pad_id is not None else find_pad(ids.get),
        )

    def encode_text(self, text: str) -> list[int]:
        """Ids of a text by itself, without BOS and EOS; the spelling of a special token is ordinary text."""
        return self._cutter.cut([text])[0].ids.tolist()

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, as ``encode_text`` gives them, many at once."""
        return self._cutter.ids_of(texts)

    def byte_ends(self, ids: Sequence[int] | np.ndarray, text: str) -> ByteEnds:
        """Where each token of a text ends in its bytes, and what proves it.

        Args:
            ids: the text's T tokens, cut by this tokenizer or elsewhere, without BOS and EOS.
            text: what they are of.

        Returns:
            Proven by bytes if they are the text's; else by normalised characters (``normalised_ends``), if those agree;
            else estimated.

        Raises:
            TokenizerError: an id that the vocabulary does not have.
        """
        return self._cutter.byte_ends(np.asarray(ids, dtype=np.int64), text)

    def save(self, folder: Path) -> None:
        """Write a folder that ``transformers.AutoTokenizer`` and ``from_folder`` load."""
        special_tokens = {} if self._chat_template is None else dict(self._chat_template.variables)
        for name, ids in (("bos_token", self.bos_ids), ("eos_token", self.eos_ids)):
            special_tokens.update((name, spelling) for spelling in map(self._cutter.spelling, ids[:1]) if spelling)
        saved = TokenizerFolder(
            tokenizer_json=decode_tokenizer(self._asset),
            special_tokens=special_tokens,
            add_bos_token=bool(self.bos_ids),
            chat_template=None if self._chat_template is None else self._chat_template.source,
        )
        write_tokenizer_folder(folder, saved)

    def token_text(self, index: int) -> str:
        r"""A token as a terminal shows it: spaces as they are, line ends as ``⏎``, what is not UTF-8 as ``\xNN``."""
        data = self._token_bytes[index] if 0 <= index < self.vocab_size else None
        if data is not None:
            text = data.decode("utf-8", "backslashreplace").replace("\n", "⏎")
        else:
            text = self._cutter.spelling(index) or f"[{index}]"
        return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)

    def tokenize(self, documents: Sequence[Document]) -> list[TokenizedDocument]:
        """Tokens of whole documents, in order.

        A text, or a prompt with its completion, is cut as one string in which the spelling of a special token is
        ordinary text. A chat is rendered by the template, whose special tokens are special, and those in contents not.

        Raises:
            TokenizerError: a chat and no template, a template that refuses or changes it, or a document without tokens.
        """
        plain = iter(self._tokenize_plain([document for document in documents if not document.is_chat]))
        chats = iter(self._tokenize_chats([document for document in documents if document.is_chat]))
        return [next(chats if document.is_chat else plain) for document in documents]

    def _tokenize_plain(self, documents: Sequence[Document]) -> list[TokenizedDocument]:
        cut = self._cutter.cut([document.text for document in documents])
        return [
            surround(document, tokens, self.bos_ids, self.eos_ids)
            for document, tokens in zip(documents, cut, strict=True)
        ]

    def _tokenize_chats(self, documents: Sequence[Document]) -> list[TokenizedDocument]:
        if not documents:
            return []
        chats = [self._render(document) for document in documents]
        cut = self._cutter.cut([chat.text for chat in chats], parse_special=True)
        return [self._finish_chat(*each) for each in zip(documents, chats, cut, strict=True)]

    def _render(self, document: Document) -> RenderedChat:
        if self._chat_template is None:
            raise TokenizerError(
                f"{document.source or 'a document'} is a chat, and the tokenizer has no chat template: "
                "give one with --chat-template FILE"
            )
        return self._chat_template.render(document)

    def _finish_chat(self, document: Document, chat: RenderedChat, tokens: CutText) -> TokenizedDocument:
        if self._has_special_of_content(document, chat, tokens):
            # Cut apart, a content cannot bring in special tokens; it costs the merges across its edges, so only then.
            tokens = self._cutter.cut_runs([(run, not is_content) for run, is_content in chat.runs()])
        lengths = chat.content_lengths(tokens.byte_lengths)
        has_bos = tokens.ids[: len(self.bos_ids)].tolist() == list(self.bos_ids)
        in_content = CutText(tokens.ids, lengths, weakest([tokens.proof, chat.proof]))
        return surround(document, in_content, () if has_bos else self.bos_ids, ())

    def _has_special_of_content(self, document: Document, chat: RenderedChat, tokens: CutText) -> bool:
        """Whether a special token may have been made of a content, or of a content and what stands beside it."""
        if any(self._cutter.spells_special(segment.content) for segment in document.segments):
            return True
        is_special = np.isin(tokens.ids, list(self._cutter.special_tokens))
        ends = np.cumsum(tokens.byte_lengths, dtype=np.int64)[is_special]
        begins = ends - tokens.byte_lengths[is_special]
        begin_S, end_S = chat.byte_spans()
        span = np.searchsorted(end_S, begins, side="right")  # the first that ends after the token's beginning
        reaches = span < len(end_S)
        return bool((begin_S[span[reaches]] < ends[reaches]).any())


def _not_a_tokenizer(error: Exception) -> str:
    return f"not a tokenizer as its library writes one ({type(error).__name__}: {error}); save it again"


def _named_ids(cutter: Cutter, folder: TokenizerFolder, name: str) -> list[int]:
    """The id of a special token as a list; empty if the folder names none."""
    token = folder.special_tokens.get(name)
    if token is None:
        return []
    index = cutter.id_of(token)
    if index is None:
        raise TokenizerError(f"{name} {token!r} is not in tokenizer.json: save the tokenizer again")
    return [index]


def _check_rendering(rendering: Mapping[str, Any], template: bytes | None) -> None:
    expected, found = (RENDERING_VERSION, RENDERING_DATE), (rendering["version"], rendering["date"])
    if found != expected:
        raise TokenizerError(f"rendering: expected version and date {expected}, found {found}: update logitstore")
    digest = None if template is None else digest_bytes(template)
    if digest != rendering["template"]:
        raise TokenizerError(f"chat template: expected digest {rendering['template']}, found {digest}: run verify")
