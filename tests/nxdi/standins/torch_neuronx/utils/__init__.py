# SPDX-License-Identifier: Apache-2.0
"""Stand-in: the platform is the one that is asked for, trn2 by default."""

import os


def get_platform_target(*args, **kwargs):
    """The platform's name."""
    return os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
