# SPDX-License-Identifier: Apache-2.0
"""The errors a user can cause. Each message names the file, the key, what was found, what was expected and what to do."""


class DeepseekV41Error(ValueError):
    """Base of every error that this package raises for bad input."""


class ConfigError(DeepseekV41Error):
    """A configuration that cannot be read, or that has no consistent reading."""


class CheckpointError(DeepseekV41Error):
    """A checkpoint folder, shard or tensor that is not what its configuration asks for."""


class RequestError(DeepseekV41Error):
    """A prompt or an option that the model cannot serve."""
