# SPDX-License-Identifier: Apache-2.0
"""Where NxD and NxDI are, and how a test runs something on them: one process per mode, since to_cpu() leaves its mark."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TINY = ROOT / "tests" / "data" / "golden" / "tiny_a"
PACKAGES = {"neuronx_distributed": "NXD_SRC", "neuronx_distributed_inference": "NXDI_SRC"}
"""The packages; where one is not installed, the variable names the ``src`` folder of its repository's checkout."""


def missing() -> list[str]:
    """What is missing to run NxDI here: empty where it can run."""
    lines = []
    for package, variable in PACKAGES.items():
        folder = os.environ.get(variable, "")
        if importlib.util.find_spec(package) is None and not Path(folder, package).is_dir():
            lines.append(f"{package} (install it, or set {variable} to the src folder of its checkout)")
    if importlib.util.find_spec("torch_xla") is None:
        lines.append("torch_xla (pip install torch_xla==2.9.0 torch==2.9.0)")
    return lines


def environment(cpu_mode: bool) -> dict[str, str]:
    """A child's environment. Stand-ins come last on the path and only where no Neuron SDK is installed."""
    paths = [str(ROOT), str(HERE)]
    paths += [os.environ[name] for package, name in PACKAGES.items() if importlib.util.find_spec(package) is None]
    if importlib.util.find_spec("torch_neuronx") is None:
        paths.append(str(HERE / "standins"))
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "NXD_CPU_MODE": str(int(cpu_mode)),
        "PJRT_DEVICE": "CPU",
        "XLA_FLAGS": "--xla_allow_excess_precision=false",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }


def run(
    arguments: list[str], folder: Path, *, ranks: int = 1, cpu_mode: bool = True, timeout: int = 3600
) -> subprocess.CompletedProcess[str]:
    """``python ARGUMENTS`` in ``folder``, or the same under torchrun."""
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    env = environment(cpu_mode) | {"BASE_COMPILE_WORK_DIR": f"{folder}/work/"}
    return subprocess.run(
        [*start, *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=timeout, check=False
    )


def child(command: str, options: dict[str, Any], folder: Path, *, ranks: int = 1, cpu_mode: bool = True) -> list[Any]:
    """What ``child.py COMMAND OPTIONS`` found, one entry per rank in rank order."""
    script = [str(HERE / "child.py"), command, json.dumps(options)]
    done = run(script, folder, ranks=ranks, cpu_mode=cpu_mode)
    found = [json.loads(line[line.index("RESULT ") + 7 :]) for line in done.stdout.splitlines() if "RESULT " in line]
    assert done.returncode == 0 and len(found) == ranks, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return [entry["found"] for entry in sorted(found, key=lambda entry: entry["rank"])]
