# SPDX-License-Identifier: Apache-2.0
"""The parameters that NKI 0.6's stubs (nki/api/nki/{isa,language}/__init__.py) give what the emulator has, as data.

Read from github.com/aws-neuron/aws-neuron-sdk at commit 81ce03a.
"""

ISA = {
    "activation": "dst, op, data, bias=None, scale=1.0, reduce_op=None, reduce_res=None, reduce_cmd=reduce_cmd.idle, name=None",
    "activation_reduce": "dst, op, data, reduce_op, reduce_res, bias=None, scale=1.0, name=None",
    "affine_select": "dst, pattern, channel_multiplier, on_true_tile, on_false_value, cmp_op=equal, offset=0, name=None",
    "core_barrier": "data, cores, engine=engine.gpsimd, name=None",
    "dma_copy": "dst, src, priority=None, oob_mode=oob_mode.error, dge_mode=dge_mode.unknown, engine=engine.unknown, name=None",
    "get_nc_version": "",
    "iota": "dst, pattern, offset=0, channel_multiplier=0, name=None",
    "max8": "dst, src, name=None",
    "memset": "dst, value, engine=engine.unknown, name=None",
    "nc_find_index8": "dst, data, vals, name=None",
    "nc_match_replace8": "dst, data, vals, imm, dst_idx=None, name=None",
    "nc_matmul": (
        "dst, stationary, moving, is_stationary_onezero=False, is_moving_onezero=False, is_transpose=False, "
        "accumulate=None, tile_position=(), tile_size=(), perf_mode=matmul_perf_mode.none, name=None"
    ),
    "nc_n_gather": "dst, data, indices, name=None",
    "nc_transpose": "dst, data, engine=engine.unknown, name=None",
    "nonzero_with_count": "dst, src, index_offset=0, padding_val=-1, name=None",
    "reciprocal": "dst, data, name=None",
    "register_alloc": "x=None",
    "register_load": "dst, src",
    "register_move": "dst, src",
    "register_store": "dst, src",
    "scalar_tensor_tensor": "dst, data, op0, operand0, op1, operand1, reverse0=False, reverse1=False, name=None",
    "select_reduce": (
        "dst, predicate, on_true, on_false, reduce_res=None, reduce_cmd=reduce_cmd.idle, reduce_op=maximum, "
        "reverse_pred=False, name=None"
    ),
    "sendrecv": "src, dst, send_to_rank, recv_from_rank, pipe_id, dma_engine=dma_engine.dma, name=None",
    "tensor_copy": "dst, src, engine=engine.unknown, name=None",
    "tensor_copy_predicated": "dst, src, predicate, reverse_pred=False, name=None",
    "tensor_reduce": "dst, op, data, axis, negate=False, keepdims=False, name=None",
    "tensor_scalar": (
        "dst, data, op0, operand0, reverse0=False, op1=None, operand1=None, reverse1=False, engine=engine.unknown, name=None"
    ),
    "tensor_scalar_cumulative": "dst, src, op0, op1, imm0, imm1=None, reduce_cmd=reduce_cmd.reset_reduce, name=None",
    "tensor_scalar_reduce": (
        "dst, data, op0, operand0, reduce_op, reduce_res=None, reverse0=False, reduce_cmd=reduce_cmd.reset_reduce, "
        "reduce_init=None, reduce_res_negate=False, name=None"
    ),
    "tensor_tensor": "dst, data1, data2, op, engine=engine.unknown, name=None",
    "tensor_tensor_scan": "dst, data0, data1, initial, op0, op1, reverse0=False, reverse1=False, name=None",
}

LANGUAGE = {
    "NkiTensor.ap": "self, pattern, offset=None, scalar_offset=None, vector_offset=None, indirect_dim=0, dtype=None",
    "NkiTensor.broadcast": "self, dim, size",
    "NkiTensor.expand_dim": "self, dim",
    "NkiTensor.flatten_dims": "self, start_dim, end_dim",
    "NkiTensor.get_pattern": "self",
    "NkiTensor.is_contiguous": "self",
    "NkiTensor.is_indirect": "self",
    "NkiTensor.permute": "self, dims",
    "NkiTensor.rearrange": "self, src_pattern, dst_pattern, fixed_sizes=None",
    "NkiTensor.reshape": "self, shape",
    "NkiTensor.reshape_dim": "self, dim, shape",
    "NkiTensor.select": "self, dim, index",
    "NkiTensor.slice": "self, dim, start, end, step=1",
    "NkiTensor.squeeze_dim": "self, dim",
    "NkiTensor.vector_select": "self, dim, vector_offset",
    "NkiTensor.view": "self, dtype",
    "device_print": "print_prefix, tensor",
    "dynamic_range": "start, stop=None, step=1",
    "fori_loop": "lower, upper, body_fun, step=1",
    "full": "shape, fill_value, dtype, buffer=sbuf, name=''",
    "is_hbm": "buffer",
    "is_on_chip": "buffer",
    "is_psum": "buffer",
    "is_sbuf": "buffer",
    "load": "src, dtype=None",
    "ndarray": "shape, dtype, buffer=sbuf, name='', address=None",
    "no_reorder": "",
    "num_programs": "axes=0",
    "ones": "shape, dtype, buffer=sbuf, name=''",
    "program_id": "axis=0",
    "program_ndim": "",
    "shared_constant": "constant",
    "shared_identity_matrix": "n, dtype=uint8, dst=None",
    "store": "dst, value",
    "while_loop": "init, body_fun",
    "zeros": "shape, dtype, buffer=sbuf, name=''",
}
