# SPDX-License-Identifier: Apache-2.0
"""Views of tensors: the examples of the language guide and of NkiTensor's docstrings, and their limits."""

import nki.language as nl
import numpy as np
import pytest

from . import RuleError, real_nki, run

pytestmark = pytest.mark.skipif(real_nki(), reason="the emulator's own views")


def in_kernel(body):
    """Run ``body`` where tensors can be allocated."""
    run(body)


def sbuf(*shape):
    return nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)


def test_attributes():
    def kernel():
        t = sbuf(128, 64)
        assert (t.shape, t.strides, t.offset, t.dtype, t.buffer, t.ndim, t.size) == (
            (128, 64),
            (64, 1),
            0,
            "float32",
            nl.sbuf,
            2,
            8192,
        )

    in_kernel(kernel)


def test_integers_keep_two_dimensions_on_chip():
    def kernel():
        t = sbuf(64, 64, 64)
        assert t[0, 0, 10].shape == (1, 1)
        assert t[:, 0].shape == (64, 64)
        assert t[:, 0, 10].shape == (64, 1)
        assert t[0:64, 0, 0:64].shape == (64, 64)
        assert t[:, :, ::2].shape == (64, 64, 32)
        assert t[...].shape == (64, 64, 64)
        assert t[0, ..., :].shape == (1, 64, 64)
        assert t[0, ...][:, 0:32, :].shape == (1, 32, 64)
        h = nl.ndarray((4, 128, 32), dtype=nl.float32, buffer=nl.private_hbm)
        assert h[0, :, :].shape == (128, 32)
        assert h[0, 1, 2].shape == (1,)
        assert h[nl.ds(1, 2)].shape == (2, 128, 32)

    in_kernel(kernel)


def test_documented_examples():
    def kernel():
        t = sbuf(128, 24)
        assert t.reshape_dim(1, (4, 6)).shape == t.reshape_dim(1, (4, -1)).shape == (128, 4, 6)
        assert t.rearrange(("b", ("h", "w")), ("b", "w", "h"), {"h": 4}).shape == (128, 6, 4)
        assert sbuf(128, 2, 3, 4).flatten_dims(1, 2).shape == (128, 6, 4)
        assert sbuf(128, 1, 64).broadcast(1, 8).shape == (128, 8, 64)
        assert sbuf(128, 64).expand_dim(1).squeeze_dim(1).shape == (128, 64)
        assert sbuf(128, 4, 16)[0:64].permute((0, 2, 1))[:, 0, :].shape == (64, 4)
        u = sbuf(128, 64).slice(1, 8, 24)
        assert (u.get_pattern(), u.offset) == ([[64, 128], [1, 16]], 8)
        assert sbuf(128, 64).view(nl.uint8).shape == (128, 256)
        assert not u.is_contiguous() or u.shape[1] == 16
        assert not sbuf(128, 4, 6).permute((0, 2, 1)).is_contiguous()
        assert sbuf(128, 256).ap([[512, 128], [1, 512]], dtype=nl.bfloat16).shape == (128, 512)

    in_kernel(kernel)


@pytest.mark.parametrize(
    "rule, make",
    [
        ("view", lambda t: t.permute((1, 0))),
        ("view", lambda t: t.broadcast(1, 4)),
        ("view", lambda t: t.reshape((64, 128))),
        ("view", lambda t: t.expand_dim(0)),
        ("view", lambda t: t[:, ::2].view(nl.uint8)),
        ("view", lambda t: t.reshape((128, 4, 16)).permute((0, 2, 1)).reshape((128, 64))),
        ("bounds", lambda t: t[:, 60:70]),
        ("bounds", lambda t: t[128]),
        ("bounds", lambda t: t.ap([[64, 128], [1, 65]])),
        ("partition-step", lambda t: t.ap([[128, 64], [1, 64]])),
        ("index", lambda t: t[0, 0, 0]),
        ("index", lambda t: t[:, 1.0]),
        ("ap-offset", lambda t: t[:, 8:].ap([[64, 128], [1, 8]], offset=4)),
    ],
)
def test_limits(rule, make):
    with pytest.raises(RuleError) as error:
        in_kernel(lambda: make(sbuf(128, 64)))
    assert error.value.rule == rule


@pytest.mark.parametrize("seed", range(5))
def test_views_agree_with_numpy(seed):
    """Random chains of views of an HBM tensor read what the same NumPy views hold."""
    rng = np.random.default_rng(seed)
    array = np.arange(4 * 6 * 8, dtype=np.float32).reshape(4, 6, 8)

    def kernel(tensor):
        from .access import read

        view, expected = tensor, array
        for _ in range(4):
            choice = rng.integers(3)
            if choice == 0:
                order = [int(one) for one in rng.permutation(view.ndim)]
                view, expected = view.permute(order), expected.transpose(order)
            elif choice == 1:
                dim, step = int(rng.integers(view.ndim)), int(rng.integers(1, 3))
                view = view.slice(dim, 0, view.shape[dim], step)
                expected = expected[(slice(None),) * dim + (slice(None, None, step),)]
            else:
                dim = int(rng.integers(view.ndim + 1))
                view, expected = view.expand_dim(dim).broadcast(dim, 2), np.repeat(np.expand_dims(expected, dim), 2, dim)
            np.testing.assert_array_equal(read(view, "view"), expected)

    run(kernel, array)
