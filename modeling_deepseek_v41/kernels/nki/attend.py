# SPDX-License-Identifier: Apache-2.0
"""On the device: softmax attention of a group of queries over rows in SBUF, with a sink. Keys are the values.

A group's queries share every tile: rows (t, h) on the partitions. A query's own keys meet a stationary tile that is zero for
the other queries, so that all scores add up in the same PSUM tiles. Keys are worked on in pieces of up to 128, so that little
is left to do when the last ones are there, and a group's values are added up while the next one's keys come.
"""

import nki.isa as nisa
import nki.language as nl

from .layout import columns, diagonal, transposed
from .rotate import load_angles, turn_pairs
from .split import BANK, PARTITIONS, tiles

HIDDEN = -1e30
"""Added to the score of a key that a query does not see."""
FLOOR = -1e29
"""No real score is lower: the maximum of a query without keys, so that its probabilities become 0."""
LARGEST_EXPONENT = 87.0
"""exp of it and its reciprocal are normal fp32 numbers."""
AHEAD = 4
"""Queries whose rows are asked for before a query's keys are used."""
GROUP_BYTES = 48 * 1024
"""Of a partition, for the own rows of the queries of a group."""


def check(q: nl.NkiTensor, sink: nl.NkiTensor) -> None:
    """Refuses queries that a kernel has no room for."""
    rows, heads, dim = q.shape
    chunk = min(dim, PARTITIONS)
    assert 1 <= rows <= PARTITIONS and heads <= PARTITIONS, f"q {q.shape}: at most 128 queries and 128 heads"
    assert dim <= BANK and dim % 2 == 0 and dim % chunk == 0, f"q {q.shape}: head_dim even, to 512, 128 or more in 128s"
    assert sink.shape == (heads, 1), f"sink {sink.shape}, expected {(heads, 1)}"


def groups_of(count: int, heads: int, own_bytes: int) -> list[tuple[int, int]]:
    """(first, members) of the groups of ``count`` queries, of each ``own_bytes`` of own rows in a partition.

    From the end 1, 2, 4 and so on: a group's softmax happens while the next one's rows come, and nothing hides the last.
    """
    most = max(1, min(PARTITIONS // heads, GROUP_BYTES // max(1, own_bytes)))
    sizes, left, size = [], count, 1
    while left > 0:
        sizes.append(min(size, left))
        left -= sizes[-1]
        size = min(2 * size, most)
    found, first = [], 0
    for i in range(len(sizes)):
        members = sizes[len(sizes) - 1 - i]
        found.append((first, members))
        first += members
    return found


def start_group(
    out: nl.NkiTensor, q: nl.NkiTensor, sink: nl.NkiTensor, near: tuple | None, own_bias: nl.NkiTensor | None,
    table: nl.NkiTensor | None = None,
) -> tuple:  # fmt: skip
    """A group with the scores of what all its queries see, and with the bias of their own rows: what ``add_own`` takes.

    out, q [M, H, D] @ HBM of its M queries, sink [H, 1] fp32 @ HBM. near: tiles of rows [n, D] @ SBUF, those as columns
    [chunk, D / chunk, all n], and the bias [M, all n] @ SBUF; or None. own_bias [M, I, P] @ SBUF or None. table [M, 2, R] fp32
    @ HBM: the angles by which the queries are rotated, and what comes out back; None where they are rotated already.
    """
    members, heads, dim = out.shape
    rows = members * heads
    pieces = 0 if own_bias is None else own_bias.shape[1]
    pick_sb = _picker(members, heads, q.dtype)
    q_sb = nl.ndarray((rows, dim), q.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=q_sb, src=q.flatten_dims(0, 1))
    angles_sb = None
    if table is not None:
        angles_sb = load_angles(table.expand_dim(1).broadcast(1, heads), rows, 1)
        turn_pairs(q_sb[:, dim - table.shape[2] : dim], angles_sb, False)
    q_t_sb = columns([q_sb], dim, min(dim, PARTITIONS))
    blocks: list = []
    if own_bias is not None:
        for first, count in tiles(pieces, BANK // own_bias.shape[2]):
            blocks.append(_start_scores(pick_sb, own_bias[:, first : first + count]))
    most_sb = nl.ndarray((rows, pieces + (0 if near is None else 1)), nl.float32, buffer=nl.sbuf)
    near_tiles, near_psum = [], None
    if near is not None:
        near_tiles, near_t_sb, near_bias = near
        near_psum = _start_scores(pick_sb, near_bias)
        _add_scores(near_psum, q_t_sb, near_t_sb)
        nisa.tensor_reduce(dst=most_sb[:, pieces : pieces + 1], op=nl.maximum, data=near_psum, axis=1)
    own_q_sb = q_t_sb.expand_dim(2) if members == 1 else diagonal(q_t_sb, members)
    return out, sink, own_q_sb, near_tiles, near_psum, blocks, most_sb, angles_sb


def add_own(group: tuple, own: list, before: list) -> list:
    """Adds the scores of the rows ``own`` of each query, a list of I tiles [P, D] @ SBUF, and finishes the group ``before``.

    Returns the group to hand on as the next one's ``before``, or to ``finish``.
    """
    out, _, own_q_sb, _, _, blocks, most_sb, _ = group
    members, dim = out.shape[0], out.shape[2]
    pieces = len(own[0]) if len(blocks) > 0 else 0
    steps, done = members * pieces, 0
    keys_t, products, out_psum = [], [], None
    for s in range(steps + 1):
        if s == min(1, steps) and len(before) > 0:
            out_psum, products = _sums(before[0]), _products(before)
        if s < steps:
            more = len(products) * max(s - 1, 0) // steps
            _add_values(out_psum, products, done, more)
            done = more
            keys_t.append(columns([own[s // pieces][s % pieces]], dim, min(dim, PARTITIONS)))
        if s > 0:
            t, i = (s - 1) // pieces, (s - 1) % pieces
            scores = _piece(blocks, i, own[t][i].shape[0])
            _add_scores(scores, own_q_sb[:, :, t, :], keys_t[s - 1])
            if t == members - 1:
                nisa.tensor_reduce(dst=most_sb[:, i : i + 1], op=nl.maximum, data=scores, axis=1)
    weighed = _weigh(group, own)
    if len(before) > 0:
        _add_values(out_psum, products, done, len(products))
        _store(before, out_psum)
    return weighed


def _piece(blocks: list, i: int, parts: int) -> nl.NkiTensor:
    """Columns i * parts .. (i + 1) * parts of the blocks of whole pieces."""
    each = BANK // parts
    return blocks[i // each][:, i % each * parts : (i % each + 1) * parts]


def _picker(members: int, heads: int, dtype: str) -> nl.NkiTensor:
    """[members, (members, H)]: 1 at [t, (t, h)]. As a matmul's stationary tile it copies row t to the heads of query t."""
    identity_sb = nl.shared_identity_matrix(members, dtype)
    pick_sb = nl.ndarray((members, members, heads), dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=pick_sb, src=identity_sb.expand_dim(2).broadcast(2, heads))
    return pick_sb.flatten_dims(1, 2)


def _start_scores(pick_sb: nl.NkiTensor, bias: nl.NkiTensor) -> nl.NkiTensor:
    """The bias [members, .. keys] of each query at its heads, [(members, H), keys] in PSUM."""
    keys = 1
    for size in bias.shape[1:]:
        keys *= size
    scores_psum = nl.ndarray((pick_sb.shape[1], keys), nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=scores_psum, stationary=pick_sb, moving=bias, accumulate=False)
    return scores_psum


def _add_scores(scores_psum: nl.NkiTensor, q_t: nl.NkiTensor, keys_t_sb: nl.NkiTensor) -> None:
    """Adds q . key."""
    for c in range(keys_t_sb.shape[1]):
        nisa.nc_matmul(dst=scores_psum, stationary=q_t[:, c, :], moving=keys_t_sb[:, c, :], accumulate=True)


def _weigh(group: tuple, own: list) -> list:
    """The group with the probabilities of its keys, not yet divided by their total, and the terms of that."""
    out, sink, _, near_tiles, near_psum, blocks, most_sb, angles_sb = group
    members, heads, dim = out.shape
    rows, scale = members * heads, dim**-0.5
    shift_sb = nl.ndarray((rows, 1), nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=shift_sb, op=nl.maximum, data=most_sb, axis=1)
    nisa.tensor_scalar(dst=shift_sb, data=shift_sb, op0=nl.maximum, operand0=FLOOR, op1=nl.multiply, operand1=-scale)
    sink_sb = nl.ndarray((rows, 1), nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=sink_sb, src=sink.expand_dim(0).broadcast(0, members))
    scores = blocks[:]
    if near_psum is not None:
        scores.append(near_psum)
    total_sb = nl.ndarray((rows, len(scores) + 1), nl.float32, buffer=nl.sbuf)
    weighed = []
    for b in range(len(scores)):
        weighed.append(_exponentials(scores[b], shift_sb, scale, out.dtype, total_sb[:, b : b + 1]))
    nisa.tensor_scalar(dst=sink_sb, data=sink_sb, op0=nl.add, operand0=shift_sb, op1=nl.minimum, operand1=LARGEST_EXPONENT)
    nisa.activation(dst=total_sb[:, len(scores) : len(scores) + 1], op=nl.exp, data=sink_sb)
    return [out, weighed, total_sb, near_tiles, own, angles_sb]


def finish(before: list) -> None:
    """The sum of the values of a group, to its ``out``."""
    out_psum, products = _sums(before[0]), _products(before)
    _add_values(out_psum, products, 0, len(products))
    _store(before, out_psum)


def _sums(out: nl.NkiTensor) -> nl.NkiTensor:
    """Room for the sum of values [(members, H), D] in PSUM."""
    return nl.ndarray((out.shape[0] * out.shape[1], out.shape[2]), nl.float32, buffer=nl.psum)


def _products(before: list) -> list:
    """The sum of values as (stationary [n, (members, H)], values [n, D]), each query's own rows first."""
    out, weighed, _, near_tiles, own, _ = before
    members, products = out.shape[0], []
    for b in range(len(weighed) - (1 if len(near_tiles) > 0 else 0)):
        parts = own[0][0].shape[0]
        p_t_sb = transposed(weighed[b], 0, parts, weighed[b].shape[1] // parts)
        own_p_sb = p_t_sb.expand_dim(2) if members == 1 else diagonal(p_t_sb, members)
        for i in range(p_t_sb.shape[1]):
            for t in range(members):
                products.append((own_p_sb[:, i, t, :], own[t][b * (BANK // parts) + i]))
    place = 0
    for rows_sb in near_tiles:
        products.append((transposed(weighed[-1], place, rows_sb.shape[0], 1)[:, 0, :], rows_sb))
        place += rows_sb.shape[0]
    return products


def _add_values(out_psum: nl.NkiTensor | None, products: list, first: int, last: int) -> None:
    """Products ``first`` to ``last`` of the sum of values."""
    for i in range(first, last):
        nisa.nc_matmul(dst=out_psum, stationary=products[i][0], moving=products[i][1], accumulate=i > 0)


def _store(before: list, out_psum: nl.NkiTensor) -> None:
    """The sum of values divided by the total of the probabilities, rounded and rotated back, to the group's ``out``."""
    out, _, total_sb, _, _, angles_sb = before
    rows, dim = out_psum.shape
    rest_sb = nl.ndarray((rows, 1), nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=rest_sb, op=nl.add, data=total_sb, axis=1)
    nisa.reciprocal(dst=rest_sb, data=rest_sb)
    out_sb = nl.ndarray((rows, dim), out.dtype, buffer=nl.sbuf)
    cut = dim // 2 if angles_sb is None else dim - angles_sb.shape[2]
    for first, last, engine in ((cut, dim, nisa.engine.vector), (0, cut, nisa.engine.scalar)):
        if last > first:
            nisa.tensor_scalar(
                dst=out_sb[:, first:last], data=out_psum[:, first:last], op0=nl.multiply, operand0=rest_sb, engine=engine
            )
    if angles_sb is not None:
        turn_pairs(out_sb[:, cut:dim], angles_sb, True)
    nisa.dma_copy(dst=out.flatten_dims(0, 1), src=out_sb)


def _exponentials(
    scores_psum: nl.NkiTensor, shift_sb: nl.NkiTensor, scale: float, dtype: str, total: nl.NkiTensor
) -> nl.NkiTensor:
    """round(exp(scale * score + shift)), and the sum of each row before the rounding in ``total``."""
    p_sb = nl.ndarray(scores_psum.shape, dtype, buffer=nl.sbuf)
    nisa.activation(
        dst=p_sb, op=nl.exp, data=scores_psum, bias=shift_sb, scale=scale, reduce_op=nl.add, reduce_res=total,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )  # fmt: skip
    return p_sb
