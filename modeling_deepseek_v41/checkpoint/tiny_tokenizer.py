# SPDX-License-Identifier: Apache-2.0
"""A byte-level BPE tokenizer that fills a configuration's vocabulary exactly, trained on a small text."""

import json

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from ..config import ModelConfig
from ..errors import CheckpointError

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
IMAGE, NOISE = "<｜deepseek_image｜>", "<｜dspark▁noise｜>"
CHAT = ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>")
"""Special tokens that get the last free ids where at least ROOM_FOR_CHAT ids are left for text."""

ROOM_FOR_CHAT = 64

_WHO = "The river|A child|the old house|Our teacher|My café|The Garden|every Letter|Some people|Über-Nacht|the world|A MACHINE"
_DOES = "finds|remembers|is looking for|Will carry|answers|was built under|opened|does not know|has never seen|writes about"
_WHAT = (
    "the morning|a long story|another answer|twelve small stones|nothing at all|water and bread|an open door|the Sea|the sea|"
    "naïve résumés|numbers|their own language|你好，世界|the right question|1, 2, 3|more than 4096 words|light|the END"
)
_WHY = (
    "because it was late|when the rain stopped|and everyone smiled|before they could think|in the first year|without a sound|"
    "if you ask them|as it had always been|so that the work is done|for example|at the end of the day|where nobody lives|"
    "while the others were still sleeping"
)


def built_in_corpus(lines: int = 4000) -> str:
    """A text of ``lines`` different English sentences, made by combining phrases; the same in every run."""
    parts = [phrases.split("|") for phrases in (_WHO, _DOES, _WHAT, _WHY)]
    sentences = []
    for line in range(lines):
        who, does, what, why = (phrases[(line * 7 + line // len(phrases)) % len(phrases)] for phrases in parts)
        sentences.append(f"{who} {does} {what} {why}{'.?!,;'[line % 5]}")
    return "\n".join(sentences)


def make_tokenizer(config: ModelConfig, corpus: str | None = None) -> Tokenizer:
    """A byte-level BPE tokenizer with exactly ``config.vocab_size`` ids, trained on ``corpus`` (or the built-in text).

    The ids of bos, eos, pad, image and noise in ``config`` get special tokens; ids that training does not fill get special
    tokens like ``<｜unused_17｜>``. Every byte has a token, so every text can be encoded. Raises CheckpointError where
    vocab_size has no room for the 256 bytes and the special tokens.
    """
    special = _special_tokens(config)
    free = [token for token in range(config.vocab_size) if token not in special]
    if len(free) < 256:
        raise CheckpointError(
            f"{config.source}: vocab_size: expected {256 + len(special)} or more (256 bytes, {len(special)} special tokens of"
            f" a byte-level tokenizer), found {config.vocab_size}"
        )
    if len(free) - len(CHAT) >= 256 + ROOM_FOR_CHAT:
        special |= dict(zip(free[-len(CHAT) :], CHAT, strict=True))
        free = free[: -len(CHAT)]
    vocabulary, merges = _train(corpus if corpus is not None else built_in_corpus(), len(free))
    special |= {token: f"<｜unused_{token}｜>" for token in free[len(vocabulary) :]}
    ids = dict(zip(vocabulary, free, strict=False)) | {text: token for token, text in special.items()}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(special[token], special=True, normalized=False) for token in sorted(special)])
    return tokenizer


def _special_tokens(config: ModelConfig) -> dict[int, str]:
    wanted = [(config.bos_token_id, BOS), (config.pad_token_id, PAD)]
    wanted += [(token, EOS if place == 0 else f"<｜end_{place}｜>") for place, token in enumerate(config.eos_token_ids)]
    if config.has_vision:
        wanted.append((config.image_token_id, IMAGE))
    if config.num_nextn_predict_layers:
        wanted.append((config.dspark_noise_token_id, NOISE))
    special: dict[int, str] = {}
    for token, text in wanted:
        if token is not None and token < config.vocab_size:
            special.setdefault(token, text)
    return special


def _train(corpus: str, size: int) -> tuple[list[str], list[tuple[str, str]]]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, special_tokens=[], show_progress=False)
    tokenizer.train_from_iterator(corpus.splitlines(keepends=True), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    vocabulary = sorted(model["vocab"], key=model["vocab"].__getitem__)
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    return vocabulary, [(left, right) for left, right in pairs]
