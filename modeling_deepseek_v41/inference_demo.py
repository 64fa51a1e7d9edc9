# SPDX-License-Identifier: Apache-2.0
"""``python -m modeling_deepseek_v41.inference_demo``: NxD Inference's inference_demo for this model. Needs NxD Inference."""

import sys
from collections.abc import Sequence

from .nxdi import MissingNxDI, demo_main


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line ``argv`` and returns its exit code; without NxD Inference says what to install."""
    try:
        run = demo_main()
    except MissingNxDI as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return run(argv)


if __name__ == "__main__":
    sys.exit(main())
