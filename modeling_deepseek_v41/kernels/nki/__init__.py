# SPDX-License-Identifier: Apache-2.0
"""Kernels for Trainium2 in NKI. Importing a kernel needs ``nki``; layouts, plans and references do not."""
