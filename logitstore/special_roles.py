"""What a tokenizer's special tokens are for: beginning and end of a text, end of a turn, padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from logitstore.chat import ChatTemplate
from logitstore.documents import Document, Segment
from logitstore.errors import TokenizerError

_END_OF_TURN = (
    *(
        "<|im_end|>",
        "<|eot_id|>",
        "<end_of_turn>",
        "<turn|>",
        "<|eot|>",
        "<|end|>",
        "<|return|>",
        "<|END_OF_TURN_TOKEN|>",
    ),
    *("<|eom_id|>", "<|end_of_turn|>", "<|endofturn|>", "<｜end▁of▁sentence｜>", "<|end_of_text|>", "</s>", "<eos>"),
    *("<|endoftext|>", "[SEP]"),
)
_PAD = ("<pad>", "<|pad|>", "[PAD]", "<|finetune_right_pad_id|>", "<|fim_pad|>", "<｜▁pad▁｜>")

# Some templates insist on a system prompt, or on none.
_CONVERSATIONS = (("user", "assistant"), ("system", "user", "assistant"))


@dataclass(frozen=True)
class SpecialRoles:
    """Token ids by role, None where a tokenizer has no such token. One token may have several roles."""

    bos: int | None = None
    """Begins a text."""
    eos: int | None = None
    """Ends a text."""
    end_of_turn: int | None = None
    """Ends an assistant's message in a chat."""
    pad: int | None = None
    """Fills a batch; stands for nothing."""


def find_end_of_turn(
    template: ChatTemplate | None,
    specials_of: Callable[[str], list[int]],
    special_id: Callable[[str], int | None],
) -> int | None:
    """The first special token that the chat template puts after an assistant's content, else one that is known by name.

    Args:
        template: of the tokenizer, if it has one.
        specials_of: special tokens of a rendered string, in order.
        special_id: id of a special token by its spelling, None if there is none.
    """
    for rest in () if template is None else _after_answers(template):
        found = specials_of(rest)
        if found:
            return found[0]
    return _first_known(_END_OF_TURN, special_id)


def find_pad(special_id: Callable[[str], int | None]) -> int | None:
    """A padding token that is known by name."""
    return _first_known(_PAD, special_id)


def _after_answers(template: ChatTemplate) -> Iterator[str]:
    """What the template writes after an answer that ends a chat, for each conversation that it accepts."""
    for roles in _CONVERSATIONS:
        try:
            chat = template.render(Document(tuple(Segment(role, f"some {role}'s words") for role in roles)))
        except TokenizerError:
            continue
        yield chat.text[chat.spans[-1][1] :]


def _first_known(spellings: tuple[str, ...], special_id: Callable[[str], int | None]) -> int | None:
    found = map(special_id, spellings)
    return next((index for index in found if index is not None), None)
