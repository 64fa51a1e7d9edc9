# SPDX-License-Identifier: Apache-2.0
"""Commands on several ranks: processes of their own, and torchrun's. Same output, one voice, one message, no hang."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from modeling_deepseek_v41.cli import main

HERE = Path(__file__).resolve().parent
GOLDEN = HERE.parent / "data" / "golden" / "tiny_a"
CKPT = GOLDEN / "ckpt"
MODEL = ["--model-path", str(CKPT), "--numerics", "fp32", "--kernels", "torch"]
MODULE = ["-m", "modeling_deepseek_v41"]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
SECONDS = 200


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *arguments], input=stdin, capture_output=True, text=True, timeout=SECONDS, check=False
    )


def tokens(out: str) -> list[list[int]]:
    return [completion["token_ids"] for completion in json.loads(out)]


def alone(capsys: pytest.CaptureFixture, *options: str) -> list[list[int]]:
    assert main(["generate", *MODEL, "--json", *options]) == 0
    return tokens(capsys.readouterr().out)


def test_generate_on_two_ranks(capsys: pytest.CaptureFixture) -> None:
    """Two prompts, one of them from stdin, with drafts; the text is that of one process, and is printed once."""
    options = ["--prompt", "Every morning", "--max-new-tokens", "8", "--json"]
    ranks = run(*MODULE, "generate", *MODEL, *options, "--prompt-file", "-", "--speculate", "--world-size", "2", stdin="Once")
    assert ranks.returncode == 0, ranks.stderr
    assert tokens(ranks.stdout) == alone(capsys, *options, "--prompt", "Once")
    assert ranks.stderr.count("weights") == 1 and "2 ranks: attention groups of 2" in ranks.stderr
    assert "speculated" in ranks.stderr


@pytest.mark.slow
def test_generate_under_torchrun(capsys: pytest.CaptureFixture) -> None:
    options = ["--prompt", "Every morning", "--max-new-tokens", "8", "--json"]
    ranks = run(*TORCHRUN, *MODULE, "generate", *MODEL, *options, "--attn-tp-degree", "1", "--moe-ep-degree", "2")
    assert ranks.returncode == 0, ranks.stderr
    assert tokens(ranks.stdout) == alone(capsys, *options)
    assert ranks.stderr.count("ended by") == 1 and "attention groups of 1" in ranks.stderr


@pytest.mark.slow
def test_ranks_share_the_seed_that_nobody_gave() -> None:
    """Sampled drafts and tokens: ranks that drew other numbers would stop or wait for each other."""
    options = ["--prompt", "a", "--prompt", "b", "--temperature", "1.5", "--max-new-tokens", "24", "--json"]
    ranks = run(*MODULE, "generate", *MODEL, *options, "--speculate", "--sample-drafts", "--world-size", "4")
    assert ranks.returncode == 0, ranks.stderr
    assert [len(ids) for ids in tokens(ranks.stdout)] == [24, 24]


@pytest.mark.slow
def test_score_on_two_ranks(capsys: pytest.CaptureFixture) -> None:
    options = ["score", *MODEL, "--text", "The ferry leaves at seven.", "--json"]
    ranks = run(*MODULE, *options, "--world-size", "2")
    assert ranks.returncode == 0, ranks.stderr
    assert main(options) == 0
    (expected,), (found,) = json.loads(capsys.readouterr().out), json.loads(ranks.stdout)
    assert found["logprob"] == pytest.approx(expected["logprob"], rel=1e-5)


def test_verify_on_two_ranks() -> None:
    options = ["verify", "--model-path", str(CKPT), "--golden", str(GOLDEN), "--mode", "f32_noq", "--json"]
    ranks = run(*MODULE, *options, "--world-size", "2")
    assert ranks.returncode == 0, ranks.stderr
    assert json.loads(ranks.stdout)["ok"] and not ranks.stderr


@pytest.mark.slow
def test_verify_every_mode_on_two_ranks() -> None:
    """ref where no expert's columns are divided; where they are, it is said that ref was left out."""
    options = ["verify", "--model-path", str(CKPT), "--golden", str(GOLDEN), "--world-size", "2"]
    whole = run(*MODULE, *options, "--attn-tp-degree", "1", "--json")
    assert [mode["mode"] for mode in json.loads(whole.stdout)["modes"]] == ["f32", "f32_noq", "ref"]
    assert whole.returncode == 0 and not json.loads(whole.stdout)["left_out"]
    split = run(*TORCHRUN, *MODULE, *options[:-2])
    assert split.returncode == 0, split.stderr
    assert "not checked, ref: its rounding points are those of whole experts" in split.stdout
    assert split.stdout.rstrip().endswith("f32 ok, f32_noq ok")
    refused = run(*MODULE, *options, "--mode", "ref")
    assert refused.returncode == 2 and "mode ref: its rounding points" in refused.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--world-size", "0"], "world_size: expected an integer of 1 or more, found 0"),
        (["--world-size", "2", "--moe-ep-degree", "3"], "moe_ep_degree: 3 does not divide world_size, which is 2"),
        (["--attn-tp-degree", "2"], "attn_tp_degree: 2 does not divide world_size, which is 1"),
        (["--world-size", "2", "--max-new-tokens", "999"], "prompt 1 of 1: "),
    ],
)
def test_what_cannot_run_starts_no_rank(capsys: pytest.CaptureFixture, options: list[str], words: str) -> None:
    assert main(["generate", *MODEL, "--prompt", "x", *options]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"RANK": None}, "RANK: expected a number from torchrun, found None; start the ranks with torchrun"),
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE: expected a number from torchrun, found 'abc'"),
        ({"MASTER_PORT": "xx"}, "MASTER_PORT: expected a number from torchrun, found 'xx'"),
        ({"RANK": "5"}, "RANK: expected 0 to WORLD_SIZE - 1, found 5 of 2"),
    ],
)
def test_a_torchrun_that_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, change: dict[str, str | None], words: str
) -> None:
    good = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
    for name, value in (good | change).items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    assert main(["score", *MODEL, "--text", "A"]) == 2
    assert words in capsys.readouterr().err


def failing(how: str, *launcher: str) -> subprocess.CompletedProcess:
    size = [] if launcher else ["--world-size", "2"]
    return run(*launcher, str(HERE / "failing.py"), how, *size)


@pytest.mark.parametrize(
    ("how", "code", "message"),
    [
        ("user", 2, "error: rank 1: what a user can cause"),
        ("first user", 2, "error: rank 0: what a user can cause"),
        ("killed", 1, "error: rank 1: ended by signal 9 (SIGKILL), perhaps for want of memory"),
    ],
)
def test_a_rank_that_fails_ends_all_with_one_message(how: str, code: int, message: str) -> None:
    ranks = failing(how)
    assert (ranks.returncode, ranks.stderr.strip()) == (code, message)
    assert ranks.stdout == "prepared\nstarted\n"


@pytest.mark.slow
def test_other_endings() -> None:
    ranks = failing("fault")
    assert ranks.returncode == 1 and ranks.stderr.startswith("error: rank 1: Traceback")
    assert ranks.stderr.rstrip().endswith("AssertionError: what nobody foresaw") and ranks.stderr.count("Traceback") == 1
    ranks = failing("first killed")
    assert (ranks.returncode, "rank 0: ended by signal 9" in ranks.stderr) == (1, True)
    ranks = failing("first pipe")
    assert (ranks.returncode, ranks.stderr) == (0, "")
    ranks = failing("code")
    assert (ranks.returncode, ranks.stdout, ranks.stderr) == (3, "prepared\nstarted\ndone\n", "")
    ranks = failing("unprepared")
    assert (ranks.returncode, ranks.stderr) == (2, "error: how: cannot be prepared\n")


@pytest.mark.slow
def test_failures_under_torchrun() -> None:
    """torchrun adds its own report behind ours."""
    for how, message in (
        ("user", "error: rank 1: what a user can cause"),
        ("unprepared", "error: rank 0: how: cannot be prepared"),
    ):
        ranks = failing(how, *TORCHRUN)
        assert ranks.returncode != 0 and ranks.stderr.count("error: rank") == 1
        assert message in ranks.stderr
    ranks = run(*TORCHRUN, str(HERE / "failing.py"), "code", "--world-size", "4")
    assert "error: world_size: expected 2, the processes that torchrun started, found 4" in ranks.stderr
    assert ranks.stderr.count("error: world_size") == 1
