# SPDX-License-Identifier: Apache-2.0
"""``python -m modeling_deepseek_v41`` is the command ``deepseek-v41``."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
