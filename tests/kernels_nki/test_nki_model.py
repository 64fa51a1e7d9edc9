# SPDX-License-Identifier: Apache-2.0
"""The tiny golden model, drafter included, whose kernels all run in the emulator."""

import dataclasses
from pathlib import Path
from typing import Any

import emulated
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from modeling_deepseek_v41.expert_bank import ExpertBank
from modeling_deepseek_v41.kernels.dispatch import TORCH, operations, register
from modeling_deepseek_v41.loading import load_model
from modeling_deepseek_v41.model import DeepseekV41Model
from modeling_deepseek_v41.numerics import Arithmetic
from modeling_deepseek_v41.state import allocate
from modeling_deepseek_v41.verify import MODES, GoldenSet
from modeling_deepseek_v41.verify.check import check_layer_files
from modeling_deepseek_v41.verify.compare import relative_error
from modeling_deepseek_v41.verify.run import learn, propose, teacher_forced

TINY = Path(__file__).resolve().parents[1] / "data" / "golden" / "tiny_a"
KERNELS = {
    "candidate_blocks", "collapse", "collapse_streams", "compress_pool", "engram_gate", "expand", "index_scores", "linear",
    "rms_norm", "rotate", "route", "sparse_attention", "sublayer_input", "swiglu", "top_k",
}  # fmt: skip
"""What a prefill, decode steps and drafts launch, whatever the numerics."""
OF_BF16 = {"activation_qdq", "active_experts", "grouped_linear", "linears"}
"""What release numerics launch beside them: kernels of bf16 values."""
OF_FP32 = {"compressed_qdq", "group_qdq"}
"""What fp32 numerics launch beside them: the QDQ of caches, which ``rotate`` does in passing where values are bf16."""


class Products(TorchDispatchMode):
    """Notes calls of PyTorch's own that have a kernel: matrix products, softmax, norms' roots, sorts."""

    NAMES = ("mm", "addmm", "bmm", "baddbmm", "addbmm", "linear", "matmul", "_softmax", "rsqrt", "topk", "sort")

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten" and func.overloadpacket.__name__ in self.NAMES:
            self.called.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def tiny(numerics: str, kernels: str, storage: str = "bf16") -> DeepseekV41Model:
    return load_model(TINY / "ckpt", numerics, expert_weight_format=storage, kernels=kernels, progress=False, drafter=True)


def test_every_operation_has_a_kernel():
    ours, plain = operations(emulated.NAME), dataclasses.asdict(TORCH)
    assert not [name for name, function in plain.items() if getattr(ours, name) is function]


@pytest.mark.slow
@pytest.mark.parametrize(("numerics", "prompt"), [("fp32", 40), ("fp32_no_qdq", 142)])
@torch.inference_mode()
def test_tiny_model(numerics, prompt):
    """A prefill, 8 decode steps and a block of drafts behind each give what the PyTorch path gives, within 1e-5.

    142 tokens are more than one kernel call, and more groups than a query selects. With the QDQ of caches a prompt that long
    has values so near halfway between two of fp4 that the last bit of a sum in fp32 decides: there 40.
    """
    ids = torch.randint(512, (1, prompt + 9), generator=torch.Generator().manual_seed(0))
    runs = []
    for name in ("torch", emulated.NAME):
        model, start, found = tiny(numerics, name), torch.zeros(1, dtype=torch.int64), []
        state = allocate(model.state_spec(1))
        emulated.launched.clear()
        with Products() as products:
            for first, last in [(0, prompt), *((at, at + 1) for at in range(prompt, prompt + 8))]:
                rows = start + first, start + last - first, start, start
                hidden, taps, *_ = model(ids[:, first:last], *rows, *state, read_len=model.max_seq_len)
                learn(model, model.drafter, taps, start + first, start, state)
                drafts = propose(model, model.drafter, ids[:, last], start + last, start, state)
                found.append((model.logits(hidden), drafts.logits, drafts.confidence))
        runs.append(found)
        assert bool(products.called) == (name == "torch"), set(products.called)
    assert set(emulated.launched) == KERNELS | (OF_FP32 if numerics == "fp32" else set())
    for step, (expected, found) in enumerate(zip(*runs, strict=True)):
        for one, other in zip(found, expected, strict=True):
            error = (one - other).abs().amax(-1) / other.abs().amax(-1)
            assert error.max() <= 1e-5, f"step {step}: {error.max():.3g}"


@pytest.mark.slow
def test_tiny_model_in_release_numerics():
    """A prefill of 17 tokens, 8 decode steps and a block of drafts behind each, teacher-forced.

    With kernels for the experts and the activation QDQ alone, the logits are those of the PyTorch path. With every kernel,
    whose exp in the mixes and the attention may differ in the last bit, greedy ids and drafts are the golden's, wherever the
    golden's margin is above the reference's own noise.
    """
    every = operations(emulated.NAME)

    def lay_out(model: nn.Module) -> None:
        for bank in model.modules():
            if isinstance(bank, ExpertBank):
                every.lay_out(bank)

    fields = "expert_rows", "expert_by_expert", "shared_expert", "quantise"
    chosen = {field: getattr(every, field) for field in fields}
    some = dataclasses.replace(TORCH, name="emulated experts", lay_out=lay_out, **chosen)
    register(some)
    golden, logits = GoldenSet(TINY), []
    for name, storage in (("torch", "bf16"), (some.name, "fp8_exact")):
        model = tiny("release", name, storage)
        prompt = next(one for one in golden.prompts("ref", model.config) if one.length == 17)
        logits.append(teacher_forced(model, prompt, rows=9).logits)
    assert relative_error(logits[1], logits[0]).max() <= 1e-5
    model = tiny("release", emulated.NAME, "fp8_exact")
    emulated.launched.clear()
    with Products() as products:
        found = teacher_forced(model, prompt, rows=9, drafter=model.drafter)
    assert not products.called and set(emulated.launched) == KERNELS | OF_BF16
    assert emulated.launched["linears"] == 2 * 8, "the engrams' and the drafter's, in every decode step"
    assert emulated.launched["active_experts"] == 9 * (model.config.num_hidden_layers + model.config.num_nextn_predict_layers)
    clear = (prompt.margin > prompt.noise * prompt.logits.abs().amax(-1))[:, :9]
    assert clear.sum() > 5 and torch.equal(found.logits.argmax(-1)[clear], prompt.generated[:, :9][clear])
    recorded = prompt.drafts
    assert recorded is not None and recorded.agree is not None and found.drafts is not None
    clear = (recorded.recorded & (recorded.agree == 1))[:, :9]
    assert clear.sum() > 5 and torch.equal(found.drafts.ids[clear], recorded.ids[:, :9][clear])


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
@pytest.mark.parametrize(("mode", "storage"), [("f32", "bf16"), ("ref", "fp8_exact")])
def test_every_layer_on_golden_inputs(mode, storage):
    """The release's reference layer by layer from its own inputs, the drafter's stages too: the limits of ``verify``.

    ref: at least 99.9 % of the elements of each kind of tensor are bit-equal, 98 % of the drafter's, whose 15 rows are few:
    one rounding that falls the other way changes a row. f32: within 1e-5.
    """
    emulated.launched.clear()
    model = load_model(
        TINY / "ckpt", MODES[mode], expert_weight_format=storage, kernels=emulated.NAME, progress=False, drafter=True
    )
    (layers,) = check_layer_files(model, GoldenSet(TINY), mode)
    assert len(layers.kinds) > 20
    assert set(emulated.launched) == KERNELS | (OF_FP32 if mode == "f32" else OF_BF16)
    for kind in layers.kinds:
        few = mode == "ref" and kind.kind.startswith("drafter")
        assert kind.ok or (few and kind.equal >= 0.98 * kind.elements), kind
