# SPDX-License-Identifier: Apache-2.0
"""A NumPy emulator of the part of NKI 0.6 (trn2) that this repository's kernels use.

It checks the documented rules of the hardware (rules.py) and stops at the first broken one with the kernel's line. It records
every instruction (trace.py) with predicted costs (costs.py). It is for tests: importing.py offers it under the name ``nki``
where the real package is absent, and never instead of it.
"""

from .importing import load_kernel, provide_nki
from .kernel import Result, real_nki, run
from .lint import lint
from .rules import RULES, RuleError
from .trace import Trace

__all__ = ["RULES", "Result", "RuleError", "Trace", "lint", "load_kernel", "provide_nki", "real_nki", "run"]
