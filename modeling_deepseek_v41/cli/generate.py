# SPDX-License-Identifier: Apache-2.0
"""``deepseek-v41 generate``: continue prompts."""

import argparse
import dataclasses
import secrets
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from rich.table import Table

from ..dspark.options import Speculation
from ..engine import Engine
from ..errors import RequestError
from ..parallel import Parallel
from ..request import Completion, Request, TokenLogprobs, check_request
from ..sampling import SamplingOptions
from ..text import TextTokenizer
from .loaded import Loaded, Opened, add_model_arguments, load, open_checkpoint
from .output import console, number, print_json, printable, quoted, rate, rate_words, speculation_lines, texts
from .ranks import on_ranks

DEFAULT_NEW_TOKENS = 128

EPILOG = """\
A prompt is continued as it is, after the checkpoint's beginning-of-sequence token. Names of special tokens in a prompt stay
text. Text goes to stdout, as it is made where one prompt runs on a terminal; what was done goes to stderr.

examples:
  deepseek-v41 generate --model-path CKPT --prompt "Once upon a time" --max-new-tokens 50
  deepseek-v41 generate --model-path CKPT --prompt A --prompt B --temperature 0.8 --top-p 0.95 --seed 1
  deepseek-v41 generate --model-path CKPT --prompt "Once upon a time" --speculate
  deepseek-v41 generate --model-path CKPT --prompt-file story.txt --stop "THE END" --json
  deepseek-v41 generate --model-path CKPT --prompt "Once upon a time" --world-size 2
  torchrun --nproc-per-node 2 -m modeling_deepseek_v41 generate --model-path CKPT --prompt "Once upon a time"
  echo -n "Once" | deepseek-v41 generate --model-path CKPT --prompt-file - --logprobs 3
"""


def add_parser(subparsers: Any) -> None:
    """Adds ``generate``."""
    parser = subparsers.add_parser(
        "generate",
        help="continue one or more prompts",
        description="Continues prompts with the text model, several at a time.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    add_model_arguments(parser)
    group = parser.add_argument_group("prompts")
    group.add_argument("--prompt", action="append", metavar="TEXT", help="a text to continue; may be repeated")
    group.add_argument(
        "--prompt-file", action="append", metavar="FILE", help="a file with one prompt, read exactly; - is stdin"
    )
    group = parser.add_argument_group("generation")
    group.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help=f"the most new tokens per prompt (default: {DEFAULT_NEW_TOKENS}, or what max_seq_len leaves)",
    )
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: 0)")
    group.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="sample from the K most probable; 0 is off (default: 0)"
    )
    group.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="sample from the fewest with share P; 1 is off (default: 1)"
    )
    group.add_argument("--seed", type=int, metavar="N", help="of every prompt's own random numbers (default: a new one)")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated")
    group.add_argument("--max-batch", type=int, default=4, metavar="N", help="prompts that run at a time (default: 4)")
    group = parser.add_argument_group("speculation")
    group.add_argument(
        "--speculate",
        type=int,
        nargs="?",
        const=True,
        metavar="K",
        help="let the checkpoint's drafter propose K tokens per step, 1 to dspark_block_size (without K: all of it); greedy"
        " text stays the same, sampled text keeps its distribution",
    )
    group.add_argument(
        "--sample-drafts", action="store_true", help="draw drafts at the prompt's temperature instead of taking the best"
    )
    group = parser.add_argument_group("output")
    group.add_argument(
        "--logprobs",
        type=int,
        metavar="N",
        help="also the log-probability of every new token and of the N most probable ones, before temperature, top-k and top-p",
    )
    group.add_argument(
        "--json", action="store_true", help="a list of objects: prompt, token_ids, text, finish_reason, timings, …"
    )


class Job(NamedTuple):
    """What all ranks do: the same requests, seeds included."""

    args: argparse.Namespace
    opened: Opened
    prompts: list[str]
    requests: list[Request]
    speculation: Speculation | None


def run(args: argparse.Namespace) -> int:
    """Generates and prints; raises the package's errors for what cannot be used."""
    return on_ranks(args, _prepare, _generate)


def _prepare(args: argparse.Namespace) -> Job:
    prompts = texts(args.prompt, args.prompt_file, "prompt")
    options = SamplingOptions(args.temperature, args.top_k, args.top_p, args.seed)
    if options.is_greedy and (args.top_k or args.top_p < 1 or args.seed is not None):
        print("warning: --top-k, --top-p and --seed have no effect at --temperature 0 (greedy)", file=sys.stderr)
    if args.max_batch < 1:
        raise RequestError(f"max_batch: expected an integer of 1 or more, found {args.max_batch}")
    if args.sample_drafts and (args.speculate is None or options.is_greedy):
        needed = "--speculate" if args.speculate is None else "a --temperature above 0"
        print(f"warning: --sample-drafts has no effect without {needed}", file=sys.stderr)
    opened = open_checkpoint(args, drafter=args.speculate is not None)
    speculation = None
    if args.speculate is not None:
        speculation = Speculation(None if args.speculate is True else args.speculate, args.sample_drafts)
        speculation.block(opened.config)
    requests = []
    for place, prompt in enumerate(prompts, 1):
        try:
            requests.append(_request(args, options, prompt, opened))
        except RequestError as error:
            raise RequestError(f"prompt {place} of {len(prompts)}: {error}") from None
    return Job(args, opened, prompts, requests, speculation)


def _generate(job: Job, parallel: Parallel) -> int:
    args, opened, prompts, requests, speculation = job
    loaded = load(args, opened, parallel)
    tokenizer = opened.tokenizer
    slots = min(args.max_batch, len(prompts))
    engine = Engine(loaded.model, tokenizer, max_batch=slots, progress=True, speculation=speculation)
    streams = len(requests) == 1 and not args.json and sys.stdout.isatty()
    completions = []
    for completion in _completions(engine, requests, streams):
        completions.append(completion)
        if not args.json:
            place = len(completions)
            if len(prompts) > 1:
                ending = f"{len(completion.token_ids)} tokens, {completion.finish_reason}"
                print(f"=== prompt {place} of {len(prompts)}: {quoted(prompts[place - 1], 60)} ({ending})")
            print("" if streams else _shown(completion.text or ""))
            if completion.logprobs is not None:
                console().print(_table(completion.logprobs, tokenizer))
    if args.json:
        print_json([_as_json(*pair, tokenizer) for pair in zip(prompts, completions, strict=True)])
    sys.stdout.flush()
    _summarise(engine, loaded, completions)
    return 0


def _request(args: argparse.Namespace, options: SamplingOptions, prompt: str, opened: Opened) -> Request:
    """The request for ``prompt``, with a seed where it needs one; raises RequestError where the checkpoint cannot serve it."""
    ids = opened.tokenizer.encode(prompt)
    room = max(1, opened.max_seq_len - len(ids))
    new = min(DEFAULT_NEW_TOKENS, room) if args.max_new_tokens is None else args.max_new_tokens
    if not options.is_greedy and options.seed is None:
        options = dataclasses.replace(options, seed=secrets.randbits(63))
    request = Request(ids, new, options, stop_strings=args.stop, logprobs=args.logprobs)
    check_request(request, opened.config, opened.max_seq_len, has_tokenizer=True)
    return request


def _completions(engine: Engine, requests: Sequence[Request], streams: bool) -> Iterator[Completion]:
    """Runs all requests together and yields each, in their order, as soon as it and those before it are finished."""
    ids = [engine.add(request) for request in requests]
    ended: set[int] = set()
    for request_id in ids:
        while request_id not in ended:
            for event in engine.step():
                if event.finish_reason:
                    ended.add(event.request_id)
                if streams:
                    print(_shown(event.text), end="", flush=True)
        yield engine.take(request_id)


def _shown(text: str) -> str:
    return printable(text) if sys.stdout.isatty() else text


def _as_json(prompt: str, completion: Completion, tokenizer: TextTokenizer) -> dict[str, Any]:
    timings, new = completion.timings, len(completion.token_ids)
    result: dict[str, Any] = {
        "prompt": prompt,
        "prompt_tokens": len(completion.prompt),
        "token_ids": list(completion.token_ids),
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "timings": {
            "queue_seconds": timings.queue,
            "prefill_seconds": timings.prefill,
            "decode_seconds": timings.decode,
            "prefill_tokens_per_second": rate(len(completion.prompt), timings.prefill),
            "decode_tokens_per_second": rate(new - 1, timings.decode),
        },
    }
    if completion.speculation is not None:
        result["speculation"] = completion.speculation.as_dict()
    if completion.logprobs is not None:
        result["logprobs"] = [
            _token(entry.token_id, entry.logprob, tokenizer)
            | {"alternatives": [_token(token, logprob, tokenizer) for token, logprob in entry.alternatives]}
            for entry in completion.logprobs
        ]
    return result


def _token(token: int, logprob: float, tokenizer: TextTokenizer) -> dict[str, Any]:
    return {"token_id": token, "token": tokenizer.decode([token]), "logprob": number(logprob)}


def _table(logprobs: Sequence[TokenLogprobs], tokenizer: TextTokenizer) -> Table:
    table = Table("id", "token", "log-probability", "most probable")
    for entry in logprobs:
        others = ", ".join(f"{quoted(tokenizer.decode([token]))} {logprob:.3f}" for token, logprob in entry.alternatives)
        table.add_row(str(entry.token_id), quoted(tokenizer.decode([entry.token_id])), f"{entry.logprob:.3f}", others)
    return table


def _summarise(engine: Engine, loaded: Loaded, completions: Sequence[Completion]) -> None:
    stats = engine.stats
    endings = ", ".join(completion.finish_reason for completion in completions)
    for name, words in (
        ("model", loaded.model_line),
        ("weights", loaded.weights_line),
        ("prefill", rate_words(stats.prefill_tokens, stats.prefill_seconds)),
        ("decode", f"{rate_words(stats.decode_tokens, stats.decode_seconds)} ({stats.decode_steps} steps)"),
        *(speculation_lines(stats.speculation) if stats.speculation is not None else ()),
        ("ended by", endings),
    ):
        print(f"{name:11}{words}", file=sys.stderr)
