# SPDX-License-Identifier: Apache-2.0
"""Generates for a batch of prompts on a compiled model. Not verified on a device.

python examples/trn2_generate.py --model-path CKPT --compiled-path OUT --prompt "Once upon a time" --prompt "The ferry"
"""

from transformers import AutoTokenizer
from trn2_compile import loaded, parser

from modeling_deepseek_v41.nxdi.loop import generate_batch

options = parser(__doc__)
options.add_argument("--prompt", action="append", required=True)
options.add_argument("--max-new-tokens", type=int, default=100)
args = options.parse_args()
model, tokenizer = loaded(args), AutoTokenizer.from_pretrained(args.model_path)
ids = [tokenizer(prompt).input_ids for prompt in args.prompt]
for prompt, new in zip(args.prompt, generate_batch(model, ids, args.max_new_tokens, [tokenizer.eos_token_id]), strict=True):
    print(f"{prompt}{tokenizer.decode(new)}\n")
