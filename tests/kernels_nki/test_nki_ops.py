# SPDX-License-Identifier: Apache-2.0
"""The operations that run kernels, in the emulator, against the PyTorch ones; and a model whose kernels run in it."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import emulated
import pytest
import torch
from comparing import DTYPES, arithmetic, normal
from nki_emulator import real_nki
from torch import Tensor

from modeling_deepseek_v41.errors import CheckpointError, RequestError
from modeling_deepseek_v41.experts import ExpertBank, local_experts
from modeling_deepseek_v41.kernels import nki_ops
from modeling_deepseek_v41.kernels.dispatch import TORCH, operations, register
from modeling_deepseek_v41.kernels.nki import sparse_attention, split
from modeling_deepseek_v41.loading import load_model
from modeling_deepseek_v41.numerics import Arithmetic
from modeling_deepseek_v41.state import State, allocate, make_call
from modeling_deepseek_v41.verify import MODES, GoldenSet
from modeling_deepseek_v41.verify.check import check_layer_files
from modeling_deepseek_v41.verify.compare import relative_error
from modeling_deepseek_v41.verify.run import teacher_forced

TINY = Path(__file__).resolve().parents[1] / "data" / "golden" / "tiny_a"


def pair(dtype: torch.dtype) -> tuple[Arithmetic, Arithmetic]:
    """The PyTorch operations and the emulated ones."""
    plain = arithmetic(dtype)
    return plain, dataclasses.replace(plain, ops=operations(emulated.NAME))


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Within 1e-5 of the largest magnitude, or a bf16 step."""
    assert found.shape == expected.shape
    scale = expected.abs().max()
    step = 1e-5 * scale
    if dtype != torch.float32:
        step = torch.ldexp(torch.ones_like(expected), expected.frexp().exponent - 8) + 2.0**-11 * scale
    assert ((found.float() - expected).abs() <= step).all()


def table(batch: int, tokens: int, width: int) -> Tensor:
    """Rotary rows of random angles."""
    angle = normal(batch, tokens, width // 2)
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([torch.stack([cos, cos], -1).flatten(2), torch.stack([-sin, sin], -1).flatten(2)], 2)


@DTYPES
@pytest.mark.parametrize(
    ("tokens", "start", "length"), [(1, [40, 0], [1, 1]), (6, [40, 3], [6, 2]), (200, [10, 0], [200, 150])]
)
def test_attend(tokens, start, length, dtype):
    """Decode, verification with padding, and a prefill of more than one kernel call, with and without selected rows."""
    plain, kernels = pair(dtype)
    window, heads, dim, groups, k = 16, 2, 64, 300, 130
    call = make_call(torch.tensor(start), torch.tensor(length), torch.tensor([1, 0]), tokens, 1024)
    state = State(["ring"], (normal(2, 30, dim).to(dtype),), call)
    q, kv = normal(2, tokens, heads, dim, seed=1).to(dtype).float(), normal(2, tokens, dim, seed=2).to(dtype)
    cache, rows = normal(2, groups, dim, seed=3).to(dtype), table(2, tokens, 32)
    chosen = torch.arange(k).expand(2, tokens, k) * 2
    chosen = chosen.masked_fill(chosen >= 4 + call.positions.unsqueeze(-1), -1)
    for far in (None, (cache, chosen)):
        arguments = (q, kv, "ring", far, rows, normal(heads, seed=4), window, state)
        close(kernels.ops.attend(*arguments, kernels), plain.ops.attend(*arguments, plain), dtype)


@DTYPES
def test_attend_block(dtype):
    plain, kernels = pair(dtype)
    window, heads, dim, tokens = 16, 2, 64, 5
    call = make_call(torch.tensor([40, 3]), torch.tensor([5, 5]), torch.tensor([1, 0]), tokens, 1024)
    state = State(["ring"], (normal(2, 30, dim).to(dtype),), call)
    q, kv = normal(2, tokens, heads, dim, seed=1).to(dtype).float(), normal(2, tokens, dim, seed=2).to(dtype)
    arguments = (q, kv, "ring", table(2, tokens, 32), normal(heads, seed=4), window, state)
    close(kernels.ops.attend_block(*arguments, kernels), plain.ops.attend_block(*arguments, plain), dtype)


@DTYPES
def test_index_scores_and_top_ascending(dtype):
    plain, kernels = pair(dtype)
    query, weights, keys = normal(3, 4, 32).to(dtype), normal(3, 4, seed=1).to(dtype), normal(2, 32, 600, seed=2).to(dtype)
    arguments = (query, weights, keys, torch.tensor([1]), 577)
    scores = plain.ops.index_scores(*arguments, plain)
    close(kernels.ops.index_scores(*arguments, kernels), scores, dtype)
    visible = torch.arange(577) < torch.tensor([[577], [40], [0]])
    for k in (5, 100, 512, 700):
        expected = plain.ops.top_ascending(scores, visible, k)
        assert torch.equal(kernels.ops.top_ascending(scores, visible, k), expected)
        assert torch.equal(kernels.ops.top_ascending(scores.to(dtype), visible, k), expected)


@DTYPES
def test_mixes(dtype):
    plain, kernels = pair(dtype)
    x, raw = normal(2, 70, 4, 48).to(dtype).float(), normal(2, 70, 24, seed=1)
    arguments = (raw, x, normal(24, seed=2), normal(24, seed=3), 19, 1e-6, 1e-20)
    for found, expected in zip(kernels.ops.mixes(*arguments, kernels), plain.ops.mixes(*arguments, plain), strict=True):
        close(found, expected, torch.float32)


@DTYPES
def test_quantise(dtype):
    """To the bit; in fp32 numerics, whose values bf16 does not hold, PyTorch's."""
    plain, kernels = pair(dtype)
    x = normal(2, 7, 96).to(dtype).float()
    emulated.launched.clear()
    assert torch.equal(kernels.ops.quantise(x, kernels), plain.ops.quantise(x, plain))
    assert bool(emulated.launched) == (dtype == torch.bfloat16)


class Fp4Experts:
    """A source of random experts: fp4 bytes and scales of a few binades."""

    def __init__(self, d: int, inter: int, binades: int = 3):
        self.sizes = {"w1": (inter, d), "w3": (inter, d), "w2": (d, inter)}
        self.draw, self.binades, self.tensors = torch.Generator().manual_seed(0), binades, {}

    def tensor(self, name: str) -> Tensor:
        if name not in self.tensors:
            n, k = self.sizes[name.split(".")[-2]]
            low, high, width = (0, 256, k // 2) if name.endswith("weight") else (120, 120 + self.binades, k // 32)
            self.tensors[name] = torch.randint(low, high, (n, width), generator=self.draw, dtype=torch.uint8)
        return self.tensors[name]


def bank(source: Fp4Experts, count: int, arithmetic: Arithmetic, storage: str, whole: bool) -> ExpertBank:
    d, inter = source.sizes["w2"]
    made = ExpertBank(count, d, inter, arithmetic, storage, whole)
    made.load(source, "experts")
    return made


@pytest.mark.parametrize("whole", [True, False], ids=["whole on one core", "shares on two"])
@pytest.mark.parametrize("tokens", [1, 6, 130], ids=["decode", "verification", "prefill"])
def test_experts(tokens, whole):
    """Chosen ones, another rank's (number 5) and the shared one, as the decoded weights give them.

    x has few bits, so that products are exact in any order.
    """
    plain, kernels = pair(torch.bfloat16)
    source = Fp4Experts(128, 96)
    x = torch.randint(-8, 9, (2, tokens, 128), generator=source.draw) * 2.0**-4
    ids = torch.rand(2, tokens, 6, generator=source.draw).argsort(-1)[..., :3]
    routing = torch.rand(2, tokens, 3, generator=source.draw)
    shared = bank(source, 1, plain, "decoded", True)
    expected = local_experts(x, ids.clamp_max(5), routing, bank(source, 5, plain, "decoded", whole), shared, 2.0)
    emulated.launched.clear()
    found = local_experts(x, ids.clamp_max(5), routing, bank(source, 5, kernels, "fp8_exact", whole), shared, 2.0)
    assert emulated.launched["active_experts"] == -(-2 * tokens // 128)
    close(found, expected, torch.float32)
    close(local_experts(x, ids, routing, bank(source, 5, kernels, "bytes", whole), shared, 2.0), expected, torch.float32)


def test_experts_that_cannot_be_fp8_exact_are_refused():
    plain, kernels = pair(torch.bfloat16)
    _, wide = pair(torch.float32)
    for numerics, d, text in (
        (plain, 128, "read by the NKI kernels in release numerics only, found kernels 'torch', torch.bfloat16"),
        (wide, 128, "found kernels 'emulator', torch.float32"),
        (kernels, 96, "fp8_exact needs a hidden_size that 64 divides, found 96"),
    ):
        with pytest.raises(RequestError, match=text):
            bank(Fp4Experts(d, 96), 1, numerics, "fp8_exact", False)
    with pytest.raises(CheckpointError, match=r"experts.0: expert w1: \d+ of 96 rows .*expert_storage='decoded'"):
        bank(Fp4Experts(128, 96, binades=15), 1, kernels, "fp8_exact", True)


def test_constants():
    """Those that the operations repeat, for they need no nki."""
    assert (nki_ops.PARTITIONS, nki_ops.BANK) == (split.PARTITIONS, split.BANK)
    assert nki_ops.HIDDEN == sparse_attention.HIDDEN


def test_names():
    """A registered implementation is found by name, and its name is taken."""
    assert operations(emulated.NAME) is emulated.operations and emulated.operations.linear is TORCH.linear
    with pytest.raises(RequestError, match="'emulator' is taken"):
        emulated.register(emulated.operations)
    with pytest.raises(RequestError, match="nki, emulator, found 'emulated'"):
        operations("emulated")


@pytest.mark.skipif(real_nki(), reason="nki is installed")
def test_nki_without_nki_is_an_error():
    """In a process without the emulator: no fallback."""
    words = "from modeling_deepseek_v41.kernels.dispatch import operations; operations('nki')"
    result = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, timeout=300)
    assert result.returncode == 1 and "RequestError: kernels: nki is not installed" in result.stderr


@pytest.mark.slow
@torch.inference_mode()
def test_tiny_model():
    """A prefill of 142 tokens and 8 decode steps of the golden checkpoint give the logits of the PyTorch path, in fp32.

    The experts and the activation QDQ, whose kernels work on bf16, are PyTorch's here; the next test has them.
    142 tokens are more than one kernel call, and more groups than a query selects.
    """
    models = [load_model(TINY / "ckpt", "fp32", kernels=name, progress=False) for name in ("torch", emulated.NAME)]
    ids = torch.randint(models[0].config.vocab_size, (1, 150), generator=torch.Generator().manual_seed(0))
    states = [allocate(model.state_spec(1)) for model in models]
    emulated.launched.clear()
    for first, last in [(0, 142), *((at, at + 1) for at in range(142, 150))]:
        rows = (torch.tensor([first]), torch.tensor([last - first]), torch.tensor([0]), torch.zeros(1, dtype=torch.int64))
        logits = []
        for model, state in zip(models, states, strict=True):
            hidden, *_ = model(ids[:, first:last], *rows, *state, read_len=model.max_seq_len)
            logits.append(model.logits(hidden))
        error = (logits[1] - logits[0]).abs().amax(-1) / logits[0].abs().amax(-1)
        assert error.max() <= 1e-5, f"positions {first} to {last}: {error.max():.3g}"
    assert set(emulated.launched) == {"sparse_attention", "index_scores", "top_k", "mixes"}


@pytest.mark.slow
def test_tiny_model_in_release_numerics():
    """A prefill of 17 tokens and 8 decode steps, teacher-forced.

    With kernels for the experts and the activation QDQ alone, the logits are those of the PyTorch path. With every kernel,
    whose exp in the mixes and the attention may differ in the last bit, the greedy ids are the golden's, wherever the
    golden's margin is above the reference's own noise.
    """
    every = operations(emulated.NAME)
    fields = "expert_rows", "expert_by_expert", "packed_experts", "quantise"
    some = dataclasses.replace(TORCH, name="emulated experts", **{field: getattr(every, field) for field in fields})
    register(some)
    logits = []
    for name, storage in (("torch", "decoded"), (some.name, "fp8_exact"), (emulated.NAME, "fp8_exact")):
        model = load_model(TINY / "ckpt", "release", expert_storage=storage, kernels=name, progress=False)
        prompt = next(one for one in GoldenSet(TINY).prompts("ref", model.config) if one.length == 17)
        emulated.launched.clear()
        logits.append(teacher_forced(model, prompt, rows=9).logits)
    assert len(emulated.launched) == 6 and emulated.launched["active_experts"] == 9 * model.config.num_hidden_layers
    assert relative_error(logits[1], logits[0]).max() <= 1e-5
    clear = (prompt.margin > prompt.noise * prompt.logits.abs().amax(-1))[:, :9]
    assert clear.sum() > 5 and torch.equal(logits[2].argmax(-1)[clear], prompt.generated[:, :9][clear])


@pytest.mark.slow
@torch.inference_mode()
def test_activations_of_release_numerics_are_bf16():
    """What linear.quantise promises its implementations, over a prompt and the drafter's stages."""
    inexact = []

    def watch(x: Tensor, arithmetic: Arithmetic) -> Tensor:
        inexact.append(bool((x != x.bfloat16().float()).any()))
        return TORCH.quantise(x, arithmetic)

    register(dataclasses.replace(TORCH, name="watched", quantise=watch))
    model = load_model(TINY / "ckpt", "release", kernels="watched", progress=False, drafter=True)
    check_layer_files(model, GoldenSet(TINY), "ref")
    assert len(inexact) > 100 and not any(inexact)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "storage"), [("f32", "decoded"), ("ref", "fp8_exact")])
def test_every_layer_on_golden_inputs(mode, storage):
    """The release's reference layer by layer from its own inputs, the drafter's stages too: the limits of ``verify``.

    ref: at least 99.9 % of the elements of each kind of tensor are bit-equal, 98 % of the drafter's, whose 15 rows are few:
    one rounding that falls the other way changes a row. f32: within 1e-5.
    """
    emulated.launched.clear()
    model = load_model(TINY / "ckpt", MODES[mode], expert_storage=storage, kernels=emulated.NAME, progress=False, drafter=True)
    (layers,) = check_layer_files(model, GoldenSet(TINY), mode)
    assert len(layers.kinds) > 20
    assert ({"active_experts", "activation_qdq"} <= set(emulated.launched)) == (mode == "ref")
    for kind in layers.kinds:
        few = mode == "ref" and kind.kind.startswith("drafter")
        assert kind.ok or (few and kind.equal >= 0.98 * kind.elements), kind
