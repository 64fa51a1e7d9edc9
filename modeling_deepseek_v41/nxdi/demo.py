# SPDX-License-Identifier: Apache-2.0
"""NxDI's inference_demo for this model: its parser and its run, with this model's options and checks around them.

The classes stay out of the module that runs as a script (modeling_deepseek_v41/inference_demo.py): NxDI writes a class's module
into the compiled folder, and imports it from there.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from neuronx_distributed_inference import inference_demo
from neuronx_distributed_inference.utils.exceptions import LogitMatchingValidationError
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..errors import DeepseekV41Error, RequestError
from ..expert_bank import EXPERT_WEIGHT_FORMATS
from ..layout import O_PROJ_REDUCE
from .application import NeuronDeepseekV41ForCausalLM
from .config import KERNELS
from .refusals import refusal, refused
from .registry import register

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def build_parser() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """The command line: (the whole of it, its ``run`` command), all of NxDI's options among them."""
    parser = argparse.ArgumentParser(prog="deepseek-v41-inference-demo", description=__doc__.splitlines()[0])
    parser.add_argument("--model-type", choices=["deepseek_v41"], default="deepseek_v41")
    parser.add_argument("--task-type", choices=["causal-lm"], default="causal-lm")
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="compile, load, check, generate and measure")
    inference_demo.setup_run_parser(run)
    own = run.add_argument_group("DeepSeek-V4.1", "which rank holds what, by default in as many parts as possible, and how")
    own.add_argument("--attn-tp-degree", type=int, help="ranks of one attention group; attention is repeated in every group")
    own.add_argument("--dspark-moe-ep-degree", type=int, help="parts of the drafter's experts by id")
    own.add_argument("--o-proj-reduce", choices=O_PROJ_REDUCE, default="group", help="which ranks share wo_b")
    formats, most = EXPERT_WEIGHT_FORMATS, "with fp8_exact: room for rows of a matrix that fp8 cannot hold (default: 1 in 256)"
    own.add_argument("--expert-weight-format", choices=formats, default="fp8_exact", help="how routed experts are kept")
    own.add_argument("--expert-exception-rows", type=int, metavar="N", help=most)
    own.add_argument("--kernels", choices=KERNELS, default="torch", help="nki: this package's own, not verified on a device")
    return parser, run


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``argv`` (the process's by default); 0 done, 1 a check or an assertion of NxDI failed, 2 unusable input."""
    register()
    parser, run = build_parser()
    args = parser.parse_args(argv)
    try:
        check_arguments(args, run)
        built = _Built(NeuronDeepseekV41ForCausalLM)
        with torch.serialization.safe_globals([GenerateDecoderOnlyOutput]):  # what --expected-outputs-path holds
            inference_demo.run_inference(built, args)
    except DeepseekV41Error as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (AssertionError, LogitMatchingValidationError) as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    if args.benchmark and built.application is not None:
        _extend_report(Path(args.benchmark_report_path), built.application)
    return 0


class _Built:
    """The class as NxDI's run uses it, and the application that the run made of it, so that its counts can be read."""

    def __init__(self, cls: type[NeuronDeepseekV41ForCausalLM]):
        self._cls = cls
        self.application: NeuronDeepseekV41ForCausalLM | None = None

    def __call__(self, *args: Any) -> NeuronDeepseekV41ForCausalLM:
        self.application = self._cls(*args)
        return self.application

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cls, name)


def check_arguments(args: argparse.Namespace, run: argparse.ArgumentParser) -> None:
    """Raises RequestError for everything that can be known to be wrong before anything is loaded, all of it at once."""
    lines = refused(args, run.get_default) + missing_files(Path(args.model_path))
    if args.check_accuracy_mode == inference_demo.CheckAccuracyMode.DRAFT_LOGIT_MATCHING:
        lines.append("check_accuracy_mode: draft-logit-matching compares recorded EAGLE drafts; DSpark's are compared in tests")
    if lines:
        raise RequestError(refusal(lines))


def missing_files(folder: Path) -> list[str]:
    """What NxDI reads besides the weights and ``folder`` lacks, one line for each file with how to get it."""
    lines = [
        f"{folder / name}: not found, and NxDI reads it; copy it from the release's checkpoint"
        for name in ("config.json", *TOKENIZER_FILES)
        if not (folder / name).is_file()
    ]
    if not (folder / "generation_config.json").is_file():
        lines.append(
            f'{folder / "generation_config.json"}: not found, and NxDI reads it; write one: python -c "from transformers'
            f" import AutoConfig, GenerationConfig; import modeling_deepseek_v41;"
            f" GenerationConfig.from_model_config(AutoConfig.from_pretrained('{folder}')).save_pretrained('{folder}')\""
        )
    return lines


def _extend_report(path: Path, application: NeuronDeepseekV41ForCausalLM) -> None:
    """Adds ``graph_calls`` to NxDI's report: for every stage what ``Counts`` counts, over the whole run."""
    report = json.loads(path.read_text(encoding="utf-8"))
    report["graph_calls"] = {wrapper.tag: wrapper.counts.as_dict() for wrapper in application.models}
    path.write_text(json.dumps(report, indent=4) + "\n", encoding="utf-8")
    print(f"Graph calls, added to {path}:\n{json.dumps(report['graph_calls'], indent=4)}")
