# SPDX-License-Identifier: Apache-2.0
"""The command line, in this process: output, JSON, exit codes and messages."""

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from modeling_deepseek_v41.cli import COMMANDS, main
from modeling_deepseek_v41.cli.output import printable, quoted

CKPT = Path(__file__).resolve().parents[1] / "data/golden/tiny_a/ckpt"
GENERATE = ["generate", "--model-path", str(CKPT), "--numerics", "fp32"]
SCORE = ["score", "--model-path", str(CKPT)]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def generated(capsys: pytest.CaptureFixture, *options: str) -> list[dict]:
    assert main([*GENERATE, "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def test_generate_prints_text_and_a_summary(capsys) -> None:
    assert main([*GENERATE, "--prompt", "Every morning", "--max-new-tokens", "6"]) == 0
    out, err = capsys.readouterr()
    assert out.endswith("\n") and "===" not in out
    for part in ("8 layers of width 128", "fp32 numerics", "max_seq_len 256", f"{CKPT}: 4 files, 6.2 MiB, loaded in"):
        assert part in err
    assert "not used: drafter (238 tensors, 1.2 MiB), vision (37 tensors" in err
    assert "ended by   length" in err
    assert err.count("tokens/s") == 2
    shown = generated(capsys, "--prompt", "Every morning", "--max-new-tokens", "6")[0]["text"]
    assert out == shown + "\n"


def test_generate_json(capsys) -> None:
    first, second = generated(capsys, "--prompt", "Every", "--prompt", "<think>", "--max-new-tokens", "5", "--logprobs", "2")
    assert set(first) == {"prompt", "prompt_tokens", "token_ids", "text", "finish_reason", "timings", "logprobs"}
    assert (first["prompt"], second["prompt"]) == ("Every", "<think>")
    assert second["prompt_tokens"] > 4
    assert len(first["token_ids"]) == len(first["logprobs"]) == 5
    assert first["finish_reason"] == "length"
    assert set(first["timings"]) == {
        "queue_seconds", "prefill_seconds", "decode_seconds", "prefill_tokens_per_second", "decode_tokens_per_second",
    }  # fmt: skip
    entry = first["logprobs"][0]
    assert set(entry) == {"token_id", "token", "logprob", "alternatives"}
    assert entry["token_id"] == first["token_ids"][0] == entry["alternatives"][0]["token_id"]
    assert len(entry["alternatives"]) == 2
    alone = generated(capsys, "--prompt", "Every", "--max-new-tokens", "5")[0]
    assert "logprobs" not in alone
    assert alone["token_ids"] == first["token_ids"]


def test_generate_one_token_has_no_decode_rate(capsys) -> None:
    (only,) = generated(capsys, "--prompt", "x", "--max-new-tokens", "1")
    assert only["timings"]["decode_tokens_per_second"] is None
    assert len(only["token_ids"]) == 1


def test_generate_goes_on_until_max_seq_len_by_default(capsys) -> None:
    (only,) = generated(capsys, "--prompt", "x", "--max-seq-len", "20")
    assert only["prompt_tokens"] + len(only["token_ids"]) == 20
    assert only["finish_reason"] == "length"


def test_generate_sampled_is_reproducible(capsys) -> None:
    options = ["--max-new-tokens", "12", "--temperature", "1.2", "--top-k", "50", "--top-p", "0.9", "--seed"]
    first, second = generated(capsys, "--prompt", "a", "--prompt", "a", *options, "4")
    assert first["token_ids"] == second["token_ids"]
    assert (
        generated(capsys, "--prompt", "a", *options, "4", "--expert-weight-format", "fp4_bytes")[0]["token_ids"]
        == first["token_ids"]
    )
    assert generated(capsys, "--prompt", "a", *options, "5")[0]["token_ids"] != first["token_ids"]


def test_generate_blocks_of_several_prompts(capsys, tmp_path, monkeypatch) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("two\nlines\n", encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("公园".encode())))
    options = [
        "--prompt-file",
        str(file),
        "--prompt-file",
        "-",
        "--prompt",
        "first",
        "--max-new-tokens",
        "2",
        "--logprobs",
        "1",
    ]
    assert main([*GENERATE, *options, "--max-batch", "2"]) == 0
    out = capsys.readouterr().out
    assert '=== prompt 1 of 3: "first" (2 tokens, length)' in out
    assert '=== prompt 2 of 3: "two\\nlines\\n" (2 tokens, length)' in out
    assert '=== prompt 3 of 3: "公园" (2 tokens, length)' in out
    assert out.count("log-probability") == 3


def test_generate_stops_at_a_stop_string(capsys) -> None:
    whole = generated(capsys, "--prompt", "Every", "--max-new-tokens", "12")[0]["text"]
    stop = next(char for char in whole[2:] if char.isascii() and char.isalpha())
    (only,) = generated(capsys, "--prompt", "Every", "--max-new-tokens", "12", "--stop", stop, "--stop", "never")
    assert only["finish_reason"] == "stop_string"
    assert only["text"] == whole[: whole.index(stop)]


def test_generate_streams_to_a_terminal(capsys, monkeypatch) -> None:
    text = generated(capsys, "--prompt", "Every", "--max-new-tokens", "20")[0]["text"]
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main([*GENERATE, "--prompt", "Every", "--max-new-tokens", "20"]) == 0
    assert terminal.getvalue() == printable(text) + "\n"
    assert "\x1b" not in terminal.getvalue()


def test_score(capsys) -> None:
    assert main([*SCORE, "--text", "[bold]Every", "--text", "y" * 60]) == 0
    out, err = capsys.readouterr()
    assert '"[bold]Every"' in out and "y" * 40 + "…" in out and "bits per byte" in out
    assert "scored" in err and "tokens/s" in err
    assert main([*SCORE, "--text", "Every", "--json"]) == 0
    (only,) = json.loads(capsys.readouterr().out)
    assert set(only) == {"text", "token_ids", "token_logprobs", "logprob", "perplexity", "bits_per_byte"}
    assert only["logprob"] == pytest.approx(sum(only["token_logprobs"]))


def test_inspect(capsys) -> None:
    assert main(["inspect", str(CKPT)]) == 0
    out = capsys.readouterr().out
    for part in ("8 of width 128", "the drafter only", "nothing in a text run", "F8_E8M0", "4 files, 6.2 MiB"):
        assert part in out
    assert main(["inspect", str(CKPT), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"config", "ignored_config_keys", "files", "total_bytes", "groups"}
    assert sum(group["bytes"] for group in found["groups"]) == found["total_bytes"] == 6461402
    assert {group["used_by"] for group in found["groups"]} == {"text", "the drafter only", "nothing in a text run"}
    assert found["config"]["sliding_window"] == 16


def test_unknown_configuration_keys_are_reported(capsys, tmp_path) -> None:
    folder = tmp_path / "ckpt"
    shutil.copytree(CKPT, folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["new_feature"] = 3
    (folder / "config.json").write_text(json.dumps(config))
    for command in (
        ["inspect", str(folder)],
        ["generate", "--model-path", str(folder), "--prompt", "x", "--max-new-tokens", "1"],
    ):
        assert main(command) == 0
        err = capsys.readouterr().err
        assert f"warning: {folder}/config.json: these keys are not known and are ignored: new_feature\n" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND (see 'deepseek-v41 --help')"),
        (["translate"], "invalid choice: 'translate'"),
        (["generate", "--prompt", "x"], "--model-path (see 'deepseek-v41 generate --help')"),
        (["generate", "--model-path", "/nowhere", "--prompt", "x"], "error: /nowhere: cannot be read (No such file"),
        (["inspect", "/nowhere"], "error: /nowhere: cannot be read (No such file"),
        ([*GENERATE], "--prompt: give at least one, or a --prompt-file"),
        ([*GENERATE, "--prompt", "x", "--top-k", "few"], "argument --top-k: invalid int value: 'few'"),
        ([*GENERATE, "--prompt", "x", "--top-p", "0"], "top_p: expected a number above 0 and at most 1 (off), found 0.0"),
        (
            [*GENERATE, "--prompt", "x", "--temperature", "nan"],
            "temperature: expected a number, 0 (greedy) or 1e-06 to 1e+06, found nan",
        ),
        ([*GENERATE, "--prompt", "x", "--numerics", "fp64"], "argument --numerics: invalid choice: 'fp64'"),
        ([*GENERATE, "--prompt", "x", "--max-batch", "0"], "max_batch: expected an integer of 1 or more, found 0"),
        ([*GENERATE, "--prompt", "x", "--max-seq-len", "257"], "max_seq_len: expected 1 to max_position_embeddings 256"),
        ([*GENERATE, "--prompt", "x", "--max-new-tokens", "0"], "max_new_tokens: expected an integer of 1 or more"),
        ([*GENERATE, "--prompt", "x", "--stop", ""], "stop_strings: expected a list of texts that are not empty"),
        (
            [*GENERATE, "--prompt", "x", "--prompt", "y" * 300],
            "prompt 2 of 2: prompt: 301 tokens and max_new_tokens 1 make 302",
        ),
        ([*GENERATE, "--prompt", "x\udcff"], "text: character 1 is half of a surrogate pair"),
        ([*GENERATE, "--prompt-file", "/nowhere/x"], "--prompt-file: /nowhere/x: cannot be read (No such file or directory)"),
        ([*GENERATE, "--prompt-file", "-", "--prompt-file", "-"], "--prompt-file: stdin ('-') can be read once only"),
        ([*GENERATE, "--prompt-file", str(CKPT / "model-00001-of-00004.safetensors")], "is not UTF-8 text (byte "),
        ([*SCORE, "--text", "x", "--text", ""], "text 2 of 2: text: is empty; give at least one character"),
        ([*SCORE], "--text: give at least one, or a --text-file"),
    ],
)
def test_user_errors_are_one_line(arguments: list[str], message: str, capsys) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    last = err.splitlines()[-1]
    assert out == ""
    assert last.startswith("error: ") and message in last
    assert "Traceback" not in err


def test_a_broken_checkpoint_is_one_line(capsys, tmp_path) -> None:
    folder = tmp_path / "ckpt"
    shutil.copytree(CKPT, folder)
    (folder / "model-00002-of-00004.safetensors").write_bytes(b"")
    for command in (["inspect", str(folder)], ["generate", "--model-path", str(folder), "--prompt", "x"]):
        assert main(command) == 2
        err = capsys.readouterr().err
        assert err.startswith("error: ") and "model-00002-of-00004.safetensors" in err and err.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], *([command.__name__.rpartition(".")[2]] for command in COMMANDS)])
def test_help(arguments: list[str], capsys) -> None:
    assert main([*arguments, "--help"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith(f"usage: {' '.join(['deepseek-v41', *arguments])} ")
    assert max(len(line) for line in out.splitlines()) <= 130


def test_interrupt(capsys, monkeypatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("modeling_deepseek_v41.engine.Engine.step", interrupted)
    assert main([*GENERATE, "--prompt", "x"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted"


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_closed_pipe_is_no_error(options: list[str]) -> None:
    """A process of its own: the pipe's other end is closed before anything is written."""
    command = [sys.executable, "-m", "modeling_deepseek_v41", "inspect", str(CKPT), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        error = process.stderr.read()
    assert (process.returncode, error) == (0, b"")


def test_text_that_could_steer_a_terminal_is_escaped() -> None:
    assert printable("a\x1b[2Jb\tc\n\x7f\x9bé") == "a\\x1b[2Jb\tc\n\\x7f\\x9bé"
    assert quoted("a\x1b\n" + "b" * 5, 4) == '"a\\x1b\\nb…"'


@pytest.mark.parametrize("k", [[], ["1"], ["3"]])
def test_generate_speculates(capsys, k: list[str]) -> None:
    options = ["--prompt", "Every morning", "--prompt", "x", "--max-new-tokens", "20"]
    plain = generated(capsys, *options)
    found = generated(capsys, *options, "--speculate", *k)
    for one, other in zip(plain, found, strict=True):
        assert one["token_ids"] == other["token_ids"]
        assert "speculation" not in one
        stats = other["speculation"]
        assert stats["num_draft_tokens"] == int((k or ["5"])[0])
        assert stats["tokens"] == 19 == stats["steps"] + sum(stats["accepted"])
        assert sum(band["judged"] for band in stats["confidence_bands"]) == sum(stats["judged"])


def test_generate_tells_what_speculation_did(capsys) -> None:
    assert main([*GENERATE, "--prompt", "Every morning", "--max-new-tokens", "20", "--speculate"]) == 0
    err = capsys.readouterr().err
    assert "not used: vision (37 tensors" in err
    assert "speculated 5 drafts per step, 1." in err and "(19 in " in err
    assert "confidence drafts kept, by sigmoid(confidence): 0." in err
    assert main([*GENERATE, "--prompt", "x", "--max-new-tokens", "1", "--speculate"]) == 0
    assert "no step was needed" in capsys.readouterr().err


def test_generate_samples_drafts(capsys) -> None:
    options = [
        "--prompt",
        "a",
        "--max-new-tokens",
        "12",
        "--temperature",
        "1.2",
        "--seed",
        "4",
        "--speculate",
        "--sample-drafts",
    ]
    assert generated(capsys, *options)[0]["token_ids"] == generated(capsys, *options)[0]["token_ids"]
    assert main([*GENERATE, "--prompt", "a", "--max-new-tokens", "2", "--sample-drafts"]) == 0
    assert "--sample-drafts has no effect without --speculate" in capsys.readouterr().err
    assert main([*GENERATE, "--prompt", "a", "--max-new-tokens", "2", "--sample-drafts", "--speculate"]) == 0
    assert "--sample-drafts has no effect without a --temperature above 0" in capsys.readouterr().err


@pytest.mark.parametrize("k", ["0", "6", "-1"])
def test_generate_refuses_blocks_that_the_drafter_does_not_have(capsys, k: str) -> None:
    assert main([*GENERATE, "--prompt", "a", "--speculate", k]) == 2
    assert f"num_draft_tokens: expected 1 to 5, found {k}; the drafter was trained on blocks" in capsys.readouterr().err
