"""The symbols of a text aligned with those of its tokens, where the tokenizer has normalised the text.

It is the cheapest way to walk through both from beginning to end. Equal symbols are matched, for nothing. Other steps
cost:

    1      an ignorable symbol (space, mark, control character) of either side is left unmatched
    0      an unknown token covers a symbol that no token of the vocabulary has
    2      ... a symbol that some token has
    8      ... a space; and again a symbol after a space, since unknown tokens mostly are words
    2^20   a symbol that is not ignorable is left unmatched, or an unknown token covers nothing: the alignment fails

Unless an unknown token is near, walking on while symbols are equal or one of them is ignorable is a cheapest way (a
step that skips one of two equal symbols can be exchanged for one that matches them). From an unknown token on, or from
some steps before where that fails, a dynamic programme over a window decides; of its way only the first part is kept.
It looks at a band along the diagonal, and at one four times as wide as long as the cheapest way touches its edge or
fails. Each window is bounded and brings the walk ahead, and a failure that stays is the last, so time is linear.

Shapes: N symbols of the text, M symbols of the tokens, W symbols of a window.
"""

from __future__ import annotations

import numba
import numpy as np

from logitstore.character_folding import SIGNIFICANT, SPACE

UNKNOWN_TOKEN = -1
"""Stands among the tokens' symbols for a token that may cover anything."""
FAILED = -1
"""Said instead of a cost: every way leaves out what it must not."""

_WRONG = 1 << 20
_WINDOW, _SMALL_WINDOW, _NARROWEST, _SURE = 128, 32, 8, 8
_BACK = 40
"""Steps that a walk is taken back by where what follows it fails."""
_INFINITE = 1 << 30
_MATCH, _SKIP_TEXT, _SKIP_TOKEN = 1, 2, 3


@numba.njit(nogil=True, cache=True)
def align_symbols(text, tokens, kind, in_vocabulary):  # type: ignore[no-untyped-def]
    """The last symbol of the text that each symbol of the tokens covers.

    Args:
        text: int32 [N].
        tokens: int32 [M], ``UNKNOWN_TOKEN`` for an unknown token.
        kind: uint8 by symbol, see ``character_folding``.
        in_vocabulary: bool by symbol, whether some token has it.

    Returns:
        (int32 [M] indices into ``text``, -1 where nothing is covered; the cost of the way, ``FAILED`` if there is
        none).
    """
    covers = np.full(len(tokens), -1, np.int32)
    steps = np.empty((_WINDOW + 1, _WINDOW + 1), np.uint8)
    at = token = cost = 0
    while True:
        begin, begin_token = at, token
        at, token, walked, num_walked = _walk(text, at, tokens, token, kind, covers, len(text) + len(tokens))
        if at == len(text) and token == len(tokens):
            return covers, cost + walked
        next_at, next_token, price = _align_window(text, at, tokens, token, kind, in_vocabulary, covers, steps)
        if price >= _WRONG and num_walked:
            # An unknown token may need a space that the walk has matched with another: decide from earlier on.
            fewer = max(0, num_walked - _BACK)
            at, token, walked, _ = _walk(text, begin, tokens, begin_token, kind, covers, fewer)
            covers[token:] = -1
            next_at, next_token, price = _align_window(text, at, tokens, token, kind, in_vocabulary, covers, steps)
        at, token = next_at, next_token
        cost += walked + price
        if price >= _WRONG:
            return covers, FAILED


@numba.njit(nogil=True, cache=True)
def _walk(text, at, tokens, token, kind, covers, most):  # type: ignore[no-untyped-def]
    """Go on as long as there is only one sensible step, ``most`` at most: the place reached, the cost, the steps."""
    cost = num_steps = 0
    if token > 0 and tokens[token - 1] == UNKNOWN_TOKEN:  # it may cover more
        return at, token, cost, num_steps
    while num_steps < most and at < len(text) and token < len(tokens) and tokens[token] != UNKNOWN_TOKEN:
        num_steps += 1
        if text[at] == tokens[token]:
            covers[token] = at
            at += 1
            token += 1
            continue
        skip_text = kind[text[at]] != SIGNIFICANT
        skip_token = kind[tokens[token]] != SIGNIFICANT
        if skip_text == skip_token:
            num_steps -= 1
            break
        at += skip_text
        token += skip_token
        cost += 1
    return at, token, cost, num_steps


@numba.njit(nogil=True, cache=True)
def _align_window(text, at, tokens, token, kind, in_vocabulary, covers, steps):  # type: ignore[no-untyped-def]
    """One dynamic programme, and its way followed as far as it is certain: the place reached, and the cost.

    A small window is enough if known tokens match in it.
    """
    size = _SMALL_WINDOW
    while True:
        height, width = min(len(text) - at, size), min(len(tokens) - token, size)
        more_text, more_tokens = at + height < len(text), token + width < len(tokens)
        widest = max(height, width)
        half = min(_NARROWEST, widest)
        while True:
            low, high = -half, half  # of text minus token
            if not more_text and not more_tokens:
                low, high = min(0, height - width) - half, max(0, height - width) + half
            end, end_token, price = _fill(
                text, at, height, tokens, token, width, low, high, kind, in_vocabulary, steps, more_text, more_tokens
            )
            inside, sure = _trace(steps, end, end_token, low, high, height, width, tokens, token)
            if (inside and price < _WRONG) or half >= widest:
                break
            half *= 4
        is_sure = price < _WRONG and sure >= _SURE
        if size == _WINDOW or is_sure or not (more_text or more_tokens):
            break
        size = _WINDOW
    limit = end + end_token
    if more_text or more_tokens:
        limit = limit * 3 // 4
    return _follow(text, at, tokens, token, kind, in_vocabulary, covers, steps, limit)


@numba.njit(nogil=True, cache=True)
def _fill(  # type: ignore[no-untyped-def]
    text, at, height, tokens, token, width, low, high, kind, in_vocabulary, steps, more_text, more_tokens
):
    """Cheapest steps into each place of the window; returns the place where the way ends, and its cost.

    It ends in the far corner, or wherever it is cheapest along the far edges beyond which a side goes on, and of
    ways that cost the same, the one that gets on furthest.
    """
    above, costs = np.full(width + 1, _INFINITE, np.int32), np.full(width + 1, _INFINITE, np.int32)
    token_costs = np.empty(width, np.int32)
    for j in range(width):
        token_costs[j] = _token_cost(tokens[token + j], kind)
    best, end, end_token = _INFINITE, 0, 0
    for i in range(height + 1):
        first, last = max(0, i - high), min(width, i - low)
        symbol, cover, skip, skip_in_unknown = -2, 0, 0, 0
        if i > 0:
            symbol = text[at + i - 1]
            cover = _cover_cost(symbol, kind, in_vocabulary)
            skip, skip_in_unknown = _skip_costs(text, at + i - 1, kind, in_vocabulary)
        costs[:] = _INFINITE
        for j in range(first, last + 1):
            cheapest, step = (0, 0) if i == 0 and j == 0 else (_INFINITE, 0)
            other = tokens[token + j - 1] if token + j > 0 else -2
            if i > 0 and j > 0 and other in (symbol, UNKNOWN_TOKEN):
                price = above[j - 1] + (cover if other == UNKNOWN_TOKEN else 0)
                if price < cheapest:
                    cheapest, step = price, _MATCH
            if i > 0:
                price = above[j] + (skip_in_unknown if other == UNKNOWN_TOKEN else skip)
                if price < cheapest:
                    cheapest, step = price, _SKIP_TEXT
            if j > first:
                price = costs[j - 1] + token_costs[j - 1]
                if price < cheapest:
                    cheapest, step = price, _SKIP_TOKEN
            costs[j] = cheapest
            steps[i, j] = step
            is_end = (more_text and i == height) or (more_tokens and j == width) or (i == height and j == width)
            if is_end and (cheapest < best or (cheapest == best and i + j > end + end_token)):
                best, end, end_token = cheapest, i, j
        above, costs = costs, above
    return end, end_token, best


@numba.njit(nogil=True, cache=True)
def _cover_cost(symbol, kind, in_vocabulary):  # type: ignore[no-untyped-def]
    """For an unknown token to cover a symbol."""
    if kind[symbol] == SPACE:
        return 8
    return 2 if in_vocabulary[symbol] else 0


@numba.njit(nogil=True, cache=True)
def _skip_costs(text, at, kind, in_vocabulary):  # type: ignore[no-untyped-def]
    """For a symbol of the text that no symbol of the tokens is matched with: after a known token, after an unknown."""
    if kind[text[at]] != SIGNIFICANT:
        return 1, 1
    after_space = at > 0 and kind[text[at - 1]] == SPACE
    return _WRONG, _cover_cost(text[at], kind, in_vocabulary) + 8 * after_space


@numba.njit(nogil=True, cache=True)
def _token_cost(symbol, kind):  # type: ignore[no-untyped-def]
    return _WRONG if symbol == UNKNOWN_TOKEN or kind[symbol] == SIGNIFICANT else 1


@numba.njit(nogil=True, cache=True)
def _trace(steps, end, end_token, low, high, height, width, tokens, token):  # type: ignore[no-untyped-def]
    """Turn the steps on the way round, into steps out of each place.

    Returns:
        (whether the way keeps off the band's edges, the number of matches with known tokens on it).
    """
    i, j, after, sure = end, end_token, 0, 0
    inside = True
    while True:
        inside &= (i - j > low or i == 0 or j == width) and (i - j < high or j == 0 or i == height)
        step = steps[i, j]
        steps[i, j] = after
        after = step
        if step == 0:
            return inside, sure
        sure += step == _MATCH and tokens[token + j - 1] != UNKNOWN_TOKEN
        i -= step != _SKIP_TOKEN
        j -= step != _SKIP_TEXT


@numba.njit(nogil=True, cache=True)
def _follow(text, at, tokens, token, kind, in_vocabulary, covers, steps, limit):  # type: ignore[no-untyped-def]
    """Take the steps that ``_trace`` has turned round, as far as ``limit`` along both sides."""
    i = j = cost = 0
    while steps[i, j] and i + j <= limit:
        step = steps[i, j]
        here = at + i
        if step == _MATCH:
            if tokens[token + j] == UNKNOWN_TOKEN:
                cost += _cover_cost(text[here], kind, in_vocabulary)
            covers[token + j] = here
        elif step == _SKIP_TEXT:
            in_unknown = token + j > 0 and tokens[token + j - 1] == UNKNOWN_TOKEN
            skip, skip_in_unknown = _skip_costs(text, here, kind, in_vocabulary)
            cost += skip_in_unknown if in_unknown else skip
            if in_unknown and kind[text[here]] == SIGNIFICANT:
                covers[token + j - 1] = here
        else:
            cost += _token_cost(tokens[token + j], kind)
        i += step != _SKIP_TOKEN
        j += step != _SKIP_TEXT
    return at + i, token + j, cost
