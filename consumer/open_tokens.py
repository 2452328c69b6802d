"""Open tokens: a teacher's token of which the student has written the first pieces, and which might go on.

Where the teacher writes ``ation`` and the student ``at ion``, no row begins at ``ion``. But the row of ``ation`` says
how likely each candidate was, and the student's tokenizer how it cuts each. Given that the student has written ``at``,
its next token is distributed as the second pieces of the candidates that it begins with ``at``; and ``at`` itself, if
it was a candidate, says how likely it is that the teacher's token ends here. Of all v cut into s_1 .. s_k ..,

    P(s, going on | s_1 .. s_k) = the share of p(v) of those cut into s_1 .. s_k s ..
    P(end | s_1 .. s_k)         = the share of those cut into s_1 .. s_k and no more

So the student's next token is a mixture: of these continuations, and, with the probability of an end, of the row that
begins here. Both parts are known at a shared beginning; inside a teacher's token the second is not, and its mass is the
rest. Without the first part, rows would know from the text to come that the token before has ended.

What a row does not list stays out of the sums. In a sample they are estimates, and their ratio is not unbiased; the
text's own token, which is in them, is kept for certain.

Shapes: N positions, K entries, U teacher vocabulary, P pieces that are known of a token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from logitstore.consumer.rows import TeacherRows


class Continuations(NamedTuple):
    """What the row of an open token says.

    Attributes:
        next_NK: int64, the student's next token by each entry; -1: it has none, or other first pieces.
        log_masses_NK: float32, nats, of the entries that go on; -inf of others.
        log_end_N: float32, nats, that the open token ends here. With the masses it makes 1.
    """

    next_NK: Tensor
    log_masses_NK: Tensor
    log_end_N: Tensor


def continuations(
    rows: TeacherRows, pieces_UP: Tensor, written_NP: Tensor, num_written_N: Tensor, ended_N: Tensor
) -> Continuations:
    """Condition rows of open tokens on what the student has written of them.

    Args:
        rows: over the teacher's tokens.
        pieces_UP: int64 student tokens that each teacher token is cut into, -1 after the last.
        written_NP: int64 student tokens written since the row's beginning, [N, P - 1].
        num_written_N: int64, how many of them count, 1 to P - 1; 0: there is no open token, so it ends for certain.
        ended_N: bool, the text's own token, column 0, has ended here, however the student would cut it by itself.
    """
    pieces_NKP = _pieces_of(rows, pieces_UP)
    counts_NP = torch.arange(written_NP.shape[1], device=written_NP.device) < num_written_N[:, None]
    agrees_NK = ((pieces_NKP[..., :-1] == written_NP[:, None]) | ~counts_NP[:, None]).all(-1)
    agrees_NK[:, 0] |= ended_N
    agrees_NK = agrees_NK & (rows.ids_NK >= 0) & (num_written_N > 0)[:, None]
    next_NK = pieces_NKP.gather(-1, num_written_N[:, None, None].expand(-1, pieces_NKP.shape[1], 1))[..., 0]
    next_NK = next_NK.masked_fill(~agrees_NK, -1)
    next_NK[:, 0] = next_NK[:, 0].masked_fill(ended_N, -1)
    log_agreeing_NK = rows.log_masses_NK.masked_fill(~agrees_NK, -torch.inf)
    log_norm_N1 = log_agreeing_NK.logsumexp(-1, keepdim=True)
    is_none_N = log_norm_N1[:, 0] == -torch.inf
    log_given_NK = log_agreeing_NK - log_norm_N1.masked_fill(is_none_N[:, None], 0.0)
    log_end_N = log_given_NK.masked_fill(next_NK >= 0, -torch.inf).logsumexp(-1).masked_fill(is_none_N, 0.0)
    return Continuations(next_NK, log_given_NK.masked_fill(next_NK < 0, -torch.inf), log_end_N)


def log_mass_that_begins_with(
    rows: TeacherRows, pieces_UP: Tensor, first_N: Tensor, among_NK: Tensor | None = None
) -> Tensor:
    """[N] log of the mass of entries that the student writes with several tokens, this one first; -inf for none.

    ``among_NK``: bool, the entries to look at; default all.
    """
    pieces_NKP = _pieces_of(rows, pieces_UP)
    begins_NK = (pieces_NKP[..., 0] == first_N[:, None]) & (pieces_NKP[..., 1] >= 0)
    if among_NK is not None:
        begins_NK = begins_NK & among_NK
    return rows.log_masses_NK.masked_fill(~begins_NK, -torch.inf).logsumexp(-1)


def _pieces_of(rows: TeacherRows, pieces_UP: Tensor) -> Tensor:
    """[N, K, P]; -1 throughout for fill and padding of the teacher's head."""
    known_NK = (rows.ids_NK >= 0) & (rows.ids_NK < len(pieces_UP))
    return pieces_UP[rows.ids_NK.where(known_NK, 0)].masked_fill(~known_NK[..., None], -1)
