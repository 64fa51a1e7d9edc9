# SPDX-License-Identifier: Apache-2.0
"""The NKI kernels against the package's PyTorch functions: in the emulator, or in nki.simulate where nki is installed."""
