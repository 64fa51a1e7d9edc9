# SPDX-License-Identifier: Apache-2.0
"""What went wrong in words: the same for a command in one process and for one of many ranks."""

import traceback

from ..errors import DeepseekV41Error


def explained(error: BaseException) -> tuple[int, str]:
    """(exit code, one line for the user) of what a user can cause; (1, the whole traceback) of anything else.

    The line is empty where the reader of the output went away, which is no error.
    """
    if isinstance(error, DeepseekV41Error):
        return 2, " ".join(str(error).split())
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted"
    if isinstance(error, MemoryError):
        return 2, f"not enough memory {error}; lower --max-seq-len or --max-batch"
    if isinstance(error, BrokenPipeError):
        return 0, ""
    if isinstance(error, OSError):
        return 2, f"{error.filename or 'output'}: {error.strerror}"
    return 1, "".join(traceback.format_exception(error)).rstrip()
