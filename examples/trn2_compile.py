# SPDX-License-Identifier: Apache-2.0
"""Compiles the model for a trn2.48xlarge (64 logical cores) and writes every rank's weights. Not verified on a device.

python examples/trn2_compile.py --model-path CKPT --compiled-path OUT
"""

import argparse
from typing import TYPE_CHECKING

from modeling_deepseek_v41.nxdi import MissingNxDI

if TYPE_CHECKING:
    from modeling_deepseek_v41.nxdi import NeuronDeepseekV41ForCausalLM


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that all of these examples share."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model-path", required=True, help="the checkpoint in the release's format")
    options.add_argument("--compiled-path", required=True, help="the folder of the graphs and the sharded weights")
    options.add_argument("--tp-degree", type=int, default=64)
    options.add_argument("--batch-size", type=int, default=4)
    options.add_argument("--seq-len", type=int, default=8192)
    options.add_argument("--context", type=int, default=2048, help="the largest context bucket; longer prompts run in chunks")
    options.add_argument("--no-speculation", action="store_true", help="one token per step, without DSpark")
    options.add_argument("--on-cpu", action="store_true", help="in float32 on the CPU, under torchrun for more than one rank")
    return options


def application(args: argparse.Namespace) -> "NeuronDeepseekV41ForCausalLM":
    """The application as ``args`` describe it, neither compiled nor loaded. Ends the process where NxDI is not installed."""
    try:
        from modeling_deepseek_v41.nxdi import DeepseekV41InferenceConfig, DeepseekV41NeuronConfig, NeuronDeepseekV41ForCausalLM
    except MissingNxDI as missing:
        raise SystemExit(str(missing)) from None
    from neuronx_distributed_inference.models.config import OnDeviceSamplingConfig
    from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config

    speculation = {} if args.no_speculation else {"enable_fused_speculation": True, "speculation_length": 6}
    run = DeepseekV41NeuronConfig(
        tp_degree=args.tp_degree,
        torch_dtype="float32" if args.on_cpu else "bfloat16",
        batch_size=args.batch_size,
        ctx_batch_size=1,
        is_continuous_batching=True,
        seq_len=args.seq_len,
        max_context_length=args.context,
        enable_bucketing=True,
        on_device_sampling_config=OnDeviceSamplingConfig(),
        save_sharded_checkpoint=True,
        **speculation,
    )
    config = DeepseekV41InferenceConfig(run, load_config=load_pretrained_config(args.model_path))
    return NeuronDeepseekV41ForCausalLM(args.model_path, config)


def loaded(args: argparse.Namespace) -> "NeuronDeepseekV41ForCausalLM":
    """The application ready to generate."""
    model = application(args)
    if args.on_cpu:
        model.to_cpu()
    else:
        model.load(args.compiled_path)
    return model


if __name__ == "__main__":
    arguments = parser(__doc__).parse_args()
    application(arguments).compile(arguments.compiled_path)
