# SPDX-License-Identifier: Apache-2.0
"""Whole kernels in the shapes this model needs: active experts in a dynamic loop on two cores, sparse attention by index."""

import ml_dtypes
import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from . import real_nki, run

P = 128
rng = np.random.default_rng(0)


@nki.jit
def active_experts(x, weights, scale, chosen):
    """y = sum over active experts of (x @ weights[e]) * scale[e]; each core has its own output columns.

    Args: x [P, K1, M] bf16 (k = k1 * P + p) @ HBM; weights [E, P, K1, N] fp8 @ HBM; scale [E, P, N // P] fp32 @ HBM;
    chosen [1, E] fp32, not 0 where a row chose the expert @ HBM. Returns [P, N // P, M] fp32 (n = nt * P + p).
    """
    experts, _, k1, n = weights.shape
    m = x.shape[2]
    tiles = n // P // nl.num_programs()
    first = nl.program_id() * tiles
    out = nl.ndarray((P, n // P, m), nl.float32, buffer=nl.shared_hbm)

    x_sb = nl.load(x)
    chosen_sb = nl.load(chosen)
    active_sb = nl.ndarray((1, experts + 1), nl.int32, buffer=nl.sbuf)
    nisa.nonzero_with_count(dst=active_sb, src=chosen_sb)
    count = nisa.register_alloc()
    nisa.register_load(count, active_sb[:, experts : experts + 1])
    sum_sb = nl.zeros((P, tiles, m), nl.float32, buffer=nl.sbuf)

    def one_expert(i):
        expert_sb = nl.ndarray((1, 1), nl.int32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=expert_sb, src=active_sb.ap([[experts + 1, 1], [1, 1]], scalar_offset=i, indirect_dim=1))
        w_sb = nl.ndarray((P, k1, tiles * P), weights.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=w_sb, src=weights[:, :, :, first * P : (first + tiles) * P].select(0, expert_sb))
        s_sb = nl.ndarray((P, tiles), nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(dst=s_sb, src=scale[:, :, first : first + tiles].select(0, expert_sb))
        product = nl.ndarray((P, tiles, m), nl.float32, buffer=nl.psum)
        for t in range(tiles):
            for k in range(k1):
                nisa.nc_matmul(
                    dst=product[:, t, :],
                    stationary=w_sb[:, k, t * P : (t + 1) * P],
                    moving=x_sb[:, k, :],
                    accumulate=k > 0,
                )
        scaled_sb = nl.ndarray((P, tiles, m), nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=scaled_sb, data1=product, data2=s_sb.expand_dim(2).broadcast(2, m), op=nl.multiply)
        nisa.tensor_tensor(dst=sum_sb, data1=sum_sb, data2=scaled_sb, op=nl.add)

    nl.fori_loop(0, count, one_expert)
    nisa.dma_copy(dst=out[:, first : first + tiles, :], src=sum_sb)
    return out


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("active", [[], [1, 4], [0, 1, 2, 3, 4]])
def test_active_experts(cores, active):
    experts, k1, n, m = 5, 2, 256, 8
    x = rng.standard_normal((P, k1, m)).astype(ml_dtypes.bfloat16)
    weights = rng.standard_normal((experts, P, k1, n)).astype(ml_dtypes.float8_e4m3)
    scale = np.exp2(rng.integers(-3, 3, (experts, P, n // P))).astype(np.float32)
    chosen = np.isin(np.arange(experts), active).astype(np.float32)[None]
    result = run(active_experts, x, weights, scale, chosen, cores=cores)
    product = np.einsum("pkm,epkn->enm", x.astype(np.float64), weights.astype(np.float64))
    product = product.reshape(experts, n // P, P, m).transpose(0, 2, 1, 3) * scale[..., None]
    np.testing.assert_allclose(result.outputs, (product * chosen[0, :, None, None, None]).sum(0), rtol=1e-4, atol=1e-4)
    if not real_nki():
        assert result.trace.count("nc_matmul") == len(active) * k1 * n // P
        assert result.trace.dma_bytes() >= len(active) * weights[0].nbytes


@nki.jit
def sparse_attention(q, kv, indices, bias, sink):
    """Softmax attention of one token's heads over rows of ``kv`` by index, with a sink in the denominator; keys are the values.

    Args, all @ HBM: q [D, H] bf16; kv [N, D] bf16; indices [T, 1] int32, -1 for none; bias [1, T] fp32, 0 or -1e30;
    sink [H, 1] fp32. D = 128, T <= 128. Returns [H, D] fp32.
    """
    d, heads = q.shape
    count = indices.shape[0]
    q_sb, index_sb, sink_sb = nl.load(q), nl.load(indices), nl.load(sink)
    ones_sb = nl.ones((1, heads), nl.float32)
    bias_sb = nl.load(bias)
    safe_sb = nl.ndarray((count, 1), nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=safe_sb, data=index_sb, op0=nl.maximum, operand0=0.0)
    kv_sb = nl.ndarray((count, d), kv.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=kv_sb, src=kv.vector_select(0, safe_sb))

    kt_psum = nl.ndarray((d, count), kv.dtype, buffer=nl.psum)
    nisa.nc_transpose(dst=kt_psum, data=kv_sb)
    kt_sb = nl.ndarray((d, count), kv.dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=kt_sb, src=kt_psum)
    score_psum = nl.ndarray((heads, count), nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=score_psum, stationary=q_sb, moving=kt_sb, accumulate=False)
    bias_psum = nl.ndarray((heads, count), nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=bias_psum, stationary=ones_sb, moving=bias_sb, accumulate=False)
    score_sb = nl.ndarray((heads, count), nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=score_sb, src=bias_psum)
    nisa.tensor_tensor(dst=score_sb, data1=score_sb, data2=score_psum, op=nl.add)

    most_sb = nl.ndarray((heads, 1), nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=most_sb, op=nl.maximum, data=score_sb, axis=1, negate=True)
    total_sb = nl.ndarray((heads, 1), nl.float32, buffer=nl.sbuf)
    p_sb = nl.ndarray((heads, count), nl.bfloat16, buffer=nl.sbuf)
    nisa.activation(
        dst=p_sb,
        op=nl.exp,
        data=score_sb,
        bias=most_sb,
        reduce_op=nl.add,
        reduce_res=total_sb,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )
    nisa.activation(dst=sink_sb, op=nl.exp, data=sink_sb, bias=most_sb)
    nisa.tensor_tensor(dst=total_sb, data1=total_sb, data2=sink_sb, op=nl.add)
    nisa.reciprocal(dst=total_sb, data=total_sb)

    pt_psum = nl.ndarray((count, heads), nl.bfloat16, buffer=nl.psum)
    nisa.nc_transpose(dst=pt_psum, data=p_sb)
    pt_sb = nl.ndarray((count, heads), nl.bfloat16, buffer=nl.sbuf)
    nisa.tensor_copy(dst=pt_sb, src=pt_psum)
    out_psum = nl.ndarray((heads, d), nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=out_psum, stationary=pt_sb, moving=kv_sb, accumulate=False)
    out_sb = nl.ndarray((heads, d), nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=out_sb, data=out_psum, op0=nl.multiply, operand0=total_sb)
    out = nl.ndarray((heads, d), nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=out_sb)
    return out


def test_sparse_attention():
    d, heads, n, count = 128, 8, 300, 96
    q = (rng.standard_normal((d, heads)) * d**-0.5).astype(ml_dtypes.bfloat16)
    kv = rng.standard_normal((n, d)).astype(ml_dtypes.bfloat16)
    indices = np.sort(rng.permutation(n)[:count])[:, None].astype(np.int32)
    indices[80:] = -1
    bias = np.where(indices.T < 0, -1e30, 0).astype(np.float32)
    sink = rng.standard_normal((heads, 1)).astype(np.float32)
    out = run(sparse_attention, q, kv, indices, bias, sink).outputs
    rows = kv.astype(np.float64)[indices[:80, 0]]
    p = np.exp(q.astype(np.float64).T @ rows.T)
    expected = p @ rows / (p.sum(1, keepdims=True) + np.exp(sink))
    np.testing.assert_allclose(out, expected, atol=0.02)


@nki.jit
def exchanged_sum(x):
    """Sum x [2 * P, F] over its rows: each core half of them by matmul; the halves meet by sendrecv. Returns [2, F]."""
    f = x.shape[1]
    core = nl.program_id()
    out = nl.ndarray((2, f), nl.float32, buffer=nl.shared_hbm)
    x_sb = nl.ndarray((P, f), nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=x_sb, src=x[core * P : (core + 1) * P, :])
    sum_psum = nl.ndarray((1, f), nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=sum_psum, stationary=nl.ones((P, 1), nl.float32), moving=x_sb, accumulate=False)
    mine, other = nl.ndarray((1, f), nl.float32), nl.ndarray((1, f), nl.float32)
    nisa.tensor_copy(dst=mine, src=sum_psum)
    nisa.sendrecv(src=mine, dst=other, send_to_rank=1 - core, recv_from_rank=1 - core, pipe_id=0)
    nisa.tensor_tensor(dst=mine, data1=mine, data2=other, op=nl.add)
    nisa.dma_copy(dst=out[core], src=mine)
    return out


def test_cores_exchange():
    x = rng.standard_normal((2 * P, 32)).astype(np.float32)
    out = run(exchanged_sum, x, cores=2).outputs
    np.testing.assert_allclose(out, np.stack([x.sum(0)] * 2), rtol=1e-4, atol=1e-4)


@nki.jit
def halving(x):
    """Halve x [1, 1] fp32 until it is below 1, a loop as long as the data says. Returns [1, 2]: the value and the rounds."""
    out = nl.ndarray((1, 2), nl.float32, buffer=nl.shared_hbm)
    x_sb = nl.load(x)
    rounds_sb = nl.zeros((1, 1), nl.float32)
    again_sb = nl.ndarray((1, 1), nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=again_sb, data=x_sb, op0=nl.greater_equal, operand0=1.0)
    again = nisa.register_alloc()
    nisa.register_load(again, again_sb)

    def body(condition):
        nisa.tensor_scalar(dst=x_sb, data=x_sb, op0=nl.multiply, operand0=0.5)
        nisa.tensor_scalar(dst=rounds_sb, data=rounds_sb, op0=nl.add, operand0=1.0)
        nisa.tensor_scalar(dst=again_sb, data=x_sb, op0=nl.greater_equal, operand0=1.0)
        nisa.register_load(condition, again_sb)
        return condition

    nl.while_loop(again, body)
    nisa.dma_copy(dst=out[:, 0:1], src=x_sb)
    nisa.dma_copy(dst=out[:, 1:2], src=rounds_sb)
    return out


@pytest.mark.parametrize("start, expected", [(0.5, [0.5, 0]), (1.0, [0.5, 1]), (40.0, [0.625, 6])])
def test_while_loop(start, expected):
    assert run(halving, np.full((1, 1), start, np.float32)).outputs.tolist() == [expected]
